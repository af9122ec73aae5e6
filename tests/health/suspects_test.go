package health

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// suspectAll has every backend fail until it is under suspicion.
func suspectAll(w *lbtest.World) {
	w.T.Helper()
	w.AllReply(lbtest.Status(500))
	for range w.Backends {
		w.Post(`{}`)
	}
	if n := len(w.Logged("cooldown started")); n != len(w.Backends) {
		w.T.Fatalf("%d cooldowns, want %d", n, len(w.Backends))
	}
	for _, b := range w.Backends {
		b.Forget()
	}
}

func TestSuspectsShareByPriorityAndWeight(t *testing.T) {
	for _, c := range []struct {
		name, config string
		least, most  map[string]int // of 400 at once; none has none
	}{
		{"alike", lbtest.PoolOf("a b c", ""), map[string]int{"a": 90, "b": 90, "c": 90}, map[string]int{"a": 180, "b": 180, "c": 180}},
		{"by weight", "openai_lb {\nbackend http://a {\nweight 6\n}\nbackend http://b {\nweight 2\n}\nbackend http://c\n}",
			map[string]int{"a": 220, "b": 50, "c": 20}, map[string]int{"a": 310, "b": 130, "c": 80}},
		{"by priority", lbtest.ThreeBackends, map[string]int{"a": 400}, map[string]int{"a": 400}},
		{"below max_requests", "openai_lb {\nbackend http://a {\nmax_requests 5\n}\nbackend http://b {\npriority 2\n}\n}",
			map[string]int{"a": 5, "b": 395}, map[string]int{"a": 5, "b": 395}},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, c.config, func(t *testing.T, w *lbtest.World) {
				suspectAll(w)
				// all are on their way before the first is answered
				w.AllReply(func(http.ResponseWriter, *http.Request) { time.Sleep(time.Second) })
				var wg sync.WaitGroup
				for range 400 {
					wg.Go(func() { w.Post(`{}`).WantServed(t, "a", "b", "c") })
				}
				synctest.Wait()
				for name, b := range w.Backends {
					if n := len(b.Received()); n < c.least[name] || n > c.most[name] {
						t.Errorf("%s got %d of 400, want %d to %d", name, n, c.least[name], c.most[name])
					}
				}
				wg.Wait()
			})
		})
	}
}

func TestADrainedBackendComesBeforeSuspects(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\nweight 0\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Status(500))
		w.Post(`{}`).WantServed(t, "b")
		w.Post(`{}`).WantServed(t, "b")
		w.WantCalls(map[string]int{"a": 1})
	})
}

// TestASuccessFromBeforeAnExtensionDoesNotEndTheCooldown has a suspect fail
// while an earlier request to it is still on its way, and is served in the end.
func TestASuccessFromBeforeAnExtensionDoesNotEndTheCooldown(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		suspectAll(w)
		time.Sleep(time.Second)
		w.Backends["a"].Replies(func(http.ResponseWriter, *http.Request) { time.Sleep(3 * time.Second) })
		var early sync.WaitGroup
		early.Go(func() { w.Post(`{}`).WantServed(t, "a") }) // from 1 s to 4 s
		synctest.Wait()
		time.Sleep(time.Second)
		w.Backends["a"].Replies(lbtest.Status(500))
		w.Backends["b"].Recovers()
		w.Post(`{}`).WantServed(t, "b") // at 2 s, a failed again, and b is back
		if n := len(w.Backends["a"].Received()); n != 2 {
			t.Fatalf("a was called %d times: the test does not show what it is to show", n)
		}
		early.Wait()
		w.Backends["a"].Recovers()
		w.Post(`{}`).WantServed(t, "b")
		time.Sleep(8 * time.Second) // 12 s: the later cooldown is over
		w.Post(`{}`).WantServed(t, "a")
	})
}

// strangers asks for models that nobody has heard of.
func strangers(w *lbtest.World, n int, round string) {
	for i := range n {
		w.Post(fmt.Sprintf(`{"model":"made-up-%s-%d"}`, round, i))
	}
}

func TestMadeUpNamesPushNoRealModelOut(t *testing.T) {
	const notFound = `{"error":{"message":"no","type":"invalid_request_error","code":"model_not_found"}}`
	for name, c := range map[string]struct{ real, stranger http.HandlerFunc }{
		"a throttled model, strangers throttled for longer": {lbtest.Throttled("30"), lbtest.Throttled("200")},
		"a failing model, strangers that are not found":     {lbtest.Status(500), lbtest.Says(404, notFound)},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first\nfail_duration 30s"), func(t *testing.T, w *lbtest.World) {
				w.AllReply(lbtest.Status(400))
				strangers(w, 300, "0") // more than a backend remembers to have served
				w.AllReply(nil)
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a") // it is there
				w.Backends["a"].Replies(c.real)
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
				w.AllReply(c.stranger)
				strangers(w, 1500, "1")
				w.AllReply(nil)
				for _, b := range w.Backends {
					b.Forget()
				}
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
				w.WantCalls(map[string]int{"a": 0})
				time.Sleep(31 * time.Second)
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a")
			})
		})
	}
}

func TestAMissingModelIsAnErrorOnceAMinuteForEachBackend(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Says(404, `{"error":{"code":"DeploymentNotFound","message":"no"}}`))
		errors := func() map[any]int {
			lines := make(map[any]int)
			for _, entry := range w.Logs.All() {
				if entry.Level >= zap.WarnLevel {
					lines[entry.ContextMap()["backend"]]++
				}
			}
			return lines
		}
		for minute := 1; minute <= 3; minute++ {
			for range 6 {
				strangers(w, 15, fmt.Sprint(minute, time.Now().Unix()))
				time.Sleep(9 * time.Second)
			}
			for _, name := range []string{"a", "b"} {
				if n := errors()[name]; n != minute {
					t.Errorf("after %d minutes, %d lines tell of %s, want %d", minute, n, name, minute)
				}
			}
			time.Sleep(7 * time.Second)
		}
	})
}
