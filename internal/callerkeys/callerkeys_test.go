package callerkeys

import (
	"maps"
	"net/http"
	"slices"
	"testing"
)

func TestKeysLeaveAQueryAndNothingElseDoes(t *testing.T) {
	for query, want := range map[string]string{
		"":                              "",
		"a=1&&b=%20&":                   "a=1&&b=%20&",
		"api-key=k":                     "",
		"api-key=k&a=1":                 "a=1",
		"a=1&API-Key=k":                 "a=1",
		"a=1&api%2Dkey=k&b=2":           "a=1&b=2",
		"a=1;subscription-key=k;b=2":    "a=1;b=2",
		"a=1&x=y;api-key=k":             "a=1&x=y",
		"api-key=&a=1":                  "a=1",
		"api-version=2024-10-21&a=k;v1": "api-version=2024-10-21&a=k;v1",
	} {
		_, _, got := Take(nil, query)
		if got != want {
			t.Errorf("of %q there is left %q, want %q", query, got, want)
		}
	}
}

func TestAKeyIsTakenWhereverSDKsPutOne(t *testing.T) {
	header := http.Header{
		"Authorization":          {"Bearer one", "Basic dXNlcjpwYXNz"},
		"Api-Key":                {"two"},
		"Openai-Organization":    {"org"},
		"Cookie":                 {"a=b"},
		"X-Forwarded-For":        {"192.0.2.1"},
		"Sec-Websocket-Protocol": {"realtime, openai-insecure-api-key.three, openai-beta.realtime-v1"},
		"User-Agent":             {"curl"},
	}
	before := header.Clone()
	presented, goesOn, query := Take(header, "api-key=four&model=m;subscription-key=five")
	var keys []string
	presented.Each(func(key string) { keys = append(keys, key) })
	slices.Sort(keys)
	if want := []string{"five", "four", "one", "three", "two"}; !slices.Equal(keys, want) {
		t.Errorf("found the keys %q, want %q", keys, want)
	}
	if want := (http.Header{"User-Agent": {"curl"}, "Sec-Websocket-Protocol": {"realtime, openai-beta.realtime-v1"}}); !maps.EqualFunc(goesOn, want, slices.Equal) {
		t.Errorf("there goes on %q, want %q", goesOn, want)
	}
	if query != "model=m" {
		t.Errorf("there goes on the query %q", query)
	}
	presented.Remove(func(key string) bool { return key != "two" })
	isKept := func(l Line) bool { return l.Name == "Api-Key" && slices.Equal(l.Values, []string{"two"}) }
	if !slices.ContainsFunc(presented.Header, isKept) || presented.None() {
		t.Errorf("a key that does not match was removed: %q", presented)
	}
	presented.Remove(func(string) bool { return true })
	if !presented.None() {
		t.Errorf("there are keys left: %q", presented)
	}
	if !maps.EqualFunc(header, before, slices.Equal) {
		t.Errorf("the request's own header changed to %q", header)
	}
}

func TestAMaskHidesKeysOnly(t *testing.T) {
	for query, want := range map[string]string{
		"model=x&API-Key=k&subscription%2Dkey=k&y=%20": "model=x&API-Key=*&subscription%2Dkey=*&y=%20",
		"a=1;api-key=k":   "a=1;api-key=*",
		"a=api-key&b=&c=": "a=api-key&b=&c=",
	} {
		if got := MaskQuery(query, "*"); got != want {
			t.Errorf("%q is masked as %q, want %q", query, got, want)
		}
	}
}

func TestEveryHeaderThatHoldsAKeyIsACredential(t *testing.T) {
	for _, name := range append([]string{"Openai-Organization", "openai-project"}, Headers...) {
		if !IsCredential(name) {
			t.Errorf("%s is not taken for a credential", name)
		}
	}
	for _, name := range []string{"Cookie", "X-Forwarded-For", "User-Agent", "Connection"} {
		if IsCredential(name) {
			t.Errorf("%s is taken for a credential", name)
		}
	}
}
