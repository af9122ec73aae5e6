package health

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// aBeforeB is a pool that buffers little.
const aBeforeB = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a\nbackend http://b {\npriority 2\n}\n}"

func TestALongUploadIsNoProbeWhileAnotherBackendIsFree(t *testing.T) {
	lbtest.InBubble(t, aBeforeB, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("1"))
		w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
		upload := `{"model":"gpt-4o","messages":[{"role":"user","content":"` + lbtest.Noise(4<<10) + `"}]}`
		for range 8 {
			time.Sleep(1200 * time.Millisecond)
			w.Post(upload).WantServed(t, "b")
		}
		w.WantCalls(map[string]int{"a": 1, "b": 9})
		w.Backends["a"].Recovers()
		w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a") // the probe
		w.Post(upload).WantServed(t, "a")
	})
}

func TestARequestThatMustNotRunTwiceIsNoProbeWhileAnotherBackendIsFree(t *testing.T) {
	lbtest.InBubble(t, aBeforeB, func(t *testing.T, w *lbtest.World) {
		post := func() lbtest.Reply {
			return w.Send(w.Request(http.MethodPost, "/v1/batches", strings.NewReader(`{}`)))
		}
		w.Backends["a"].Replies(lbtest.Status(500))
		post().WantStatus(t, 500)
		time.Sleep(11 * time.Second)
		post().WantServed(t, "b")
		w.WantCalls(map[string]int{"a": 1, "b": 1})
	})
}

// Without other requests, a backend that throttled for a moment was not used
// for a minute.
func TestARequestThatMustNotRunTwiceIsTheProbeAfterARefusal(t *testing.T) {
	for name, refuses := range map[string]http.HandlerFunc{"throttled": lbtest.Throttled("1"), "overloaded": lbtest.Says(503, "{}", "Retry-After", "1")} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, aBeforeB, func(t *testing.T, w *lbtest.World) {
				for _, request := range []struct{ path, body string }{
					{"/v1/batches", `{}`}, {"/v1/responses", `{"tools":[{"type":"mcp"}]}`},
				} {
					post := func() lbtest.Reply {
						return w.Send(w.Request(http.MethodPost, request.path, strings.NewReader(request.body)))
					}
					w.Backends["a"].Replies(refuses)
					post().WantServed(t, "b")
					w.Backends["a"].Recovers()
					time.Sleep(1100 * time.Millisecond)
					post().WantServed(t, "a")
				}
			})
		})
	}
}
