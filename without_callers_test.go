//go:build openai_lb_core && !openai_lb_callers

package openailb_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// withoutCallers ends the error of each option about callers.
const withoutCallers = " is not available: this binary was built without the module callers (build tag openai_lb_callers)"

func TestOptionsOfCallersAreErrorsThatNameTheModuleAndTheLine(t *testing.T) {
	const key = "client_key alice client-key-of-alice\n"
	for block, want := range map[string]string{
		key + "caller alice {\ntokens 1/day\n}": "caller" + withoutCallers + ", at Caddyfile:5",
		key + "caller * deny":                   "caller" + withoutCallers + ", at Caddyfile:5",
		key + "callers_file /etc/limits":        "callers_file" + withoutCallers + ", at Caddyfile:5",
		key + "tier gold":                       "tier" + withoutCallers + ", at Caddyfile:5",
		"tier gold {\nreserve 60%\n}":           "tier" + withoutCallers + ", at Caddyfile:4",
		"timezone Europe/Berlin":                "timezone" + withoutCallers + ", at Caddyfile:4",
		// the module of a token, which the core has
		"caller_identity test {\ntiers gold\n}": "caller_identity: tier 'gold'" + withoutCallers + ", at Caddyfile:4",
	} {
		err := lbtest.ValidateCaddyfile(t, ":80 {\nopenai_lb {\nbackend http://a\n"+block+"\n}\n}\n")
		if err == nil || !strings.HasSuffix(err.Error(), ": "+want) {
			t.Errorf("%s\ngives %v, want %s", block, err, want)
		}
	}
	for option, want := range map[string]string{
		`"callers":[{"name":"alice"}]`:   "caller 'alice'" + withoutCallers,
		`"callers_file":"/etc/limits"`:   "callers_file" + withoutCallers,
		`"tiers":[{"name":"gold"}]`:      "tier 'gold'" + withoutCallers,
		`"timezone":"Europe/Berlin"`:     "timezone" + withoutCallers,
		`"callers":[],"callers_file":""`: "callers_file" + withoutCallers,
	} {
		err := lbtest.Validate(t, `{"apps":{"http":{"servers":{"x":{"listen":[":0"],"routes":[{"handle":[
			{"handler":"openai_lb","backends":[{"url":"http://a"}],"client_keys":[{"name":"alice","key":"client-key-of-alice"}],`+option+`}]}]}}}}}`)
		if err == nil || !strings.HasSuffix(err.Error(), ": "+want) {
			t.Errorf("%s gives %v, want %s", option, err, want)
		}
	}
	err := lbtest.ValidateCaddyfile(t, ":80 {\nopenai_lb {\nbackend http://a\nlimits\n}\n}\n")
	if err == nil || !strings.Contains(err.Error(), "unrecognized option 'limits'") || strings.Contains(err.Error(), " tier,") {
		t.Errorf("options that are not available are suggested: %v", err)
	}
}

func TestCallersHaveNamesAndNoLimitsWithoutTheModuleCallers(t *testing.T) {
	file := t.TempDir() + "/keys"
	lbtest.WriteFile(t, file, "bob client-key-of-bob\ncarol client-key-of-carol expires=2001-01-01\n")
	config := "openai_lb {\nbackend http://a\nclient_key alice client-key-of-alice\nclient_keys_file " + file + "\ncaller_identity test\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		for _, key := range []string{"client-key-of-alice", "client-key-of-bob", "client-key-of-carol", tokenOf(said{Name: "dave"})} {
			w.Send(w.RequestWithKey(key)).WantServed(t, "a")
		}
		w.Send(w.RequestWithKey("another-key-of-nobody")).WantError(t, http.StatusUnauthorized, "invalid_api_key")
		models := w.Request(http.MethodGet, "/v1/models", nil)
		models.Header.Set("Authorization", "Bearer client-key-of-bob")
		w.Send(models).WantStatus(t, http.StatusOK)
	})
}
