package quotas

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
)

// anotherReplica starts a replica, as if it were in another process, and
// returns its limiter of the quota of backend a.
func (w *world) anotherReplica(hub, requests string) *limiter.Limiter {
	w.t.Helper()
	limit, err := ratelimit.ParseLimit(ratelimit.Requests, requests)
	if err != nil {
		w.t.Fatal(err)
	}
	backends := limiter.NewLimiters(nil)
	backends.Configure(time.Now(), func(string) limiter.Settings { return limiter.Settings{Limits: []ratelimit.Limit{limit}} })
	r := replicas.New(lbtest.HubOf(hub).Store(), zap.NewNop())
	r.NewLink().ShareUse("quotas of "+w.Handler.Pool, backends)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	w.t.Cleanup(func() {
		cancel()
		<-done
	})
	return backends.Get(time.Now(), w.Handler.Backends[0].HealthKey)
}

// admit sends so many requests at once through another replica. then is called
// for each that is admitted.
func admit(c *limiter.Limiter, requests int, all *sync.WaitGroup, then func()) {
	for range requests {
		all.Go(func() {
			if r, refusal := c.Admit(time.Now(), ratelimit.Estimate{}); refusal == nil {
				then()
				r.Settle(time.Now(), ratelimit.Cost{Requests: 1})
			}
		})
	}
}

func TestAQuotaIsThatOfAllReplicas(t *testing.T) {
	hub := lbtest.Unique("hub")
	inBubble(t, "state hub "+hub, func(t *testing.T, w *world) {
		lbtest.Connect(t, hub)
		other := w.anotherReplica(hub, "10/minute")
		time.Sleep(6 * time.Second)
		var all sync.WaitGroup
		admit(other, 6, &all, func() {})
		all.Wait()
		time.Sleep(3 * time.Second)
		w.wantUsed("a", 6)
		for range 8 {
			w.Post(small).WantServed(t, "a", "b")
			time.Sleep(300 * time.Millisecond)
		}
		// half of the last request is this replica's part, and b serves
		w.WantCalls(map[string]int{"a": 3, "b": 5})
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if got := other.Snapshot(time.Now()).Limits[0].Used; got != 9 {
			t.Errorf("to the other replica, a has used %d, want 9", got)
		}
	}, "requests 10/minute", "")
}

// TestTheLastBackendWaitsForTheReportsOfOtherReplicas has all of the quota used
// at one of two replicas, which has half of it without asking.
func TestTheLastBackendWaitsForTheReportsOfOtherReplicas(t *testing.T) {
	hub := lbtest.Unique("hub")
	inBubble(t, "state hub "+hub, func(t *testing.T, w *world) {
		lbtest.Connect(t, hub)
		w.anotherReplica(hub, "10/minute")
		time.Sleep(6 * time.Second)
		for range 10 {
			w.Post(small).WantServed(t, "a")
		}
		w.wantOver(w.Post(small), 59)
	}, "requests 10/minute")
}

// TestAQuotaHoldsAtThreeReplicasWhateverHappens has bursts come anywhere, and a
// store that hangs, is down and loses its data, as the test of callers' limits
// in package replicas.
func TestAQuotaHoldsAtThreeReplicasWhateverHappens(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests")
	}
	for seed := range uint64(2) {
		name := lbtest.Unique("hub")
		inBubble(t, "state hub "+name, func(t *testing.T, w *world) {
			lbtest.Connect(t, name)
			hub, random := lbtest.HubOf(name), rand.New(rand.NewPCG(seed, 7))
			others := []*limiter.Limiter{w.anotherReplica(name, "300/minute"), w.anotherReplica(name, "300/minute")}
			time.Sleep(6 * time.Second)
			hub.Delay(3*time.Millisecond, 3*time.Millisecond)
			var mu sync.Mutex
			var times []time.Time
			count := func() {
				mu.Lock()
				defer mu.Unlock()
				times = append(times, time.Now())
			}
			var all sync.WaitGroup
			goOn := func() {}
			for range 700 {
				if random.IntN(100) == 0 {
					goOn()
					switch goOn = func() {}; random.IntN(4) {
					case 0:
						goOn = hub.Hang()
					case 1:
						hub.Fail(errors.New("down"))
						goOn = func() { hub.Fail(nil) }
					case 2:
						hub.Flush()
					}
				}
				switch n := random.IntN(1 + random.IntN(60)); random.IntN(3) {
				case 0:
					admit(others[0], n, &all, count)
				case 1:
					admit(others[1], n, &all, count)
				default:
					for range n {
						all.Go(func() { w.Post(small) })
					}
				}
				time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
			}
			goOn()
			all.Wait()
			for _, call := range w.Backends["a"].Received() {
				times = append(times, call.At)
			}
			slices.SortFunc(times, time.Time.Compare)
			most, first := 0, 0
			for i, at := range times {
				for at.Sub(times[first]) >= time.Minute {
					first++
				}
				most = max(most, i-first+1)
			}
			if most > 330 || most < 270 {
				t.Errorf("seed %d: backend a got %d requests in a minute, want 300 and 10 %% more at most", seed, most)
			}
			t.Logf("seed %d: at most %d of 300 in a minute, %d of them by this replica", seed, most, len(w.Backends["a"].Received()))
		}, "requests 300/minute", "")
	}
}
