package failover

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestADrainedBackendIsUsedWhenNoOtherIsLeft(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			weight 0
		}
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *lbtest.World) {
		for range 20 {
			w.Post(`{}`).WantServed(t, "b")
		}
		w.WantCalls(map[string]int{"a": 0})
		w.Backends["b"].Replies(lbtest.Throttled("5"))
		w.Post(`{}`).WantServed(t, "a")
		time.Sleep(5 * time.Second)
		w.Backends["b"].Recovers()
		w.Post(`{}`).WantServed(t, "b")
	})
}

func TestMaxRequestsSendsTheRestElsewhere(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			max_requests 3
		}
		backend http://b {
			priority 2
			max_requests 2
		}
	}`, func(t *testing.T, w *lbtest.World) {
		slow := func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(rw, lbtest.StreamContent)
			rw.(http.Flusher).Flush() // the place is held until the reply's end
			time.Sleep(time.Minute)
		}
		w.Backends["a"].Replies(slow)
		w.Backends["b"].Replies(slow)
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() { w.Post(`{}`).WantServed(t, "a", "b") })
			synctest.Wait()
		}
		w.WantCalls(map[string]int{"a": 3, "b": 2})
		reply := w.Post(`{}`)
		reply.WantError(t, 429, "rate_limit_exceeded")
		if got := reply.Header.Get("Retry-After"); got != "1" {
			t.Errorf("Retry-After is %q, want 1", got)
		}
		wg.Wait()
		synctest.Wait()
		w.Backends["a"].Recovers()
		w.Post(`{}`).WantServed(t, "a")
	})
}

func TestBackendsAtOneURLAreApartByTheirCredential(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			name one
			header X-Gateway-Key 1
		}
		backend http://a {
			name two
			priority 2
			header X-Gateway-Key 2
		}
	}`, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Gateway-Key") == "1" {
				lbtest.Throttled("60")(rw, r)
			}
		})
		for range 3 {
			w.Post(`{}`).WantServed(t, "a")
		}
		w.WantCalls(map[string]int{"a": 4})
	})
}

func TestMaxRequestsIsABackendsOwn(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			name one
			deployment x
			max_requests 1
		}
		backend http://a {
			name two
			priority 2
			deployment y
			max_requests 1
		}
	}`, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) { time.Sleep(time.Minute) })
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { w.Post(`{}`).WantServed(t, "a") })
			synctest.Wait()
		}
		w.Post(`{}`).WantError(t, 429, "rate_limit_exceeded")
		wg.Wait()
	})
}

func TestAFailedAttemptGivesItsPlaceBack(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			max_requests 1
		}
		backend http://b {
			priority 2
		}
		fail_duration 1s
	}`, func(t *testing.T, w *lbtest.World) {
		for _, reply := range []http.HandlerFunc{lbtest.Status(500), lbtest.Throttled("1"), func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }} {
			w.Backends["a"].Replies(reply)
			w.Post(`{}`).WantServed(t, "b")
			w.Backends["a"].Recovers()
			time.Sleep(time.Second)
			w.Post(`{}`).WantServed(t, "a")
		}
	})
}

func TestAPolicyOfReverseProxysChoosesWithinAPriority(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			priority 2
		}
		backend http://b
		backend http://c
		lb_policy round_robin
	}`, func(t *testing.T, w *lbtest.World) {
		for range 10 {
			w.Post(`{}`).WantServed(t, "b", "c")
		}
		w.WantCalls(map[string]int{"a": 0, "b": 5, "c": 5})
		w.Backends["b"].Replies(lbtest.Throttled("60"))
		for range 10 {
			w.Post(`{}`).WantServed(t, "c")
		}
		w.Backends["c"].Replies(lbtest.Throttled("60"))
		w.Post(`{}`).WantServed(t, "a")
	})
}

func TestWeightsCountAmongTheBackendsThatAreLeft(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			weight 6
		}
		backend http://b {
			weight 3
		}
		backend http://c {
			weight 1
		}
	}`, func(t *testing.T, w *lbtest.World) {
		ratios := func(want map[string]float64) {
			t.Helper()
			const n = 600
			for _, b := range w.Backends {
				b.Forget()
			}
			for range n {
				w.Post(`{}`).WantServed(t, "a", "b", "c")
			}
			for name, p := range want {
				// four standard deviations of the binomial distribution
				if got, off := len(w.Backends[name].Received()), 4*math.Sqrt(n*p*(1-p)); math.Abs(float64(got)-p*n) > off {
					t.Errorf("%s served %d of %d, want %.0f ± %.0f", name, got, n, p*n, off)
				}
			}
		}
		ratios(map[string]float64{"a": 0.6, "b": 0.3, "c": 0.1})
		w.Backends["a"].Replies(lbtest.Throttled("60"))
		w.Post(`{}`)
		w.Backends["a"].Replies(func(http.ResponseWriter, *http.Request) { t.Error("a was called before its time") })
		for range 20 { // until the one request that a refuses has gone
			if len(w.Logged("cooldown started")) == 1 {
				break
			}
			w.Backends["a"].Replies(lbtest.Throttled("60"))
			w.Post(`{}`)
		}
		w.Backends["a"].Replies(func(http.ResponseWriter, *http.Request) { t.Error("a was called before its time") })
		ratios(map[string]float64{"b": 0.75, "c": 0.25})
	})
}

// The balancer makes its attempts itself, so reverse_proxy's own counts, which
// these policies have, stay 0.
func TestPoliciesThatCountRequestsInFlightSeeThoseOfThePool(t *testing.T) {
	for _, policy := range []string{"least_conn", "random_choose 3"} {
		t.Run(policy, func(t *testing.T) {
			lbtest.InBubble(t, fmt.Sprintf(`openai_lb {
				backend http://a
				backend http://b
				backend http://c
				lb_policy %s
			}`, policy), func(t *testing.T, w *lbtest.World) {
				held := func(d time.Duration) http.HandlerFunc {
					return func(rw http.ResponseWriter, _ *http.Request) {
						rw.Header().Set("Content-Type", "text/event-stream")
						io.WriteString(rw, lbtest.StreamContent)
						rw.(http.Flusher).Flush()
						time.Sleep(d)
					}
				}
				w.Backends["a"].Replies(held(30 * time.Second))
				w.Backends["b"].Replies(held(time.Minute))
				w.Backends["c"].Replies(held(time.Minute))
				var open sync.WaitGroup
				ask := func(n int) {
					for range n {
						open.Go(func() { w.Post(`{}`).WantServed(t, "a", "b", "c") })
						synctest.Wait()
					}
				}
				ask(30)
				w.WantCalls(map[string]int{"a": 10, "b": 10, "c": 10})
				time.Sleep(45 * time.Second) // a is done with its requests
				ask(10)
				w.WantCalls(map[string]int{"a": 20, "b": 10, "c": 10})
				open.Wait()
			})
		})
	}
}
