package openailb

import (
	"math"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestADrainedBackendIsUsedWhenNoOtherIsLeft(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			weight 0
		}
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *world) {
		for range 20 {
			w.post(`{}`).wantServed(t, "b")
		}
		w.wantCalls(map[string]int{"a": 0})
		w.backends["b"].replies(throttled("5"))
		w.post(`{}`).wantServed(t, "a")
		time.Sleep(5 * time.Second)
		w.backends["b"].recovers()
		w.post(`{}`).wantServed(t, "b")
	})
}

func TestMaxRequestsSendsTheRestElsewhere(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			max_requests 3
		}
		backend http://b {
			priority 2
			max_requests 2
		}
	}`, func(t *testing.T, w *world) {
		slow := func(rw http.ResponseWriter, r *http.Request) {
			rw.(http.Flusher).Flush() // the place is held until the reply's end
			time.Sleep(time.Minute)
		}
		w.backends["a"].replies(slow)
		w.backends["b"].replies(slow)
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() { w.post(`{}`).wantServed(t, "a", "b") })
			synctest.Wait()
		}
		w.wantCalls(map[string]int{"a": 3, "b": 2})
		reply := w.post(`{}`)
		reply.wantError(t, 429, "rate_limit_exceeded")
		if got := reply.header.Get("Retry-After"); got != "1" {
			t.Errorf("Retry-After is %q, want 1", got)
		}
		wg.Wait()
		synctest.Wait()
		w.backends["a"].recovers()
		w.post(`{}`).wantServed(t, "a")
	})
}

func TestBackendsAtOneURLAreApartByTheirCredential(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			name one
			header X-Gateway-Key 1
		}
		backend http://a {
			name two
			priority 2
			header X-Gateway-Key 2
		}
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Gateway-Key") == "1" {
				throttled("60")(rw, r)
			}
		})
		for range 3 {
			w.post(`{}`).wantServed(t, "a")
		}
		w.wantCalls(map[string]int{"a": 4})
	})
}

func TestMaxRequestsIsABackendsOwn(t *testing.T) {
	inBubble(t, `openai_lb {
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
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) { time.Sleep(time.Minute) })
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { w.post(`{}`).wantServed(t, "a") })
			synctest.Wait()
		}
		w.post(`{}`).wantError(t, 429, "rate_limit_exceeded")
		wg.Wait()
	})
}

func TestAFailedAttemptGivesItsPlaceBack(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			max_requests 1
		}
		backend http://b {
			priority 2
		}
		fail_duration 1s
	}`, func(t *testing.T, w *world) {
		for _, reply := range []http.HandlerFunc{status(500), throttled("1"), func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }} {
			w.backends["a"].replies(reply)
			w.post(`{}`).wantServed(t, "b")
			w.backends["a"].recovers()
			time.Sleep(time.Second)
			w.post(`{}`).wantServed(t, "a")
		}
	})
}

func TestAPolicyOfReverseProxysChoosesWithinAPriority(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			priority 2
		}
		backend http://b
		backend http://c
		lb_policy round_robin
	}`, func(t *testing.T, w *world) {
		for range 10 {
			w.post(`{}`).wantServed(t, "b", "c")
		}
		w.wantCalls(map[string]int{"a": 0, "b": 5, "c": 5})
		w.backends["b"].replies(throttled("60"))
		for range 10 {
			w.post(`{}`).wantServed(t, "c")
		}
		w.backends["c"].replies(throttled("60"))
		w.post(`{}`).wantServed(t, "a")
	})
}

func TestWeightsCountAmongTheBackendsThatAreLeft(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			weight 6
		}
		backend http://b {
			weight 3
		}
		backend http://c {
			weight 1
		}
	}`, func(t *testing.T, w *world) {
		ratios := func(want map[string]float64) {
			t.Helper()
			const n = 600
			for _, b := range w.backends {
				b.forget()
			}
			for range n {
				w.post(`{}`).wantServed(t, "a", "b", "c")
			}
			for name, p := range want {
				// four standard deviations of the binomial distribution
				if got, off := len(w.backends[name].received()), 4*math.Sqrt(n*p*(1-p)); math.Abs(float64(got)-p*n) > off {
					t.Errorf("%s served %d of %d, want %.0f ± %.0f", name, got, n, p*n, off)
				}
			}
		}
		ratios(map[string]float64{"a": 0.6, "b": 0.3, "c": 0.1})
		w.backends["a"].replies(throttled("60"))
		w.post(`{}`)
		w.backends["a"].replies(func(http.ResponseWriter, *http.Request) { t.Error("a was called before its time") })
		for range 20 { // until the one request that a refuses has gone
			if len(w.logged("backend benched")) == 1 {
				break
			}
			w.backends["a"].replies(throttled("60"))
			w.post(`{}`)
		}
		w.backends["a"].replies(func(http.ResponseWriter, *http.Request) { t.Error("a was called before its time") })
		ratios(map[string]float64{"b": 0.75, "c": 0.25})
	})
}
