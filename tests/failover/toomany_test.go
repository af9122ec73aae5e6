package failover_test

import (
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestA429SaysWhetherItIsAboutAllBackends has two backends with a place each,
// and looks at what the client reads and what the balancer counts.
func TestA429SaysWhetherItIsAboutAllBackends(t *testing.T) {
	const some, all = "Some backends are ", "All backends are "
	for _, c := range []struct {
		name    string
		a, b    http.HandlerFunc
		options string
		busy    int // requests that are under way
		body    string
		message string
		class   string
	}{
		{"both throttle", lbtest.Throttled("9"), lbtest.Throttled("5"), "", 0, `{}`, all + "rate limited. Please retry after 5 seconds.", "all_throttled"},
		{"one throttles, and the other breaks off", lbtest.Throttled("9"), lbtest.Aborts, "", 0, `{}`, some + "rate limited, and no other could serve the request. Please retry after 9 seconds.", "retry_later"},
		{"one throttles, and the other refuses its key", lbtest.Throttled("9"), lbtest.Status(401), "", 0, `{}`, some + "rate limited", "retry_later"},
		{"one throttles, and no other may be asked", lbtest.Throttled("9"), nil, "lb_retries 0", 0, `{}`, some + "rate limited", "retry_later"},
		{"one throttles, and the body cannot be sent again", lbtest.Throttled("9"), nil, "request_buffers 1KiB", 0, `{"input":"` + strings.Repeat("x", 1<<20) + `"}`, some + "rate limited", "retry_later"},
		{"both are busy", lbtest.Hangs, lbtest.Hangs, "", 2, `{}`, all + "busy", "all_busy"},
		{"one is busy, and the other throttles", lbtest.Hangs, lbtest.Throttled("5"), "", 1, `{}`, some + "rate limited", "retry_later"},
		{"one is busy, and the other breaks off", lbtest.Hangs, lbtest.Aborts, "", 1, `{}`, some + "busy, and no other could serve the request. Please retry after 1 second", "retry_later"},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, `openai_lb {
				backend http://a {
					max_requests 1
				}
				backend http://b {
					priority 2
					max_requests 1
				}
				`+c.options+`
			}`, func(t *testing.T, w *lbtest.World) {
				w.Shows = map[string]string{"X-Class": "{http.openai_lb.class}"}
				w.Backends["a"].Replies(c.a)
				w.Backends["b"].Replies(c.b)
				var under sync.WaitGroup
				for range c.busy {
					under.Go(func() { w.Post(`{}`) })
					synctest.Wait()
				}
				reply := w.Post(c.body)
				reply.WantError(t, 429, "rate_limit_exceeded")
				if !strings.Contains(reply.Body, c.message) {
					t.Errorf("client got %s, want it to say %q", reply.Body, c.message)
				}
				if class := reply.Header.Get("X-Class"); class != c.class {
					t.Errorf("the answer has the class %q, want %q", class, c.class)
				}
				time.Sleep(time.Hour)
				under.Wait()
			})
		})
	}
}
