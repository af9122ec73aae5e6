package failover

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestEveryReplyTakesTheSameWayOut compares the headers of replies that a
// backend was asked for, and of those that need none.
func TestEveryReplyTakesTheSameWayOut(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, fmt.Sprintf(`
		header >X-Site mine
		intercept {
			@teapot status 418
			handle_response @teapot {
				header -Content-Length
				respond "a teapot" 418
			}
		}
		openai_lb {
			client_key alice client-key-of-alice
			ready_path /readyz
			backend %s {
				model gpt-4o
			}
		}`, serverA.URL))
	client, url := lbtest.NewClient(t), "http://"+address
	chat := func(model string, headers ...string) lbtest.Reply {
		return lbtest.Post(client, url+"/v1/chat/completions", `{"model":"`+model+`"}`, append(headers, "Api-Key", "client-key-of-alice")...)
	}
	a.Replies(lbtest.Throttled("60"))
	asked, unasked := chat("gpt-4o"), chat("gpt-4o")
	asked.WantError(t, 429, "rate_limit_exceeded")
	unasked.WantError(t, 429, "rate_limit_exceeded")
	if n := len(a.Received()); n != 1 {
		t.Errorf("a was called %d times, want once", n)
	}
	names := func(r lbtest.Reply) []string { return slices.Sorted(maps.Keys(r.Header)) }
	if got, want := names(unasked), names(asked); !slices.Equal(got, want) {
		t.Errorf("the 429 that needs no backend has the headers %q, the other one %q", got, want)
	}
	for name, reply := range map[string]lbtest.Reply{
		"a throttle that a backend was asked for": asked,
		"a throttle that none was asked for":      unasked,
		"a wrong key":                             lbtest.Post(client, url+"/v1/chat/completions", `{}`, "Api-Key", "wrong"),
		"an unknown model":                        chat("unknown"),
		"an invalid path":                         lbtest.Post(client, url+"/v1//chat/completions", `{}`, "Api-Key", "client-key-of-alice"),
		"readiness":                               lbtest.Get(client, url+"/readyz"),
		"the list of models":                      lbtest.Get(client, url+"/v1/models", "Api-Key", "client-key-of-alice"),
	} {
		if got := reply.Header.Get("X-Site"); got != "mine" {
			t.Errorf("%s: %d has X-Site %q", name, reply.Status, got)
		}
		if got := reply.Header.Get("Via"); got != "1.1 Caddy" {
			t.Errorf("%s: %d has Via %q", name, reply.Status, got)
		}
	}
}
