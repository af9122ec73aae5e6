package openailb

import (
	"math"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const threeBackends = `openai_lb {
	backend http://a {
		priority 1
	}
	backend http://b {
		priority 2
		weight 3
	}
	backend http://c {
		priority 2
		weight 1
	}
}`

const threeInOrder = `openai_lb {
	backend http://a
	backend http://b {
		priority 2
	}
	backend http://c {
		priority 3
	}
}`

func TestAThrottledBackendRestsExactlyAsLongAsItAsked(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("3"))
		const requests = 3000
		for range requests {
			w.post(`{}`).wantServed(t, "b", "c")
			time.Sleep(time.Millisecond - time.Nanosecond)
		}
		w.wantCalls(map[string]int{"a": 1})
		b, c := len(w.backends["b"].received()), len(w.backends["c"].received())
		if b+c != requests {
			t.Errorf("b and c served %d requests, want %d", b+c, requests)
		}
		// three standard deviations of the binomial distribution
		if want, off := 0.75*requests, 3*math.Sqrt(requests*0.75*0.25); math.Abs(float64(b)-want) > off {
			t.Errorf("b served %d of %d, want %.0f ± %.0f", b, requests, want, off)
		}

		w.backends["a"].recovers()
		time.Sleep(time.Millisecond)
		for range 10 {
			w.post(`{}`).wantServed(t, "a")
		}
		calls := w.backends["a"].received()
		if rest := calls[1].at.Sub(calls[0].at); rest < 3*time.Second {
			t.Errorf("a was called again after %s, want 3s or more", rest)
		}
		benched, back := w.logged("backend benched"), w.logged("backend back")
		if len(benched) != 1 || len(back) != 1 {
			t.Fatalf("logged %d benched and %d back, want one each", len(benched), len(back))
		}
		fields := benched[0].ContextMap()
		for field, want := range map[string]any{"backend": "a", "class": "throttled", "status": int64(429), "seconds": 3.0, "hint": "retry-after"} {
			if fields[field] != want {
				t.Errorf("benched logs %s=%v, want %v", field, fields[field], want)
			}
		}
	})
}

func TestAfterABenchOneRequestGoesFirst(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("20"))
		w.post(`{}`).wantServed(t, "b", "c")
		time.Sleep(20 * time.Second)

		// a takes its time now, and 20 requests come at once
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(5 * time.Second)
		})
		w.backends["a"].forget()
		var wg sync.WaitGroup
		burst := func(n int) {
			for range n {
				wg.Go(func() { w.post(`{}`).wantServed(t, "a", "b", "c") })
			}
			synctest.Wait()
		}
		burst(20)
		w.wantCalls(map[string]int{"a": 1})
		// silence is consent: after a second, the rest follow
		time.Sleep(999 * time.Millisecond)
		burst(20)
		w.wantCalls(map[string]int{"a": 1})
		time.Sleep(time.Millisecond)
		burst(20)
		w.wantCalls(map[string]int{"a": 21})
		wg.Wait()
	})
}

func TestAProbeThatIsRefusedBenchesAgain(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("5"))
		for range 3 {
			for range 10 {
				w.post(`{}`).wantServed(t, "b", "c")
			}
			time.Sleep(5 * time.Second)
		}
		w.wantCalls(map[string]int{"a": 3})
		if n := len(w.logged("backend benched")); n != 3 {
			t.Errorf("logged %d benches, want 3", n)
		}
	})
}

func TestABurstOfThrottlesIsOneBench(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(100 * time.Millisecond) // all are in flight before the first is refused
			throttled("2")(rw, r)
		})
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() { w.post(`{}`).wantServed(t, "b", "c") })
		}
		wg.Wait()
		w.wantCalls(map[string]int{"a": 200})
		if n := len(w.logged("backend benched")); n != 1 {
			t.Errorf("logged %d benches, want 1", n)
		}
		w.backends["a"].recovers()
		time.Sleep(1999 * time.Millisecond)
		w.post(`{}`).wantServed(t, "b", "c")
		time.Sleep(time.Millisecond)
		w.post(`{}`).wantServed(t, "a")
	})
}

