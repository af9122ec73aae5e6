package backend_test

import (
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAQuotaThatIsNotValidIsRefusedByLineAndValue(t *testing.T) {
	for options, want := range map[string]string{
		"tokens 5":                 `"5" is not a limit of tokens: expected <number>/<unit>`,
		"tokens 0/minute":          `"0/minute" is not a limit of tokens`,
		"requests 10/week":         `"10/week" is not a limit of requests`,
		"requests":                 "requests requires a quota such as 600/minute, and has 0 arguments",
		"requests 5/minute then x": "requests requires a quota such as 600/minute, and has 3 arguments",
		"tokens 5/minute\ntokens 1M/day\ntokens 6/minute": "tokens per minute is given twice: '6/minute'",
	} {
		var all []*backend.Backend
		d := caddyfile.NewTestDispenser("openai_lb {\nbackend http://a {\n" + options + "\n}\n}")
		err := directive.Unmarshal(d, directive.Options{"backend": backend.Directive(&all)})
		line := 2 + len(strings.Split(options, "\n"))
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "Testfile:"+string(rune('0'+line))) {
			t.Errorf("%s: got %v, want %s in line %d", options, err, want, line)
		}
	}
}

func TestBackendsOfOneKeyHaveOneQuota(t *testing.T) {
	for _, tc := range []struct {
		first, second *backend.Backend
		ok            bool
	}{
		{&backend.Backend{Requests: []string{"60/minute"}, Tokens: []string{"1k/day"}}, &backend.Backend{Requests: []string{"60/minute"}, Tokens: []string{"1000/day"}}, true},
		{&backend.Backend{Tokens: []string{"1k/day", "5/minute"}}, &backend.Backend{Tokens: []string{"5/minute", "1k/day"}}, true},
		{&backend.Backend{Requests: []string{"60/minute"}}, &backend.Backend{Requests: []string{"61/minute"}}, false},
		{&backend.Backend{Requests: []string{"60/minute"}}, &backend.Backend{}, false},
		{&backend.Backend{Requests: []string{"60/minute"}}, &backend.Backend{APIKey: "sk-of-another-account"}, true},
	} {
		tc.first.URL, tc.second.URL, tc.first.Name, tc.second.Name = "http://a", "http://a/", "one", "two"
		err := backend.Provision(lbtest.Context(t), []*backend.Backend{tc.first, tc.second})
		if (err == nil) != tc.ok || err != nil && !strings.Contains(err.Error(), `backend 2 "two": requests and tokens are not the same as those of 'one'`) {
			t.Errorf("%v %v and %v %v: got %v", tc.first.Requests, tc.first.Tokens, tc.second.Requests, tc.second.Tokens, err)
		}
	}
	wrong := backend.Backend{URL: "http://a", Tokens: []string{"5/fortnight"}}
	if err := backend.Provision(lbtest.Context(t), []*backend.Backend{&wrong}); err == nil || !strings.Contains(err.Error(), `"5/fortnight" is not a limit of tokens`) {
		t.Errorf("in JSON, got %v", err)
	}
}
