package quotas

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// replies are those of a backend that names limits that are larger than its
// quotas, and of one that names none.
var replies = map[string]http.HandlerFunc{
	"a backend that names its limits": lbtest.Says(200, `{"id":"chatcmpl-1","choices":[],"usage":`+usage(50, 10)+`}`,
		"X-Ratelimit-Limit-Requests", "60000", "X-Ratelimit-Remaining-Requests", "59999", "X-Ratelimit-Reset-Requests", "1ms"),
	"a backend that names no limits": used(50, 10),
}

// atOnce sends requests at once, and returns how many are served.
func (w *world) atOnce(requests int) int {
	var all sync.WaitGroup
	var served atomic.Int64
	for range requests {
		all.Go(func() {
			if w.Post(small).Status == http.StatusOK {
				served.Add(1)
			}
		})
	}
	all.Wait()
	return int(served.Load())
}

// TestAsManyRequestsWaitForAQuotaAsItGrants has a quota that has room for one
// request in each of the five seconds.
func TestAsManyRequestsWaitForAQuotaAsItGrants(t *testing.T) {
	for name, reply := range replies {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "wait 5s", func(t *testing.T, w *world) {
				w.AllReply(reply)
				for range 60 {
					w.Post(small).WantServed(t, "a")
					time.Sleep(time.Second)
				}
				w.Post(small).WantServed(t, "a")
				if served := w.atOnce(20); served != 5 {
					t.Errorf("%d of 20 requests are served, want 5", served)
				}
			}, "requests 60/minute")
		})
	}
}

// TestRequestsWaitForTheNextDayOfAQuota a second before it begins.
func TestRequestsWaitForTheNextDayOfAQuota(t *testing.T) {
	for name, reply := range replies {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "wait 2s", func(t *testing.T, w *world) {
				w.AllReply(reply)
				time.Sleep(time.Until(time.Now().Truncate(24 * time.Hour).Add(24*time.Hour - time.Second)))
				for range 20 {
					w.Post(small).WantServed(t, "a")
				}
				if served := w.atOnce(30); served != 20 {
					t.Errorf("%d of 30 requests are served, want 20", served)
				}
			}, "requests 20/day")
		})
	}
}

// TestARequestWaitsForTheOpenRequestsOfAQuotaAsLongAsItMay has two open
// requests that may use so much of the quota that there is no room for a third.
func TestARequestWaitsForTheOpenRequestsOfAQuotaAsLongAsItMay(t *testing.T) {
	for _, wait := range []time.Duration{900 * time.Millisecond, 2500 * time.Millisecond} {
		for _, lasts := range []time.Duration{100 * time.Millisecond, 5 * time.Second} {
			t.Run(fmt.Sprintf("%s for requests of %s", wait, lasts), func(t *testing.T) {
				inBubble(t, "wait "+wait.String(), func(t *testing.T, w *world) {
					w.AllReply(after(lasts, used(50, 10)))
					var open sync.WaitGroup
					for range 2 {
						open.Go(func() { w.Post(prompt(50, "")).WantServed(t, "a") })
					}
					time.Sleep(time.Millisecond)
					w.AllReply(used(50, 10))
					begin := time.Now()
					got := w.Post(prompt(50, ""))
					if took, want := time.Since(begin), min(wait, lasts-time.Millisecond); took != want {
						t.Errorf("it took %s, want %s", took, want)
					}
					if lasts < wait {
						got.WantServed(t, "a")
					} else {
						w.wantOver(got, 1)
					}
					open.Wait()
				}, "tokens 40k/minute")
			})
		}
	}
}

// TestARequestWaitsBehindALargerOneForAQuotaThatHasRoomForIt has a backend that
// names no limits, and one that does.
func TestARequestWaitsBehindALargerOneForAQuotaThatHasRoomForIt(t *testing.T) {
	for name, reply := range replies {
		t.Run(name, func(t *testing.T) {
			inBubble(t, "wait 10s", func(t *testing.T, w *world) {
				w.AllReply(used(5500, 0))
				w.Post(prompt(5500, `"max_tokens":10,`)).WantServed(t, "a")
				w.AllReply(reply)
				time.Sleep(51 * time.Second)
				var all sync.WaitGroup
				all.Go(func() { w.Post(prompt(2000, `"max_tokens":10,`)).WantServed(t, "a") })
				time.Sleep(time.Second)
				for range 3 {
					all.Go(func() { w.Post(small).WantServed(t, "a") })
				}
				all.Wait()
			}, "tokens 6000/minute")
		})
	}
}
