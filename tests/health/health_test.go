package health

import (
	"bytes"
	"fmt"
	"math"
	"net/http"
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

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAThrottledBackendRestsExactlyAsLongAsItAsked(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("3"))
		const requests = 1000
		for range requests {
			w.Post(`{}`).WantServed(t, "b", "c")
			time.Sleep(3*time.Millisecond - time.Nanosecond)
		}
		w.WantCalls(map[string]int{"a": 1})
		b, c := len(w.Backends["b"].Received()), len(w.Backends["c"].Received())
		if b+c != requests {
			t.Errorf("b and c served %d requests, want %d", b+c, requests)
		}
		// three standard deviations of the binomial distribution
		if want, off := 0.75*requests, 3*math.Sqrt(requests*0.75*0.25); math.Abs(float64(b)-want) > off {
			t.Errorf("b served %d of %d, want %.0f ± %.0f", b, requests, want, off)
		}

		w.Backends["a"].Recovers()
		time.Sleep(requests * time.Nanosecond) // what is left of 3 s
		for range 10 {
			w.Post(`{}`).WantServed(t, "a")
		}
		calls := w.Backends["a"].Received()
		if rest := calls[1].At.Sub(calls[0].At); rest < 3*time.Second {
			t.Errorf("a was called again after %s, want 3s or more", rest)
		}
		synctest.Wait() // for the timer that tells of the end
		cooldowns, back := w.Logged("cooldown started"), w.Logged("cooldown ended")
		if len(cooldowns) != 1 || len(back) != 1 {
			t.Fatalf("logged the start of %d cooldowns and the end of %d, want one each", len(cooldowns), len(back))
		}
		fields := cooldowns[0].ContextMap()
		for field, want := range map[string]any{"backend": "a", "class": "throttled", "status": int64(429), "seconds": 3.0, "hint": "retry-after"} {
			if fields[field] != want {
				t.Errorf("the start of the cooldown has %s=%v, want %v", field, fields[field], want)
			}
		}
	})
}

func TestAfterACooldownOneRequestGoesFirst(t *testing.T) {
	lbtest.InBubble(t, strings.Replace(lbtest.ThreeBackends, "{\n", "{\nsilence off\n", 1), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("20"))
		w.Post(`{}`).WantServed(t, "b", "c")
		time.Sleep(20 * time.Second)

		// a takes its time now, and 20 requests come at once
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(5 * time.Second)
		})
		w.Backends["a"].Forget()
		var wg sync.WaitGroup
		burst := func(n int) {
			for range n {
				wg.Go(func() { w.Post(`{}`).WantServed(t, "a", "b", "c") })
			}
			synctest.Wait()
		}
		burst(20)
		w.WantCalls(map[string]int{"a": 1})
		// silence is consent: after a second, the rest follow
		time.Sleep(999 * time.Millisecond)
		burst(20)
		w.WantCalls(map[string]int{"a": 1})
		time.Sleep(time.Millisecond)
		burst(20)
		w.WantCalls(map[string]int{"a": 21})
		wg.Wait()
	})
}

func TestARefusedProbeStartsAnotherCooldown(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("5"))
		for range 3 {
			for range 10 {
				w.Post(`{}`).WantServed(t, "b", "c")
			}
			time.Sleep(5 * time.Second)
		}
		w.WantCalls(map[string]int{"a": 3})
		if n := len(w.Logged("cooldown started")); n != 3 {
			t.Errorf("logged %d cooldowns, want 3", n)
		}
	})
}

func TestABurstOfThrottlesIsOneCooldown(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(100 * time.Millisecond) // all are in flight before the first is refused
			lbtest.Throttled("2")(rw, r)
		})
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() { w.Post(`{}`).WantServed(t, "b", "c") })
		}
		wg.Wait()
		w.WantCalls(map[string]int{"a": 200})
		if n := len(w.Logged("cooldown started")); n != 1 {
			t.Errorf("logged %d cooldowns, want 1", n)
		}
		w.Backends["a"].Recovers()
		time.Sleep(1999 * time.Millisecond)
		w.Post(`{}`).WantServed(t, "b", "c")
		time.Sleep(time.Millisecond)
		w.Post(`{}`).WantServed(t, "a")
	})
}

