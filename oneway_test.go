package openailb

import (
	"fmt"
	"maps"
	"slices"
	"testing"
)

// TestEveryReplyTakesTheSameWayOut compares the headers of replies that a
// backend was asked for, and of those that need none.
func TestEveryReplyTakesTheSameWayOut(t *testing.T) {
	a, serverA := listen(t, "a")
	address := serveAt(t, fmt.Sprintf(`
		openai_lb {
			client_key alice key-of-alice
			ready_path /readyz
			backend %s {
				model gpt-4o
			}
			reverse_proxy {
				header_down X-Site mine
				@teapot status 418
				handle_response @teapot {
					respond "a teapot" 418
				}
			}
		}`, serverA.URL))
	client, url := newClient(t), "http://"+address
	chat := func(model string, headers ...string) clientReply {
		return post(client, url+"/v1/chat/completions", `{"model":"`+model+`"}`, append(headers, "Api-Key", "key-of-alice")...)
	}
	a.replies(throttled("60"))
	asked, unasked := chat("gpt-4o"), chat("gpt-4o")
	asked.wantError(t, 429, "rate_limit_exceeded")
	unasked.wantError(t, 429, "rate_limit_exceeded")
	if n := len(a.received()); n != 1 {
		t.Errorf("a was called %d times, want once", n)
	}
	names := func(r clientReply) []string { return slices.Sorted(maps.Keys(r.header)) }
	if got, want := names(unasked), names(asked); !slices.Equal(got, want) {
		t.Errorf("the 429 that needs no backend has the headers %q, the other one %q", got, want)
	}
	for name, reply := range map[string]clientReply{
		"a throttle that a backend was asked for": asked,
		"a throttle that none was asked for":      unasked,
		"a wrong key":                             post(client, url+"/v1/chat/completions", `{}`, "Api-Key", "wrong"),
		"an unknown model":                        chat("unknown"),
		"an invalid path":                         post(client, url+"/v1//chat/completions", `{}`, "Api-Key", "key-of-alice"),
		"readiness":                               get(client, url+"/readyz"),
		"the list of models":                      get(client, url+"/v1/models", "Api-Key", "key-of-alice"),
	} {
		if got := reply.header.Get("X-Site"); got != "mine" {
			t.Errorf("%s: %d has X-Site %q", name, reply.status, got)
		}
		if got := reply.header.Get("Via"); got != "1.1 Caddy" {
			t.Errorf("%s: %d has Via %q", name, reply.status, got)
		}
	}
}
