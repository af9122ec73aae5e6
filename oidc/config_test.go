package oidc

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestACaddyfileBecomesTheSameJSON(t *testing.T) {
	for name, c := range map[string]struct{ input, want string }{
		"without tiers": {
			"oidc {\nissuer https://issuer.example\naudience api://openai-lb\ncaller azp\n}",
			`{"issuer":"https://issuer.example","audience":"api://openai-lb","caller":"azp"}`,
		},
		"with tiers": {
			"oidc {\nissuer https://login.example/{env.TENANT}/v2.0\naudience a\ncaller appid\ntier roles {\ngold-user gold\n\"other user\" silver\n}\n}",
			`{"issuer":"https://login.example/{env.TENANT}/v2.0","audience":"a","caller":"appid","tier":{"claim":"roles","values":[{"value":"gold-user","tier":"gold"},{"value":"other user","tier":"silver"}]}}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var o Identity
			if err := o.UnmarshalCaddyfile(caddyfile.NewTestDispenser(c.input)); err != nil {
				t.Fatal(err)
			}
			if got := string(must(json.Marshal(&o))); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

func TestMistakesMakeTheLoadFail(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_ISSUER", "http://issuer.example")
	t.Setenv("OPENAI_LB_TEST_BRACE", "http://issuer.example/{x")
	for options, want := range map[string]string{
		"audience a\ncaller azp":                                                              "issuer is required in caller_identity oidc",
		"issuer https://a.example\ncaller azp":                                                "audience is required",
		"issuer https://a.example\naudience a":                                                "caller is required",
		"issuer a.example\naudience a\ncaller azp":                                            "issuer 'a.example' is not a URL such as https://|, at Caddyfile:5",
		"issuer https://user:pass@a.example\naudience a\ncaller azp":                          "issuer '…' is not a URL",
		"issuer https://a.example?x=1\naudience a\ncaller azp":                                "is not a URL",
		"issuer http://a.example\naudience a\ncaller azp":                                     "issuer 'http://a.example' must begin with https://|, at Caddyfile:5",
		"issuer http://127.0.0.1.a.example\naudience a\ncaller azp":                           "must begin with https://",
		"issuer {env.OPENAI_LB_TEST_ISSUER}\naudience a\ncaller azp":                          "issuer 'http://issuer.example' must begin with https://",
		"issuer {env.OPENAI_LB_TEST_BRACE}\naudience a\ncaller azp":                           "must begin with https://",
		"issuer {env.OPENAI_LB_TEST_UNSET}\naudience a\ncaller azp":                           "issuer: ",
		"issuer https://a.example\naudience a\ncaller azp\ntier roles":                        "tier requires a claim, and a block|, at Caddyfile:8",
		"issuer https://a.example\naudience a\ncaller azp\ntier roles {\nx\n}":                "x requires an argument|, at Caddyfile:9",
		"issuer https://a.example\naudience a\ncaller azp\ntier roles {\nx a b\n}":            "unexpected argument 'b' after the tier of 'x'|, at Caddyfile:9",
		"issuer https://a.example\naudience a\ncaller azp\ntier roles {\nx gold\nx silver\n}": "tier roles: 'x' is given twice",
		"issuer https://a.example\naudience a\ncaller azp\ntier roles {\nx gold\n}":           "caller_identity: tier 'gold' is not declared",
		"issuer https://a.example\naudience a\ncaller azp\nkeys x":                            "unrecognized option 'keys': expected one of audience, caller, issuer, tier",
	} {
		err := lbtest.ValidateCaddyfile(t, "http://lb {\nopenai_lb {\nbackend http://a\ncaller_identity oidc {\n"+options+"\n}\n}\n}")
		for part := range strings.SplitSeq(want, "|") {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v, want %s", options, err, part)
			}
		}
	}
}

func TestTheExamplesLoad(t *testing.T) {
	t.Setenv("EAST_KEY", "key-of-east")
	t.Setenv("EASTUS_KEY", "key-of-eastus")
	t.Setenv("NIGHTLY_KEY", "client-key-of-nightly")
	t.Setenv("TENANT_ID", "the-tenant")
	t.Setenv("LLM_CLIENT_ID", "the-client")
	page := string(lbtest.ReadFile(t, "README.md"))
	_, block, _ := strings.Cut(page, "```caddyfile\n")
	block, _, _ = strings.Cut(block, "```")
	for name, text := range map[string]string{"README.md": block, "examples/oidc.Caddyfile": string(lbtest.ReadFile(t, "../examples/oidc.Caddyfile"))} {
		storage := fmt.Sprintf("{\nstorage file_system %s\n}\n", t.TempDir())
		if err := lbtest.ValidateCaddyfile(t, storage+text); err != nil || text == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAConfigIsValidatedWithoutARequest(t *testing.T) {
	f := newFakeIssuer(t, firstKey())
	if err := lbtest.ValidateCaddyfile(t, "http://lb {\nopenai_lb {\nbackend http://a\n"+oidcOf(f, "")+"}\n}"); err != nil {
		t.Error(err)
	}
	if n := f.fetches(); n != 0 {
		t.Errorf("the keys were fetched %d times", n)
	}
	n := 0
	issuers.Range(func(any, any) bool { n++; return true })
	if n != 0 {
		t.Errorf("%d issuers are left", n)
	}
}

func TestJSONIsCheckedAsWell(t *testing.T) {
	for text, want := range map[string]string{
		`{"issuer":"http://a.example","audience":"a","caller":"azp"}`:                                                "must begin with https://",
		`{"issuer":"https://a.example","audience":"a","caller":"azp","tier":{"values":[{"value":"x","tier":"y"}]}}`:  "tier requires a claim",
		`{"issuer":"https://a.example","audience":"a","caller":"azp","tier":{"claim":"c","values":[{"value":"x"}]}}`: "tier c: expected a value and a tier",
	} {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
		defer cancel()
		if _, err := ctx.LoadModuleByID("http.openai_lb.caller_identity.oidc", json.RawMessage(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