func TestALaterAndLongerHintExtendsACooldownAndAShorterDoesNot(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
		// three requests in flight, refused one after the other
		var mu sync.Mutex
		hints := []string{"10", "2", "20"}
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			mu.Lock()
			n := len(hints)
			hint := hints[0]
			hints = hints[1:]
			mu.Unlock()
			time.Sleep(time.Duration(4-n) * time.Second)
			lbtest.Throttled(hint)(rw, r)
		})
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { w.Post(`{}`).WantServed(t, "b", "c") })
		}
		wg.Wait() // t = 3 s; the last said 20 s at 3 s
		w.Backends["a"].Recovers()
		time.Sleep(20*time.Second - time.Nanosecond)
		w.Post(`{}`).WantServed(t, "b", "c")
		time.Sleep(time.Nanosecond)
		w.Post(`{}`).WantServed(t, "a")
	})
}

func TestASuccessFromBeforeACooldownDoesNotEndIt(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(2 * time.Second) // an early request, served late
		})
		var wg sync.WaitGroup
		wg.Go(func() { w.Post(`{}`).WantServed(t, "a") })
		synctest.Wait()
		w.Backends["a"].Replies(lbtest.Throttled("10"))
		w.Post(`{}`).WantServed(t, "b", "c")
		wg.Wait()
		w.Backends["a"].Recovers()
		w.Post(`{}`).WantServed(t, "b", "c")
		time.Sleep(8 * time.Second)
		w.Post(`{}`).WantServed(t, "a")
	})
}

func TestAHintIsKeptWithinItsBounds(t *testing.T) {
	for _, c := range []struct {
		name  string
		reply http.HandlerFunc
		want  time.Duration
	}{
		{"a day becomes retry_after_max", lbtest.Throttled("86400"), 30 * time.Second},
		{"nothing becomes fail_duration", lbtest.Status(429), 4 * time.Second},
		{"zero becomes 50 ms", lbtest.Throttled("0"), 50 * time.Millisecond},
		{"milliseconds stay milliseconds", lbtest.Status(429, "Retry-After-Ms", "143"), 143 * time.Millisecond},
		{"an exhausted account rests retry_after_max", func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(429)
			rw.Write([]byte(`{"error":{"code":"insufficient_quota"}}`))
		}, 30 * time.Second},
		{"an overload without a hint rests fail_duration", lbtest.Status(503), 4 * time.Second},
		{"an overload with a hint rests as long", lbtest.Status(503, "Retry-After", "2"), 2 * time.Second},
		{"a failure rests fail_duration, whatever it says", lbtest.Status(500, "Retry-After", "2"), 4 * time.Second},
		{"a refused credential rests a minute", lbtest.Status(401), time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.InOrder("a b", "fail_duration 4s\nretry_after_max 30s"), func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				w.Post(`{}`).WantServed(t, "b")
				w.Backends["a"].Recovers()
				time.Sleep(c.want - time.Nanosecond)
				w.Post(`{}`).WantServed(t, "b")
				time.Sleep(time.Nanosecond)
				w.Post(`{}`).WantServed(t, "a")
			})
		})
	}
}

func TestNoRestIsLongerThanTheMaximumThatIsGiven(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first\nretry_after_max 5s"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Status(429))
		w.Post(`{}`).WantServed(t, "b")
		w.Backends["a"].Recovers()
		time.Sleep(5*time.Second - time.Nanosecond)
		w.Post(`{}`).WantServed(t, "b")
		time.Sleep(time.Nanosecond)
		w.Post(`{}`).WantServed(t, "a")
	})
}

