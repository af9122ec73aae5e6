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
	for name, header := range map[string][]string{"none": nil, "zero": {"Retry-After", "0"}} {
		for _, slow := range []time.Duration{300 * time.Millisecond, 3 * time.Second, 12 * time.Second} {
			calls := map[string]int{}
			took := map[string]time.Duration{}
			for _, wait := range []string{"", "\nwait 5s"} {
				inBubbleWith(t, "backend http://a {\npriority 1\n}\nbackend http://b {\npriority 2\n}"+wait, func(t *testing.T, w *world) {
					w.Backends["a"].Replies(lbtest.Status(429, header...))
					w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) {
						time.Sleep(slow)
						lbtest.Status(429, header...)(rw, r)
					})
					begin := time.Now()
					w.Send(w.request(0, ""))
					calls[wait], took[wait] = w.TotalCalls(), time.Since(begin)
				})
			}
			if calls[""] != calls["\nwait 5s"] || took[""] != took["\nwait 5s"] {
				t.Errorf("%s, %s: calls %v, took %v", name, slow, calls, took)
			}
		}
	}
}

// TestSlowBackendsThatNameNoTime checks that each is asked once.
func TestSlowBackendsThatNameNoTime(t *testing.T) {
	for name, header := range map[string][]string{"none": nil, "zero": {"Retry-After", "0"}} {
		for _, slow := range []time.Duration{300 * time.Millisecond, time.Second, 11 * time.Second} {
			calls := map[string]int{}
			took := map[string]time.Duration{}
			for _, wait := range []string{"", "\nwait 10s"} {
				inBubbleWith(t, "backend http://a\nbackend http://b"+wait, func(t *testing.T, w *world) {
					w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
						time.Sleep(slow)
						lbtest.Status(429, header...)(rw, r)
					})
					begin := time.Now()
					w.Send(w.request(0, ""))
					calls[wait], took[wait] = w.TotalCalls(), time.Since(begin)
				})
			}
			if calls[""] != calls["\nwait 10s"] || took[""] != took["\nwait 10s"] {
				t.Errorf("%s, %s: calls %v, took %v", name, slow, calls, took)
			}
		}
	}
}
