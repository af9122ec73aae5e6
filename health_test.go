package openailb

import (
	"bytes"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

func TestAThrottledBackendRestsExactlyAsLongAsItAsked(t *testing.T) {
	inBubble(t, threeBackends, func(t *testing.T, w *world) {
		w.backends["a"].replies(throttled("3"))
		const requests = 1000
		for range requests {
			w.post(`{}`).wantServed(t, "b", "c")
			time.Sleep(3*time.Millisecond - time.Nanosecond)
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
		time.Sleep(requests * time.Nanosecond) // what is left of 3 s
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

func TestABackendCannotSayWhenItIsBackBeyondTheLimit(t *testing.T) {
	for _, hint := range []string{"86400", "99999999999999999999", "1e300", "Fri, 31 Dec 9999 23:59:59 GMT", "106751d"} {
		inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
			w.backends["a"].replies(throttled(hint))
			reply := w.post(`{}`)
			reply.wantError(t, 429, "rate_limit_exceeded")
			w.backends["a"].recovers()
			time.Sleep(5 * time.Minute)
			w.post(`{}`).wantServed(t, "a")
		})
	}
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

func TestAStormOfThrottlesLeavesNothingBehind(t *testing.T) {
	a, serverA := listen(t, "a")
	b, serverB := listen(t, "b")
	logs := filepath.Join(t.TempDir(), "log.json")
	before := runtime.NumGoroutine()
	address := serveAt(t, fmt.Sprintf(`openai_lb {
		backend %s {
			name a
		}
		backend %s {
			name b
			priority 2
		}
	}`, serverA.URL, serverB.URL), "log {\noutput file "+logs+"\n}")
	// all requests are at a before the first is refused
	var arrived sync.WaitGroup
	arrived.Add(200)
	a.replies(func(w http.ResponseWriter, r *http.Request) {
		arrived.Done()
		arrived.Wait()
		throttled("300")(w, r)
	})
	client := newClient(t)
	var clients sync.WaitGroup
	for range 200 {
		clients.Go(func() {
			if reply := ask(client, "http://"+address+"/v1/chat/completions"); reply.status != 200 || reply.backend != "b" {
				t.Errorf("client got %d from %q: %v", reply.status, reply.backend, reply.err)
			}
		})
	}
	clients.Wait()
	client.CloseIdleConnections()
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	if n, m := len(a.received()), len(b.received()); n != 200 || m != 200 {
		t.Errorf("a was called %d times and b %d, want 200 each", n, m)
	}
	text, err := os.ReadFile(logs)
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(text, []byte("backend benched")); n != 1 {
		t.Errorf("logged %d benches, want 1", n)
	}
	serverA.Close()
	serverB.Close()
	waitFor(t, func() bool { return runtime.NumGoroutine() <= before })
}
