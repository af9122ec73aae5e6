package waiting

import (
	"net/http"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestNoRequestGoesBackToABackendThatNamedNoTime although its cooldown is over
// when the other one has refused the request, too.
func TestNoRequestGoesBackToABackendThatNamedNoTime(t *testing.T) {
	for _, slow := range []time.Duration{300 * time.Millisecond, 3 * time.Second, 12 * time.Second} {
		wantNoWait(t, "backend http://a {\npriority 1\n}\nbackend http://b {\npriority 2\n}", "wait 5s",
			map[string]time.Duration{"b": slow})
	}
}

// TestSlowBackendsThatNameNoTime checks that each is asked once.
func TestSlowBackendsThatNameNoTime(t *testing.T) {
	for _, slow := range []time.Duration{300 * time.Millisecond, time.Second, 11 * time.Second} {
		wantNoWait(t, "backend http://a\nbackend http://b", "wait 10s",
			map[string]time.Duration{"a": slow, "b": slow})
	}
}

// wantNoWait checks that a request calls the backends as often with the option
// wait as without it, and takes as long, if no 429 names a time. Some backends
// take long for their 429.
func wantNoWait(t *testing.T, backends, wait string, takes map[string]time.Duration) {
	t.Helper()
	type outcome struct {
		calls int
		took  time.Duration
	}
	for name, header := range map[string][]string{"none": nil, "zero": {"Retry-After", "0"}} {
		outcomes := make(map[string]outcome)
		for _, option := range []string{"", "\n" + wait} {
			inBubbleWith(t, backends+option, func(t *testing.T, w *world) {
				for of, backend := range w.Backends {
					backend.Replies(func(rw http.ResponseWriter, r *http.Request) {
						time.Sleep(takes[of])
						lbtest.Status(429, header...)(rw, r)
					})
				}
				begin := time.Now()
				w.Send(w.request(0, ""))
				outcomes[option] = outcome{w.TotalCalls(), time.Since(begin)}
			})
		}
		if outcomes[""] != outcomes["\n"+wait] {
			t.Errorf("%s, %v: got %+v", name, takes, outcomes)
		}
	}
}
