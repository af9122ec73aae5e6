package keys

import (
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
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
		"key=k&a=1&access_token=k":      "a=1",
		"a=1%26client-secret=k&b=2":     "a=1&b=2",
		"a=1;&key=k;;b=2":               "a=1;;b=2",
		"metadata%5Bkey%5D=v&keys=1":    "metadata%5Bkey%5D=v&keys=1",
		"key":                           "",
		"a%ZZ_key=k&%ZZ=1":              "%ZZ=1",
	} {
		_, _, got := taken(nil, query)
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
	presented, goesOn, query := taken(header, "api-key=four&model=m;subscription-key=five")
	var keys []string
	presented.each(func(key string) { keys = append(keys, key) })
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
	presented.remove(func(key string, _ bool) bool { return key != "two" })
	isKept := func(l Line) bool { return l.Name == "Api-Key" && slices.Equal(l.Values, []string{"two"}) }
	if !slices.ContainsFunc(presented.Header, isKept) || presented.None() {
		t.Errorf("a key that does not match was removed: %q", presented.Header)
	}
	presented.remove(func(string, bool) bool { return true })
	if !presented.None() {
		t.Errorf("there are keys left: %q", presented.Header)
	}
	if !maps.EqualFunc(header, before, slices.Equal) {
		t.Errorf("the request's own header changed to %q", header)
	}
}

func TestAMaskHidesKeysOnly(t *testing.T) {
	for query, want := range map[string]string{
		"model=x&API-Key=k&subscription%2Dkey=k&y=%20": "model=x&API-Key=*&subscription%2Dkey=*&y=%20",
		"a=1;api-key=k":                    "a=1;api-key=*",
		"a=api-key&b=&c=":                  "a=api-key&b=&c=",
		"access_token=k&tokens=5&X_Auth=k": "access_token=*&tokens=5&X_Auth=*",
		"dial tcp: no key=k":               "dial tcp: no key=k",
		"client keys":                      "client keys",
		`{"key":"a=b"}`:                    `{"key":"a=b"}`,
	} {
		if got := MaskQuery(query); got != strings.ReplaceAll(want, "*", Redacted) {
			t.Errorf("%q is masked as %q, want %q", query, got, want)
		}
	}
}

func TestEveryHeaderThatHoldsAKeyIsACredential(t *testing.T) {
	for _, name := range append([]string{"Openai-Organization", "openai-project"}, CallerHeaders...) {
		if !isCredential(name) {
			t.Errorf("%s is not taken for a credential", name)
		}
	}
	for _, name := range []string{"Cookie", "X-Forwarded-For", "User-Agent", "Connection"} {
		if isCredential(name) {
			t.Errorf("%s is taken for a credential", name)
		}
	}
}

func TestANameHoldsAKeyByItsWords(t *testing.T) {
	for _, name := range []string{
		"key", "Api-Key", "x_api_key", "X-Goog-ApiKey", "Auth", "helicone-auth", "X-Session-TOKEN", "client_secret-2", "Set-Cookie", "Cookie",
		"aws_credential", "user-password-hash", "Cf-Aig-Authorization", "-key-", "_token",
	} {
		if !HoldsKey(name) {
			t.Errorf("%s is not taken for a key", name)
		}
	}
	for _, name := range []string{
		"", "-", "keys", "monkey", "keyboard-layout", "Author", "Authority", "X-Max-Tokens", "cookies", "secrets", "credentials", "Authenticate",
		"Idempotency-Key", "idempotency-key", "Sec-WebSocket-Key", "Sec-Websocket-Key", "api-version", "X-Stainless-Retry-Count",
	} {
		if HoldsKey(name) {
			t.Errorf("%s is taken for a key", name)
		}
	}
}

