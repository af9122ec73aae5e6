package openaiapi

import (
	"net/url"
	"strings"
	"testing"
)

func TestParam(t *testing.T) {
	for _, tt := range []struct {
		name, query, param, value string
		ok                        bool
	}{
		{"alone", "model=gpt-4o", "model", "gpt-4o", true},
		{"among others", "api-version=1&deployment=gpt-4o&x=y", "deployment", "gpt-4o", true},
		{"escaped", "model=a%2Fb%20c+d", "model", "a/b c d", true},
		{"an escaped name", "mo%64el=a", "model", "a", true},
		{"another case, as Azure reads it", "Model=a", "model", "a", true},
		{"the first of two", "model=a&model=b", "model", "a", true},
		{"empty", "model=", "model", "", true},
		{"without a value", "model", "model", "", true},
		{"an equals sign in the value", "model=a=b", "model", "a=b", true},
		{"a semicolon in the value", "model=a;b", "model", "a;b", true},
		{"a semicolon separates nothing", "x=1;model=a", "model", "", false},
		{"badly escaped", "model=100%", "model", "100%", true},
		{"none", "models=a&mode=b&x=model", "model", "", false},
		{"no query", "", "model", "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if value, ok := Param(tt.query, tt.param); value != tt.value || ok != tt.ok {
				t.Errorf("%s: got %q, %v", tt.query, value, ok)
			}
		})
	}
}

func TestSetParam(t *testing.T) {
	for _, tt := range []struct{ name, query, value, want string }{
		{"alone", "model=a", "b", "model=b"},
		{"among others, which stay", "x=%7e;1&&model=a&y=a+b%20c&", "b", "x=%7e;1&&model=b&y=a+b%20c&"},
		{"every one", "model=a&x=1&Mo%64el&model=", "b", "model=b&x=1&Mo%64el=b&model=b"},
		{"added", "x=1", "b", "x=1&model=b"},
		{"added to nothing", "", "b", "model=b"},
		{"escaped", "model=a", "a/b c+d&x=1#;%", "model=a%2Fb%20c%2Bd%26x%3D1%23%3B%25"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := SetParam(tt.query, "model", tt.value); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestDropParams(t *testing.T) {
	for _, tt := range []struct{ name, query, want string }{
		{"alone", "api-key=s", ""},
		{"first", "api-key=s&a=1", "a=1"},
		{"last", "a=1&api-key=s", "a=1"},
		{"all of them", "api-key=s&a=1&subscription-key=t&api-key=u&b=2", "a=1&b=2"},
		{"any case, any escape", "API-Key=s&%61pi%2Dkey=t&a=1&api-key", "a=1"},
		{"the rest stays byte for byte", "&a=%7e+b;c&&api-key=s&%zz=1&=&", "&a=%7e+b;c&&%zz=1&=&"},
		{"others that look alike", "x-api-key=1&api-key2=2&a=api-key&apikey", "x-api-key=1&api-key2=2&a=api-key&apikey"},
		{"nothing", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := DropParams(tt.query, "api-key", "subscription-key"); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func FuzzQuery(f *testing.F) {
	f.Add("api-version=1&model=a", "model", "b")
	f.Add("a;b&&%zz=+&Model&model=", "model", "a b+c&d")
	f.Fuzz(func(t *testing.T, query, name, value string) {
		if name == "" || strings.ContainsAny(name, "%+") {
			return // no name of ours
		}
		set := SetParam(query, name, value)
		if got, ok := Param(set, name); got != value || !ok {
			t.Errorf("%q: got %q, %v, want %q", set, got, ok, value)
		}
		dropped := DropParams(set, name)
		if _, ok := Param(dropped, name); ok || dropped != DropParams(query, name) {
			t.Errorf("%q: %q is left", set, dropped)
		}

		// For net/url, too, nothing else differs.
		want, _ := url.ParseQuery(query)
		got, _ := url.ParseQuery(dropped)
		for k := range want {
			if !strings.EqualFold(k, name) && strings.Join(want[k], "&") != strings.Join(got[k], "&") {
				t.Errorf("%q: %q became %q", query, want[k], got[k])
			}
		}
	})
}

func TestWhichServersKnowStreamOptions(t *testing.T) {
	for target, want := range map[string]bool{
		"/v1/chat/completions":                                                         true,
		"/openai/v1/chat/completions":                                                  true,
		"/openai/v1/chat/completions?api-version=v1":                                   true,
		"/openai/v1/chat/completions?api-version=preview":                              true,
		"/openai/deployments/d/chat/completions?api-version=2024-10-21":                true,
		"/openai/deployments/d/chat/completions?api-version=2024-09-01-preview":        true,
		"/openai/deployments/d/chat/completions?api-version=2025-04-01-preview":        true,
		"/openai/deployments/d/chat/completions?api-version=2024-08-01-preview":        false,
		"/openai/deployments/d/chat/completions?api-version=2024-07-01-preview":        false,
		"/openai/deployments/d/chat/completions?x=1&API-Version=2024%2D06%2D01":        false,
		"/openai/deployments/d/chat/completions?api-version=2024-02-15-preview&x=2025": false,
		"/openai/deployments/d/chat/completions?api-version=2023-05-15":                false,
		"/models/chat/completions?api-version=2024-05-01-preview":                      false,
		"/models/chat/completions?api-version=2025-04-01":                              false,
		"/openai/deployments/d/chat/completions?api-version=2024":                      true,
	} {
		u, err := url.Parse(target)
		if err != nil {
			t.Fatal(err)
		}
		if got := KnowsStreamOptions(u); got != want {
			t.Errorf("%s: known: %t", target, got)
		}
	}
}