func TestALaterAndLongerHintExtendsABenchAndAShorterDoesNot(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		// three requests in flight, refused one after the other
		var mu sync.Mutex
		hints := []string{"10", "2", "20"}
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			mu.Lock()
			n := len(hints)
			hint := hints[0]
			hints = hints[1:]
			mu.Unlock()
			time.Sleep(time.Duration(4-n) * time.Second)
			throttled(hint)(rw, r)
		})
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { w.post(`{}`).wantServed(t, "b", "c") })
		}
		wg.Wait() // t = 3 s; the last said 20 s at 3 s
		w.backends["a"].recovers()
		time.Sleep(20*time.Second - time.Nanosecond)
		w.post(`{}`).wantServed(t, "b", "c")
		time.Sleep(time.Nanosecond)
		w.post(`{}`).wantServed(t, "a")
	})
}

func TestASuccessFromBeforeABenchDoesNotEndIt(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(2 * time.Second) // an early request, served late
		})
		var wg sync.WaitGroup
		wg.Go(func() { w.post(`{}`).wantServed(t, "a") })
		synctest.Wait()
		w.backends["a"].replies(throttled("10"))
		w.post(`{}`).wantServed(t, "b", "c")
		wg.Wait()
		w.backends["a"].recovers()
		w.post(`{}`).wantServed(t, "b", "c")
		time.Sleep(8 * time.Second)
		w.post(`{}`).wantServed(t, "a")
	})
}

func TestWhenAllThrottleTheClientIsToldTheSoonestReturn(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("44"))
		w.backends["b"].replies(throttled("4"))
		w.backends["c"].replies(throttled("7"))
		reply := w.post(`{}`)
		reply.wantError(t, 429, "rate_limit_exceeded")
		if got := reply.header.Get("Retry-After"); got != "4" {
			t.Errorf("Retry-After is %q, want 4", got)
		}
		if got := reply.header.Get("Retry-After-Ms"); got != "4000" {
			t.Errorf("Retry-After-Ms is %q, want 4000", got)
		}
		time.Sleep(1500 * time.Millisecond)
		reply = w.post(`{}`)
		reply.wantError(t, 429, "rate_limit_exceeded")
		if s, ms := reply.header.Get("Retry-After"), reply.header.Get("Retry-After-Ms"); s != "3" || ms != "2500" {
			t.Errorf("after 1.5s Retry-After is %q and Retry-After-Ms %q, want 3 and 2500", s, ms)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
		w.backends["b"].recovers()
		time.Sleep(2500 * time.Millisecond)
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 1, "b": 2, "c": 1})
	})
}

func TestAClientIsNeverToldToWaitForMoreThanAMinuteOrNotAtAll(t *testing.T) {
	for hint, want := range map[string][2]string{
		"86400": {"59", "59000"},
		"0":     {"1", "1000"},
		"0.043": {"1", "1000"},
		"1.2":   {"2", "1200"},
	} {
		t.Run(hint, func(t *testing.T) {
			inBubble(t, threeBackends, func(t *testing.T, w *world) {
				for _, b := range w.backends {
					b.replies(throttled(hint))
				}
				reply := w.post(`{}`)
				reply.wantError(t, 429, "rate_limit_exceeded")
				if got := [2]string{reply.header.Get("Retry-After"), reply.header.Get("Retry-After-Ms")}; got != want {
					t.Errorf("told to wait %v, want %v", got, want)
				}
				w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
			})
		})
	}
}

func TestAHintIsKeptWithinItsBounds(t *testing.T) {
	for _, c := range []struct {
		name  string
		reply http.HandlerFunc
		want  time.Duration
	}{
		{"a day becomes retry_after_max", throttled("86400"), 30 * time.Second},
		{"nothing becomes retry_after_default", status(429), 7 * time.Second},
		{"zero becomes retry_after_min", throttled("0"), 100 * time.Millisecond},
		{"milliseconds stay milliseconds", status(429, "Retry-After-Ms", "143"), 143 * time.Millisecond},
		{"an exhausted account rests retry_after_max", func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(429)
			rw.Write([]byte(`{"error":{"code":"insufficient_quota"}}`))
		}, 30 * time.Second},
		{"an overload without a hint rests fail_duration", status(503), 4 * time.Second},
		{"an overload with a hint rests as long", status(503, "Retry-After", "2"), 2 * time.Second},
		{"a failure rests fail_duration, whatever it says", status(500, "Retry-After", "2"), 4 * time.Second},
		{"a refused credential rests a minute", status(401), time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, `openai_lb {
				backend http://a
				backend http://b {
					priority 2
				}
				fail_duration 4s
				retry_after_default 7s
				retry_after_min 100ms
				retry_after_max 30s
			}`, func(t *testing.T, w *world) {
				w.backends["a"].replies(c.reply)
				w.post(`{}`).wantServed(t, "b")
				w.backends["a"].recovers()
				time.Sleep(c.want - time.Nanosecond)
				w.post(`{}`).wantServed(t, "b")
				time.Sleep(time.Nanosecond)
				w.post(`{}`).wantServed(t, "a")
			})
		})
	}
}