func TestAKeyIsFoundByItsValue(t *testing.T) {
	const key = "sk-1234567890"
	for name, c := range map[string]struct {
		header http.Header
		query  string
	}{
		"of Authorization":         {http.Header{"Authorization": {"Bearer " + key}}, ""},
		"of a gateway's header":    {http.Header{"X-Portkey-Api-Key": {key}}, ""},
		"of the second line":       {http.Header{"Api-Key": {"another-key", key}}, ""},
		"of a parameter":           {http.Header{}, "api-key=" + key},
		"of a gateway's parameter": {http.Header{}, "access%5Ftoken=Bearer+" + key},
		"of a subprotocol":         {http.Header{"Sec-Websocket-Protocol": {"openai-insecure-api-key." + key}}, ""},
		"of several":               {http.Header{"Authorization": {"Bearer " + key}, "X-Api-Key": {"another-key"}}, "key=a-third-key"},
	} {
		t.Run(name, func(t *testing.T) {
			for value, passes := range map[string]bool{
				key: false, "Bearer " + key: false, " bearer  " + key + " ": false, "Token " + key: false,
				key + "-and-more": true, "x" + key: true, "": true, "Bearer": true, "bearer of " + key: true,
			} {
				header := c.header.Clone()
				header["X-Team"] = []string{"kept", value}
				header["X-Kept"] = []string{"kept"}
				query := c.query + "&team=" + url.QueryEscape(value) + "&kept=1"
				_, goesOn, goesOnQuery := taken(header, query)
				if got := goesOn["X-Team"] != nil; got != passes || goesOn["X-Kept"] == nil {
					t.Errorf("%q: there goes on %v", value, goesOn)
				}
				if got, err := url.ParseQuery(goesOnQuery); err != nil || got.Has("team") != passes || !got.Has("kept") {
					t.Errorf("%q: there goes on the query %s", value, goesOnQuery)
				}
			}
		})
	}
	// what callers without a key send
	_, goesOn, query := taken(http.Header{"Authorization": {"Bearer EMPTY"}, "X-Team": {"EMPTY"}}, "model=EMPTY")
	if goesOn["X-Team"] == nil || query != "model=EMPTY" {
		t.Errorf("a word in place of a key is taken for one: %v %s", goesOn, query)
	}
}

func TestAKeyThatIsRemovedIsRemovedEverywhere(t *testing.T) {
	const client, own = "client-key-of-alice", "own-key-of-the-caller"
	header := http.Header{
		"Authorization": {"Bearer " + own}, "Api-Key": {client}, "X-Goog-Api-Key": {client}, "Cf-Aig-Authorization": {"Bearer " + own},
		"Openai-Organization":    {"org-1"},
		"Openai-Project":         {client},
		"Sec-Websocket-Protocol": {"realtime, " + client + ", openai-insecure-api-key." + own},
	}
	presented, _, _ := taken(header, "team="+client+"&key="+own+"&token="+client+"&x=1")
	identify := 0
	presented.remove(func(key string, identifies bool) bool {
		if identifies {
			identify++
		}
		return key == client
	})
	want := []Line{{"Authorization", []string{"Bearer " + own}}, {"Cf-Aig-Authorization", []string{"Bearer " + own}}, {"Openai-Organization", []string{"org-1"}}}
	slices.SortFunc(presented.Header, func(a, b Line) int { return strings.Compare(a.Name, b.Name) })
	if !slices.EqualFunc(presented.Header, want, func(a, b Line) bool { return a.Name == b.Name && slices.Equal(a.Values, b.Values) }) {
		t.Errorf("there are left %v", presented.Header)
	}
	if presented.RawQuery != "key="+own+"&x=1" || !slices.Equal(presented.Protocols, []string{"realtime, openai-insecure-api-key." + own}) {
		t.Errorf("there are left the query %s and the subprotocols %q", presented.RawQuery, presented.Protocols)
	}
	if identify != 3 {
		t.Errorf("%d keys identify the caller, want those of Authorization, Api-Key and the subprotocol", identify)
	}
	others, _, _ := taken(http.Header{"X-Goog-Api-Key": {own}}, "key="+own)
	if !others.None() {
		t.Error("keys for something else identify a caller")
	}
}

