package openailb_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// testIdentity believes what tokens say.
type testIdentity struct {
	Allowed []string `json:"tiers,omitempty"`
}

func init() { caddy.RegisterModule(new(testIdentity)) }

func (*testIdentity) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.openai_lb.caller_identity.test", New: func() caddy.Module { return new(testIdentity) }}
}

func (i *testIdentity) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{"tiers": directive.Strings(&i.Allowed)})
}

// said is the payload of a token.
type said struct {
	Name, Tier, Error string
	Issued            int64
}

func (*testIdentity) Identify(_ context.Context, token string) (*openailb.Identity, error) {
	text, _ := base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[1])
	var s said
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, err
	}
	for _, err := range []error{keys.ErrForeignToken, keys.ErrIssuerUnavailable, keys.ErrExpired, errors.New("wrong")} {
		if s.Error == err.Error() {
			return nil, err
		}
	}
	return &openailb.Identity{Name: s.Name, Tier: s.Tier, Issued: time.Unix(s.Issued, 0)}, nil
}

func (i *testIdentity) Tiers() []string { return append([]string{}, i.Allowed...) }

// Interface guards
var _ openailb.CallerIdentity = (*testIdentity)(nil)

// tokenOf returns a token that says this.
func tokenOf(s said) string {
	text, _ := json.Marshal(s)
	return "eyJhbGciOiJ0ZXN0In0." + base64.RawURLEncoding.EncodeToString(text) + ".c2lnbmF0dXJl"
}

func TestATokenIdentifiesItsCallerNextToKeys(t *testing.T) {
	key := "client-key-of-alice"
	token, foreign := tokenOf(said{Name: "bob"}), tokenOf(said{Error: keys.ErrForeignToken.Error()})
	wrong, expired := tokenOf(said{Error: "wrong"}), tokenOf(said{Error: keys.ErrExpired.Error()})
	unchecked := tokenOf(said{Error: keys.ErrIssuerUnavailable.Error()})
	for _, c := range []struct {
		name, authorization, apiKey string
		status                      int
		caller, error               string
		// passed are the credentials that the backend gets.
		passed string
	}{
		{"a token", "Bearer " + token, "", 200, "bob", "", ""},
		{"a token in the place of a key", "", token, 200, "bob", "", ""},
		{"a key", "Bearer " + key, "", 200, "alice", "", ""},
		{"a token and a key of another caller", "Bearer " + token, key, 401, "", "invalid_api_key", ""},
		{"a key and a token for a backend", "Bearer " + foreign, key, 200, "alice", "", "Bearer " + foreign},
		{"a key and a wrong token", "Bearer " + wrong, key, 200, "alice", "", ""},
		{"a key and a token that has expired", "Bearer " + expired, key, 200, "alice", "", ""},
		{"a key and a token that cannot be checked", "Bearer " + unchecked, key, 200, "alice", "", ""},
		{"a token for a backend", "Bearer " + foreign, "", 401, "", "invalid_api_key", ""},
		{"a wrong token", "Bearer " + wrong, "", 401, "", "invalid_api_key", ""},
		{"a token that has expired", "Bearer " + expired, "", 401, "", "invalid_api_key", ""},
		{"a token that cannot be checked", "Bearer " + unchecked, "", 503, "", "token_unchecked", ""},
		{"a token of two parts", "Bearer " + token[:strings.LastIndex(token, ".")], "", 401, "", "invalid_api_key", ""},
		{"a token that is too long", "Bearer " + tokenOf(said{Name: strings.Repeat("x", 16<<10)}), "", 401, "", "invalid_api_key", ""},
		{"nothing", "", "", 401, "", "invalid_api_key", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nclient_key alice "+key+"\ncaller_identity test\nbackend http://a {\nauth passthrough\n}\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
				var served *http.Request
				w.Prepares = func(r *http.Request) *http.Request {
					served = r
					return r
				}
				r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"gpt-4o"}`))
				if c.authorization != "" {
					r.Header.Set("Authorization", c.authorization)
				}
				if c.apiKey != "" {
					r.Header.Set("Api-Key", c.apiKey)
				}
				reply := w.Send(r)
				if c.status != 200 {
					reply.WantError(t, c.status, c.error)
					if hint := reply.Header.Get("Retry-After"); (hint != "") != (c.status == 503) {
						t.Errorf("the hint is %q", hint)
					}
					w.WantCalls(map[string]int{"a": 0, "b": 0})
					return
				}
				if reply.WantServed(t, "a", "b"); c.passed != "" {
					reply.WantServed(t, "a")
				}
				header := w.Backends[reply.Backend].Received()[0].Request.Header
				if passed := header.Get("Authorization") + header.Get("Api-Key"); passed != c.passed {
					t.Errorf("a gets %q, want %q", passed, c.passed)
				}
				shown := served.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
				if caller, _ := shown.GetString("http.openai_lb.caller"); caller != c.caller {
					t.Errorf("the caller is %q, want %q", caller, c.caller)
				}
			})
		})
	}
}

func TestTokensAloneIdentifyCallers(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\ncaller_identity test\ncaller bob {\nrequests 1/minute\n}\n}", func(t *testing.T, w *lbtest.World) {
		ask := func(token string) lbtest.Reply { return w.Send(w.RequestWithKey(token)) }
		w.Post(`{}`).WantError(t, 401, "invalid_api_key")
		ask(tokenOf(said{Name: "bob"})).WantServed(t, "a")
		ask(tokenOf(said{Name: "bob", Issued: 1})).WantError(t, 429, "rate_limit_exceeded") // another token of the same caller
		ask(tokenOf(said{Name: "carol"})).WantServed(t, "a")
		usage := w.Request(http.MethodGet, "/v1/usage", nil)
		usage.Header.Set("Authorization", "Bearer "+tokenOf(said{Name: "bob"}))
		if reply := w.Send(usage); reply.Status != 200 || !strings.Contains(reply.Body, `"bob"`) {
			t.Errorf("usage: %d %s", reply.Status, reply.Body)
		}
	})
}

func TestTheNewestTokenOfACallerSaysItsTier(t *testing.T) {
	config := "openai_lb {\nbackend http://a\nclient_key dave client-key-of-dave\ncaller_identity test {\ntiers gold\n}\ncaller carol {\ntier silver\n}\n" +
		"tier gold {\nmodels one two\n}\ntier silver default {\nmodels one\n}\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		for i, c := range []struct {
			said
			gold bool
		}{
			{said{Name: "bob", Issued: 10}, false},
			{said{Name: "bob", Issued: 20, Tier: "gold"}, true},
			{said{Name: "bob", Issued: 10}, true},
			{said{Name: "bob", Issued: 20}, true}, // the first of the same time
			{said{Name: "bob", Issued: 30}, false},
			{said{Name: "bob", Issued: 20, Tier: "gold"}, false},
			{said{Name: "carol", Issued: 10, Tier: "gold"}, false}, // its block says otherwise
			{said{Name: "erin", Issued: 10, Tier: "gold"}, true},
		} {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"two"}`))
			r.Header.Set("Authorization", "Bearer "+tokenOf(c.said))
			reply := w.Send(r)
			if gold := reply.Status == 200; gold != c.gold {
				t.Errorf("%d: %+v gets %d", i, c.said, reply.Status)
			}
		}
	})
}

