package failover

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// firstByteAfter is a backend that streams, and whose first byte takes so long.
func firstByteAfter(d time.Duration) func(*lbtest.Backend) {
	return func(b *lbtest.Backend) {
		b.Replies(lbtest.Streams(d, lbtest.StreamPreamble, lbtest.StreamContent, lbtest.StreamEnd))
	}
}

func TestFirstByteAvoidsASlowBackend(t *testing.T) {
	p95 := func(policy string) (longest time.Duration) {
		lbtest.InBubble(t, lbtest.PoolOf("a b c", policy), func(t *testing.T, w *lbtest.World) {
			firstByteAfter(300 * time.Millisecond)(w.Backends["a"])
			firstByteAfter(300 * time.Millisecond)(w.Backends["b"])
			firstByteAfter(3 * time.Second)(w.Backends["c"])
			var mu sync.Mutex
			var all []time.Duration
			var wg sync.WaitGroup
			for range 600 { // 20 a second
				wg.Go(func() {
					begun := time.Now()
					w.Post(`{"model":"m","stream":true}`).WantServed(t, "a", "b", "c")
					mu.Lock()
					defer mu.Unlock()
					all = append(all, time.Since(begun))
				})
				time.Sleep(50 * time.Millisecond)
			}
			wg.Wait()
			slices.Sort(all)
			longest = all[len(all)*95/100]
		})
		return longest
	}
	if got := p95("lb_policy first_byte"); got > 390*time.Millisecond {
		t.Errorf("the p95 is %s, want at most 1.3 times that of the fast backends", got)
	}
}

func TestFirstByteDoesNotCompareTheTimesOfWholeReplies(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first_byte"), func(t *testing.T, w *lbtest.World) {
		firstByteAfter(3 * time.Second)(w.Backends["a"])
		firstByteAfter(300 * time.Millisecond)(w.Backends["b"])
		for range 10 {
			w.Post(`{"model":"m","stream":true}`).WantServed(t, "a", "b")
		}
		for _, b := range w.Backends {
			b.Recovers()
			b.Forget()
		}
		for range 100 {
			w.Post(`{"model":"m"}`).WantServed(t, "a", "b")
		}
		if a := len(w.Backends["a"].Received()); a < 20 || a > 80 {
			t.Errorf("of 100 requests that are not streamed, the backend with slow streams got %d", a)
		}
		for _, b := range w.Backends {
			b.Forget()
		}
		for range 20 {
			w.Post(`{"model":"m","stream":true}`).WantServed(t, "b")
		}
	})
}

func TestFirstByteSendsFewWholeRepliesToASlowBackend(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b c", "lb_policy first_byte"), func(t *testing.T, w *lbtest.World) {
		for name, took := range map[string]time.Duration{"a": 300 * time.Millisecond, "b": 300 * time.Millisecond, "c": 3 * time.Second} {
			w.Backends[name].Replies(func(rw http.ResponseWriter, r *http.Request) {
				time.Sleep(took)
				lbtest.Says(200, `{}`)(rw, r)
			})
		}
		var wg sync.WaitGroup
		for range 600 { // 20 a second
			wg.Go(func() { w.Post(`{"model":"m"}`).WantServed(t, "a", "b", "c") })
			time.Sleep(50 * time.Millisecond)
		}
		wg.Wait()
		if c := len(w.Backends["c"].Received()); c > 60 {
			t.Errorf("of 600 requests, the backend that is ten times slower got %d", c)
		}
	})
}

func TestFirstByteFollowsWeights(t *testing.T) {
	lbtest.InBubble(t, strings.Replace(lbtest.PoolOf("a b c", "lb_policy first_byte"), "backend http://a", "backend http://a {\nweight 8\n}", 1), func(t *testing.T, w *lbtest.World) {
		for range 200 {
			w.Post(`{"model":"m"}`).WantServed(t, "a", "b", "c")
		}
		if a := len(w.Backends["a"].Received()); a < 140 {
			t.Errorf("the backend with 8 of 10 weights got %d of 200 requests", a)
		}
		if warnings := w.Logged("weight is ignored by lb_policy: leave one of them out"); len(warnings) > 0 {
			t.Error("a warning says that weights are ignored")
		}
	})
}