// sdk is the header of an SDK's request, with what proxies add.
func sdk() http.Header {
	return http.Header{
		"Accept": {"application/json"}, "Accept-Encoding": {"gzip, deflate"}, "Authorization": {"Bearer client-key-of-alice"}, "Connection": {"keep-alive"},
		"Content-Length": {"200"}, "Content-Type": {"application/json"}, "User-Agent": {"OpenAI/Python 2.8.1"}, "X-Forwarded-For": {"192.0.2.1"},
		"X-Stainless-Arch": {"x64"}, "X-Stainless-Async": {"false"}, "X-Stainless-Lang": {"python"}, "X-Stainless-Os": {"Linux"},
		"X-Stainless-Package-Version": {"2.8.1"}, "X-Stainless-Read-Timeout": {"600"}, "X-Stainless-Retry-Count": {"0"}, "X-Stainless-Runtime": {"CPython"},
		"X-Stainless-Runtime-Version": {"3.12.3"}, "X-Team": {"a team that has no key"},
	}
}

// taken returns the keys of a request, and the header and the query that go on.
func taken(header http.Header, rawQuery string) (presented Presented, goesOn http.Header, query string) {
	presented, query = Read(header, rawQuery)
	goesOn = presented.Outgoing(header, nil)
	if goesOn["User-Agent"][0] == "" { // which keeps net/http from adding one
		delete(goesOn, "User-Agent")
	}
	return presented, goesOn, query
}

func TestFieldsThatTheConnectionNamesDoNotGoOn(t *testing.T) {
	header := http.Header{"Connection": {"close, X-Hop"}, "X-Hop": {"1"}, "X-Team": {"a"}}
	if _, goesOn, _ := taken(header, ""); goesOn["X-Hop"] != nil || goesOn["X-Team"] == nil {
		t.Errorf("there goes on %v", goesOn)
	}
}

func TestTheUpgradeOfAnotherProtocolDoesNotGoOn(t *testing.T) {
	header := http.Header{"Connection": {"Upgrade, HTTP2-Settings"}, "Upgrade": {"h2c"}, "Http2-Settings": {"x"}, "Te": {"trailers"}}
	if _, goesOn, _ := taken(header, ""); !maps.EqualFunc(goesOn, http.Header{"Te": {"trailers"}}, slices.Equal) {
		t.Errorf("there goes on %v", goesOn)
	}
}

func TestReadingAllocatesTheKeys(t *testing.T) {
	header := sdk()
	if n := testing.AllocsPerRun(100, func() { Read(header, "api-version=2024-10-21") }); n > 2 {
		t.Errorf("%v allocations, want those of Presented", n)
	}
}

func BenchmarkRead(b *testing.B) {
	header := sdk()
	for b.Loop() {
		Read(header, "")
	}
}

func BenchmarkOutgoing(b *testing.B) {
	header := sdk()
	presented, _ := Read(header, "")
	for b.Loop() {
		presented.Outgoing(header, nil)
	}
}

func FuzzRead(f *testing.F) {
	f.Add("api-key=k&a=1;b=2%26key=x", "X-Team", "Bearer key-of-a-caller", "key-of-a-caller")
	f.Add("a%3bkey=key-of-a-caller&team=Bearer+key-of-a-caller", "x_api_key", "v", "key-of-a-caller")
	f.Fuzz(func(t *testing.T, query, name, value, key string) {
		key = strings.Join(strings.Fields(key), "")
		header := http.Header{"Authorization": {"Bearer " + key}, http.CanonicalHeaderKey(name): {value}}
		before := header.Clone()
		presented, goesOn, goesOnQuery := taken(header, query)
		if !maps.EqualFunc(header, before, slices.Equal) {
			t.Errorf("the header became %q", header)
		}
		for name, values := range goesOn {
			if HoldsKey(name) || len(key) >= minLength && slices.Contains(values, key) {
				t.Errorf("there goes on %s: %q", name, values)
			}
		}
		for _, pair := range strings.FieldsFunc(goesOnQuery, func(r rune) bool { return r == '&' || r == ';' }) {
			if name, _, _ := strings.Cut(pair, "="); HoldsKey(unescaped(name)) && !strings.Contains(strings.ToLower(name), "%3b") && !strings.Contains(name, "%26") {
				t.Errorf("of %q there goes on %q", query, goesOnQuery)
			}
		}
		if _, _, again := taken(header, goesOnQuery); again != goesOnQuery {
			t.Errorf("of %q there goes on %q, and of that %q", query, goesOnQuery, again)
		}
		presented.remove(func(string, bool) bool { return true })
		if !presented.None() {
			t.Errorf("there are left %v", presented)
		}
	})
}