func TestTheTiersOfTokensMustBeDeclared(t *testing.T) {
	for config, want := range map[string]string{
		"caller_identity test {\ntiers gold\n}":                      "caller_identity: tier 'gold' is not declared: expected 'tier gold' in openai_lb",
		"caller_identity test {\ntiers gold\n}\ntier silver\ntier x": "caller_identity: tier 'gold' is not declared: expected one of silver, x",
		"caller_identity oidc":                                       "caller_identity 'oidc' is not in this build: add it with xcaddy build --with github.com/openai-lb/caddy-openai-lb/oidc",
	} {
		err := lbtest.ValidateCaddyfile(t, fmt.Sprintf("http://lb {\nopenai_lb {\nbackend http://a\n%s\n}\n}", config))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", config, err, want)
		}
	}
	json := `{"apps":{"http":{"servers":{"a":{"routes":[{"handle":[{"handler":"openai_lb","backends":[{"url":"http://a"}],"caller_identity":{"module":"oidc"}}]}]}}}}}`
	if err := lbtest.Validate(t, json); err == nil || !strings.Contains(err.Error(), "caller_identity 'oidc' is not in this build") {
		t.Error(err)
	}
}

func TestNobodyIsWarnedOfCallersThatHaveTokens(t *testing.T) {
	for config, want := range map[string]int{
		"caller_identity test {\ntiers gold\n}\ncaller bob {\ntier silver\nrequests 1/minute\n}\ntier gold\ntier silver default": 0,
		"client_key bob client-key-of-bob\ncaller bob {\nrequests 1/minute\n}\ntier gold\ntier silver default":                   1,
	} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\n"+config+"\n}", func(t *testing.T, w *lbtest.World) {
			warned := 0
			for _, entry := range w.Logs.All() {
				if strings.Contains(entry.Message, "has no effect") {
					warned++
				}
			}
			if warned != want {
				t.Errorf("%s: %d warnings, want %d", config, warned, want)
			}
		})
	}
}

// TestATokenReachesNoBackendWhateverTheFieldIsCalled has it where gateways put
// it, next to a client key.
func TestATokenReachesNoBackendWhateverTheFieldIsCalled(t *testing.T) {
	token := tokenOf(said{Name: "alice"})
	config := "openai_lb {\nclient_key alice client-key-of-alice\ncaller_identity test\nbackend http://a\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		for _, name := range []string{"Cf-Access-Jwt-Assertion", "X-Goog-Iap-Jwt-Assertion", "X-Amzn-Oidc-Data", "X-Id", "query"} {
			w.Backends["a"].Forget()
			query := "?model=x.y.z"
			if name == "query" {
				query += "&jwt=" + token
			}
			r := w.Request(http.MethodPost, "/v1/chat/completions"+query, strings.NewReader(`{}`))
			r.Header.Set("Authorization", "Bearer client-key-of-alice")
			r.Header.Set("X-Kept", "eu.west.1")
			if name != "query" {
				r.Header.Set(name, "Bearer "+token)
			}
			w.Send(r).WantServed(t, "a")
			got := w.Backends["a"].Received()[0].Request
			if text := fmt.Sprint(got.Header, got.URL); strings.Contains(text, token) || got.Header.Get("X-Kept") == "" || got.URL.Query().Get("model") != "x.y.z" {
				t.Errorf("%s: the backend got %s", name, text)
			}
		}
	})
}

func TestFourTokensOfARequestAreVerified(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\ncaller_identity test\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		for n, served := range map[int]bool{3: true, 4: false} {
			r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
			for i := range n {
				r.Header.Add("X-Api-Key", tokenOf(said{Error: "wrong", Issued: int64(i)}))
			}
			r.Header.Add("X-Api-Key", tokenOf(said{Name: "bob"}))
			if reply := w.Send(r); (reply.Status == 200) != served {
				t.Errorf("after %d tokens, the client gets %d", n, reply.Status)
			}
		}
	})
}