func TestOneRequestThatFailsEverywhereBenchesOneBackend(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		for _, b := range w.backends {
			b.replies(status(500))
		}
		reply := w.post(`{}`)
		if reply.status != 500 || !strings.Contains(reply.body, "as told") {
			t.Fatalf("client got %d %s, want the last backend's 500", reply.status, reply.body)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
		for _, b := range w.backends {
			b.recovers()
		}
		w.post(`{}`).wantServed(t, "b", "c")
		if n := len(w.logged("backend benched")); n != 1 {
			t.Errorf("logged %d benches, want 1", n)
		}
	})
}

func TestSuspectsAreTriedWhenNobodyElseIsLeft(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		for _, name := range []string{"a", "b", "c"} {
			w.stop(name)
		}
		w.post(`{}`).wantError(t, 502, "upstream_unreachable")
		time.Sleep(time.Second)
		w.serve("c:80", w.backends["c"])
		w.post(`{}`).wantServed(t, "c")
		if n := len(w.logged("backend back")); n != 1 {
			t.Errorf("logged %d backends as back, want 1: the suspect that served", n)
		}
		w.post(`{}`).wantServed(t, "c")
	})
}

func TestAThrottledBackendIsNotASuspect(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("30"))
		w.stop("b")
		w.stop("c")
		// a throttles, b and c cannot be reached: a's return is the honest answer
		w.post(`{}`).wantError(t, 429, "rate_limit_exceeded")
		w.post(`{}`).wantError(t, 429, "rate_limit_exceeded")
		w.wantCalls(map[string]int{"a": 1})
	})
}

func TestTheReplyThatTellsMostReachesTheClient(t *testing.T) {
	for _, c := range []struct {
		name    string
		a, b, c http.HandlerFunc
		status  int
		code    string // of our own error
		backend string // of a backend's error
		retry   string
	}{
		{"a failure, then throttles: the failure", status(500), throttled("9"), throttled("9"), 500, "", "a", ""},
		{"an overload's hint is the soonest return of all", status(503, "Retry-After", "30"), throttled("9"), throttled("5"), 503, "", "a", "5"},
		{"the last of several failures", status(500), status(503), status(502), 502, "", "c", ""},
		{"refused credentials everywhere", status(401), status(403), status(401), 502, "upstream_credentials_rejected", "", ""},
		{"a refused credential and throttles", status(401), throttled("9"), throttled("5"), 429, "rate_limit_exceeded", "", "5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, threeInOrder, func(t *testing.T, w *world) {
				w.backends["a"].replies(c.a)
				w.backends["b"].replies(c.b)
				w.backends["c"].replies(c.c)
				reply := w.post(`{}`)
				if c.code != "" {
					reply.wantError(t, c.status, c.code)
				} else if reply.status != c.status || reply.backend != c.backend {
					t.Fatalf("client got %d of %q, want %d of %s", reply.status, reply.backend, c.status, c.backend)
				}
				if got := reply.header.Get("Retry-After"); got != c.retry {
					t.Errorf("Retry-After is %q, want %q", got, c.retry)
				}
				w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
			})
		})
	}
}

func TestTheClientsOwnErrorIsPassedOnAndBenchesNobody(t *testing.T) {
	for _, code := range []int{400, 404, 409, 413, 422} {
		inBubble(t, threeBackends, func(t *testing.T, w *world) {
			w.backends["a"].replies(status(code))
			for range 2 {
				if reply := w.post(`{}`); reply.status != code || reply.backend != "a" || !strings.Contains(reply.body, "as told") {
					t.Fatalf("client got %d of %q %s, want a's %d", reply.status, reply.backend, reply.body, code)
				}
			}
			w.wantCalls(map[string]int{"a": 2, "b": 0, "c": 0})
		})
	}
}

