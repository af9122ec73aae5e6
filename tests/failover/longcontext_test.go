package failover

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const tooLong = `{"error":{"message":"This model's maximum context length is 8192 tokens.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}`

// named writes backends in order that each know gpt-4o by a name of their own.
func named(names ...string) string {
	var block strings.Builder
	block.WriteString("openai_lb {\n")
	for i, name := range names {
		fmt.Fprintf(&block, "backend http://%c {\npriority %d\n%s\n}\n", 'a'+i, i+1, name)
	}
	return block.String() + "ready_path /readyz\n}"
}

func TestARequestTooLongForAModelGoesToOtherModels(t *testing.T) {
	small, big := "deployment small", "deployment big"
	for _, c := range []struct {
		name   string
		config string
		long   []string // who refuses
		called []string // who is asked
		served string
	}{
		{"to another model", named(small, big), []string{"a"}, []string{"a", "b"}, "b"},
		{"past the same model", named(small, small, big), []string{"a", "b"}, []string{"a", "c"}, "c"},
		{"by the names of models", named("model gpt-4o small", "model gpt-4o small", "model gpt-4o big"), []string{"a", "b"}, []string{"a", "c"}, "c"},
		{"to the client's own name", named(small, ""), []string{"a"}, []string{"a", "b"}, "b"},
		{"not where all have the same", named("", "", ""), []string{"a", "b", "c"}, []string{"a"}, ""},
		{"not where all call it the same", named(small, small), []string{"a", "b"}, []string{"a"}, ""},
		{"until all models refuse", named(small, big, small, big), []string{"a", "b", "c", "d"}, []string{"a", "b"}, ""},
		{"alone", named(small), []string{"a"}, []string{"a"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, c.config, func(t *testing.T, w *lbtest.World) {
				for _, name := range c.long {
					w.Backends[name].Replies(lbtest.Says(400, tooLong))
				}
				for range 2 { // there is no cooldown: the second time is like the first
					for _, b := range w.Backends {
						b.Forget()
					}
					reply := w.Post(`{"model":"gpt-4o"}`)
					if c.served != "" {
						reply.WantServed(t, c.served)
					} else if reply.Status != 400 || !strings.Contains(reply.Body, "context_length_exceeded") {
						t.Errorf("client got %d %s, want the 400", reply.Status, reply.Body)
					}
					for name, b := range w.Backends {
						if want := slices.Contains(c.called, name); want != (len(b.Received()) == 1) {
							t.Errorf("%s was called %d times, want it called: %v", name, len(b.Received()), want)
						}
					}
				}
				w.WantNobodyBlamed()
			})
		})
	}
}

func TestOther400sAreTheClientsOwnWhateverTheModelsNames(t *testing.T) {
	for _, code := range []string{"content_filter", "invalid_value", "string_above_max_length"} {
		lbtest.InBubble(t, named("deployment small", "deployment big"), func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Says(400, fmt.Sprintf(`{"error":{"message":"context","code":%q}}`, code)))
			if reply := w.Post(`{"model":"gpt-4o"}`); reply.Status != 400 || reply.Backend != "a" {
				t.Errorf("%s: client got %d of %q", code, reply.Status, reply.Backend)
			}
			w.WantCalls(map[string]int{"b": 0})
			w.WantNobodyBlamed()
		})
	}
}

func TestAThrottleCountsAmongRequestsTooLong(t *testing.T) {
	lbtest.InBubble(t, named("deployment small", "deployment big"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Says(400, tooLong))
		w.Backends["b"].Replies(lbtest.Throttled("60"))
		if reply := w.Post(`{"model":"gpt-4o"}`); reply.Status != 400 && reply.Status != 429 {
			t.Errorf("client got %d %s", reply.Status, reply.Body)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 1})
	})
}

func TestAStatusThatIsNoneFailsTheBackend(t *testing.T) {
	for _, code := range []string{"000", "001", "042", "099"} {
		for _, body := range []string{`{}`, `{"stream":true}`} {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(lbtest.Raw("HTTP/1.1 " + code + " Odd\r\nContent-Length: 0\r\n\r\n"))
				w.Post(body).WantServed(t, "b")
				if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "failed" {
					t.Errorf("%s: got the cooldowns %v, want one, for failed", code, cooldowns)
				}
				w.Stop("b")
				w.Stop("c")
				if reply := w.Post(body); reply.Status != 502 {
					t.Errorf("%s: with nobody left, client got %d %s (%v)", code, reply.Status, reply.Body, reply.Err)
				}
			})
		}
	}
}

func TestAnUpgradeThatNobodyAskedForFailsTheBackend(t *testing.T) {
	for _, headers := range []string{"Connection: Upgrade\r\nUpgrade: websocket\r\n", "Connection: Upgrade\r\nUpgrade: x\r\n", ""} {
		for _, op := range [][3]string{{"POST", "/v1/chat/completions"}, {"GET", "/v1/models"}} {
			lbtest.InBubble(t, lbtest.ThreeInOrder, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\n" + headers + "\r\n"))
				w.Send(operation(w, op)).WantServed(t, "b")
				if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "failed" {
					t.Errorf("%q: got the cooldowns %v, want one, for failed", headers, cooldowns)
				}
				w.Stop("b")
				w.Stop("c")
				if reply := w.Send(operation(w, op)); reply.Status != http.StatusBadGateway {
					t.Errorf("%q: with nobody left, client got %d %q (%v)", headers, reply.Status, reply.Body, reply.Err)
				}
			})
		}
	}
}

func TestTheSizeOfAFileIsNotTakenForTokens(t *testing.T) {
	contentType, body := lbtest.FormOf("whisper", 100<<10, true)
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Status(429, "Retry-After", "9", "X-Ratelimit-Limit-Tokens", "20000"))
		r := w.Request(http.MethodPost, "/v1/audio/transcriptions", bytes.NewReader(body))
		r.Header.Set("Content-Type", contentType)
		w.Send(r).WantServed(t, "b")
		if cooldowns := w.Logged("cooldown started"); len(cooldowns) != 1 || cooldowns[0].ContextMap()["class"] != "throttled" {
			t.Errorf("got the cooldowns %v, want one, for throttled", cooldowns)
		}
	})
}