func TestABackendCannotSayWhenItIsBackBeyondTheLimit(t *testing.T) {
	for _, hint := range []string{"86400", "99999999999999999999", "1e300", "Fri, 31 Dec 9999 23:59:59 GMT", "106751d"} {
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Throttled(hint))
			reply := w.Post(`{}`)
			reply.WantError(t, 429, "rate_limit_exceeded")
			w.Backends["a"].Recovers()
			time.Sleep(5 * time.Minute)
			w.Post(`{}`).WantServed(t, "a")
		})
	}
}

func TestOneRequestThatFailsEverywhereCoolsOneBackendDown(t *testing.T) {
	lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
		for _, b := range w.Backends {
			b.Replies(lbtest.Status(500))
		}
		reply := w.Post(`{}`)
		if reply.Status != 500 || !strings.Contains(reply.Body, "as told") {
			t.Fatalf("client got %d %s, want the last backend's 500", reply.Status, reply.Body)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 1})
		for _, b := range w.Backends {
			b.Recovers()
		}
		w.Post(`{}`).WantServed(t, "b", "c")
		if n := len(w.Logged("cooldown started")); n != 1 {
			t.Errorf("logged %d cooldowns, want 1", n)
		}
	})
}

func TestLogLevelsSayWhoMustAct(t *testing.T) {
	for _, c := range []struct {
		name  string
		reply http.HandlerFunc
		level zapcore.Level
	}{
		{"a throttle changes a state", lbtest.Throttled("3"), zap.InfoLevel},
		{"a PTU deployment's short throttle is for debugging", lbtest.Status(429, "Retry-After-Ms", "43"), zap.DebugLevel},
		{"a failure is a warning", lbtest.Status(500), zap.WarnLevel},
		{"a refused key needs a person", lbtest.Status(401), zap.ErrorLevel},
		{"an empty account needs a person", lbtest.Status(402), zap.ErrorLevel},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				w.Post(`{}`).WantServed(t, "b", "c")
				w.Post(`{}`).WantServed(t, "b", "c")
				if got := lbtest.Levels(w.Logged("cooldown started")); len(got) != 1 || got[0] != c.level {
					t.Errorf("logged at %v, want once at %s", got, c.level)
				}
			})
		})
	}
}

func TestAStormOfThrottlesLeavesNothingBehind(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	logs := filepath.Join(t.TempDir(), "log.json")
	before := runtime.NumGoroutine()
	address := lbtest.ServeAt(t, fmt.Sprintf(`openai_lb {
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
	a.Replies(func(w http.ResponseWriter, r *http.Request) {
		arrived.Done()
		arrived.Wait()
		lbtest.Throttled("300")(w, r)
	})
	client := lbtest.NewClient(t)
	var clients sync.WaitGroup
	for range 200 {
		clients.Go(func() {
			if reply := lbtest.Ask(client, "http://"+address+"/v1/chat/completions"); reply.Status != 200 || reply.Backend != "b" {
				t.Errorf("client got %d from %q: %v", reply.Status, reply.Backend, reply.Err)
			}
		})
	}
	clients.Wait()
	client.CloseIdleConnections()
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	if n, m := len(a.Received()), len(b.Received()); n != 200 || m != 200 {
		t.Errorf("a was called %d times and b %d, want 200 each", n, m)
	}
	text := lbtest.ReadFile(t, logs)
	if n := bytes.Count(text, []byte("cooldown started")); n != 1 {
		t.Errorf("logged %d cooldowns, want 1", n)
	}
	serverA.Close()
	serverB.Close()
	lbtest.WaitFor(t, func() bool { return runtime.NumGoroutine() <= before })
}

func TestAHintOfZeroAgainAndAgainIsAsGoodAsNone(t *testing.T) {
	for hint, calls := range map[string]int{
		"0":    9, // at 0, 0.05, 0.15, 0.35, 0.75, 1.55, 3.15, 6.35 and 12.75 s
		"0.04": 400,
	} {
		lbtest.InBubble(t, lbtest.ThreeBackends, func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Throttled(hint))
			for range 2000 {
				w.Post(`{}`).WantServed(t, "b", "c")
				time.Sleep(10 * time.Millisecond)
			}
			w.WantCalls(map[string]int{"a": calls})
		})
	}
}
