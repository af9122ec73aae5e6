package openailb

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
)

// suspectAll has every backend fail until it is under suspicion.
func (w *world) suspectAll() {
	w.t.Helper()
	w.allReply(status(500))
	for range w.backends {
		w.post(`{}`)
	}
	if n := len(w.logged("backend benched")); n != len(w.backends) {
		w.t.Fatalf("%d benches, want %d", n, len(w.backends))
	}
	for _, b := range w.backends {
		b.forget()
	}
}

func TestSuspectsShareByPriorityAndWeight(t *testing.T) {
	for _, c := range []struct {
		name, config string
		least, most  map[string]int // of 400 at once; none has none
	}{
		{"alike", poolOf("a b c", ""), map[string]int{"a": 90, "b": 90, "c": 90}, map[string]int{"a": 180, "b": 180, "c": 180}},
		{"by weight", "openai_lb {\nbackend http://a {\nweight 6\n}\nbackend http://b {\nweight 2\n}\nbackend http://c\n}",
			map[string]int{"a": 220, "b": 50, "c": 20}, map[string]int{"a": 310, "b": 130, "c": 80}},
		{"by priority", threeBackends, map[string]int{"a": 400}, map[string]int{"a": 400}},
		{"below max_requests", "openai_lb {\nbackend http://a {\nmax_requests 5\n}\nbackend http://b {\npriority 2\n}\n}",
			map[string]int{"a": 5, "b": 395}, map[string]int{"a": 5, "b": 395}},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, c.config, func(t *testing.T, w *world) {
				w.suspectAll()
				// all are on their way before the first is answered
				w.allReply(func(http.ResponseWriter, *http.Request) { time.Sleep(time.Second) })
				var wg sync.WaitGroup
				for range 400 {
					wg.Go(func() { w.post(`{}`).wantServed(t, "a", "b", "c") })
				}
				synctest.Wait()
				for name, b := range w.backends {
					if n := len(b.received()); n < c.least[name] || n > c.most[name] {
						t.Errorf("%s got %d of 400, want %d to %d", name, n, c.least[name], c.most[name])
					}
				}
				wg.Wait()
			})
		})
	}
}

func TestADrainedBackendComesBeforeSuspects(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\nweight 0\n}\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(status(500))
		w.post(`{}`).wantServed(t, "b")
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 1})
	})
}

// TestASuccessFromBeforeAnExtensionDoesNotEndTheBench has a suspect fail while
// an earlier request to it is still on its way, and is served in the end.
func TestASuccessFromBeforeAnExtensionDoesNotEndTheBench(t *testing.T) {
	inBubble(t, poolOf("a b", "lb_policy first"), func(t *testing.T, w *world) {
		w.suspectAll()
		time.Sleep(time.Second)
		w.backends["a"].replies(func(http.ResponseWriter, *http.Request) { time.Sleep(3 * time.Second) })
		var early sync.WaitGroup
		early.Go(func() { w.post(`{}`).wantServed(t, "a") }) // from 1 s to 4 s
		synctest.Wait()
		time.Sleep(time.Second)
		w.backends["a"].replies(status(500))
		w.backends["b"].recovers()
		w.post(`{}`).wantServed(t, "b") // at 2 s, a failed again, and b is back
		if n := len(w.backends["a"].received()); n != 2 {
			t.Fatalf("a was called %d times: the test does not show what it is to show", n)
		}
		early.Wait()
		w.backends["a"].recovers()
		w.post(`{}`).wantServed(t, "b")
		time.Sleep(8 * time.Second) // 12 s: the later bench is over
		w.post(`{}`).wantServed(t, "a")
	})
}

// strangers asks for models that nobody has heard of.
func (w *world) strangers(n int, round string) {
	for i := range n {
		w.post(fmt.Sprintf(`{"model":"made-up-%s-%d"}`, round, i))
	}
}

func TestMadeUpNamesPushNoRealModelOut(t *testing.T) {
	const notFound = `{"error":{"message":"no","type":"invalid_request_error","code":"model_not_found"}}`
	for name, c := range map[string]struct{ real, stranger http.HandlerFunc }{
		"a throttled model, strangers throttled for longer": {throttled("30"), throttled("200")},
		"a failing model, strangers that are not found":     {status(500), says(404, notFound)},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, poolOf("a b", "lb_policy first\nfail_duration 30s"), func(t *testing.T, w *world) {
				w.post(`{"model":"gpt-4o"}`).wantServed(t, "a") // it is there
				w.backends["a"].replies(c.real)
				w.post(`{"model":"gpt-4o"}`).wantServed(t, "b")
				w.allReply(c.stranger)
				w.strangers(270, "1")
				w.allReply(nil)
				for _, b := range w.backends {
					b.forget()
				}
				w.post(`{"model":"gpt-4o"}`).wantServed(t, "b")
				w.wantCalls(map[string]int{"a": 0})
				time.Sleep(31 * time.Second)
				w.post(`{"model":"gpt-4o"}`).wantServed(t, "a")
			})
		})
	}
}

func TestAMissingModelIsAnErrorOnceAMinuteForEachBackend(t *testing.T) {
	inBubble(t, poolOf("a b", ""), func(t *testing.T, w *world) {
		w.allReply(says(404, `{"error":{"code":"DeploymentNotFound","message":"no"}}`))
		errors := func() map[any]int {
			lines := make(map[any]int)
			for _, entry := range w.logs.All() {
				if entry.Level >= zap.WarnLevel {
					lines[entry.ContextMap()["backend"]]++
				}
			}
			return lines
		}
		for minute := 1; minute <= 3; minute++ {
			for range 6 {
				w.strangers(15, fmt.Sprint(minute, time.Now().Unix()))
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