func TestABackendWithoutHeadersInTimeIsLeft(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
		response_header_timeout 30s
	}`, func(t *testing.T, w *world) {
		left := make(chan time.Time, 1)
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			left <- time.Now()
		})
		start := time.Now()
		w.post(`{}`).wantServed(t, "b")
		if waited := time.Since(start); waited != 30*time.Second {
			t.Errorf("waited %s for a, want 30s", waited)
		}
		if at := <-left; at.Sub(start) != 30*time.Second {
			t.Errorf("a felt the end after %s, want 30s", at.Sub(start))
		}
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 1, "b": 2})

		w.backends["b"].replies(func(rw http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		w.post(`{}`).wantError(t, 504, "upstream_timeout")
	})
}

func TestMaxFailsCountsFailuresWithinFailDuration(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
		fail_duration 10s
		max_fails 3
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(status(500))
		w.post(`{}`).wantServed(t, "b")
		w.post(`{}`).wantServed(t, "b")
		time.Sleep(10 * time.Second) // those two are forgotten
		for range 3 {
			w.post(`{}`).wantServed(t, "b")
		}
		w.wantCalls(map[string]int{"a": 5})
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 5})
	})
}

func TestLBRetriesLimitsFurtherBackends(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
		backend http://c {
			priority 3
		}
		lb_retries 1
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("9"))
		w.backends["b"].replies(throttled("9"))
		reply := w.post(`{}`)
		reply.wantError(t, 429, "rate_limit_exceeded")
		// c was not asked, and may be asked at once
		if got := reply.header.Get("Retry-After"); got != "1" {
			t.Errorf("Retry-After is %q, want 1", got)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
		w.post(`{}`).wantServed(t, "c")
	})
}

func TestLBTryDurationLimitsFurtherBackends(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
		lb_try_duration 5s
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(6 * time.Second)
			status(500)(rw, r)
		})
		if reply := w.post(`{}`); reply.status != 500 || reply.backend != "a" {
			t.Errorf("client got %d of %q, want a's 500", reply.status, reply.backend)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 0})
	})
}

func TestAllThrottledForwardPassesTheSoonestBackendsReplyOn(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b
		all_throttled forward
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("44"))
		w.backends["b"].replies(throttled("4"))
		for range 2 {
			reply := w.post(`{}`)
			if reply.status != 429 || !strings.Contains(reply.body, "as told") {
				t.Fatalf("client got %d %s, want a backend's own 429", reply.status, reply.body)
			}
		}
		w.wantCalls(map[string]int{"a": 1, "b": 2})
		w.backends["b"].recovers()
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 1, "b": 3})
	})
}

func TestOnlyListedStatusesAreJudged(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
		unhealthy_status 429 409
	}`, func(t *testing.T, w *world) {
		w.backends["a"].replies(status(500))
		if reply := w.post(`{}`); reply.status != 500 || reply.backend != "a" {
			t.Errorf("client got %d of %q, want a's 500", reply.status, reply.backend)
		}
		w.backends["a"].replies(status(409))
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 2})
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 2})
	})
}

func TestLogLevelsSayWhoMustAct(t *testing.T) {
	for _, c := range []struct {
		name    string
		reply   http.HandlerFunc
		benched zapcore.Level
	}{
		{"a throttle changes a state", throttled("3"), zap.InfoLevel},
		{"a PTU deployment's short throttle is for debugging", status(429, "Retry-After-Ms", "43"), zap.DebugLevel},
		{"a failure is a warning", status(500), zap.WarnLevel},
		{"a refused key needs a person", status(401), zap.ErrorLevel},
		{"an empty account needs a person", status(402), zap.ErrorLevel},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, threeBackends, func(t *testing.T, w *world) {
				w.backends["a"].replies(c.reply)
				w.post(`{}`).wantServed(t, "b", "c")
				w.post(`{}`).wantServed(t, "b", "c")
				if got := levels(w.logged("backend benched")); len(got) != 1 || got[0] != c.benched {
					t.Errorf("logged at %v, want once at %s", got, c.benched)
				}
			})
		})
	}
}
