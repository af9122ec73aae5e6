package replicas

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// admits records when requests were admitted.
type admits struct {
	mu    sync.Mutex
	times []time.Time
}

// add records a request that is admitted now.
func (a *admits) add() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.times = append(a.times, time.Now())
}

// soFar returns when requests were admitted, in order.
func (a *admits) soFar() []time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.times)
}

// try sends so many requests of one token for luna to a replica, at once.
func (a *admits) try(r *limitedReplica, requests int) {
	for range requests {
		r.admit("alice", ratelimit.Estimate{Prompt: 1, Model: "luna"}, func(admitted limiter.Reservation) {
			a.add()
			admitted.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 1})
		})
	}
}

// admit sends a request, and calls then if it is admitted. It may have to hear
// of the others first, and calls then later.
func (r *limitedReplica) admit(name string, e ratelimit.Estimate, then func(limiter.Reservation)) {
	c := r.callers.Get(time.Now(), name)
	record := func(admitted limiter.Reservation, refusal *ratelimit.Refusal) {
		if refusal == nil {
			then(admitted)
		}
	}
	admitted, refusal := c.Try(time.Now(), e)
	if refusal != nil && refusal.MayClaim() {
		go func() { record(c.Await(e)) }()
		return
	}
	record(admitted, refusal)
}

// mostInAMinute returns how many requests were admitted in any minute.
func mostInAMinute(admitted []time.Time) (most int) {
	first := 0
	for i, at := range admitted {
		for at.Sub(admitted[first]) >= time.Minute {
			first++
		}
		most = max(most, i-first+1)
	}
	return most
}

func TestRequestsAtOnceAtEachReplicaDoNotPassALimitTogether(t *testing.T) {
	for _, n := range []int{2, 3, 10} {
		limit(t, n, []string{"60/minute"}, func(w *world, all []*limitedReplica) {
			w.hub.Delay(2*time.Millisecond, 2*time.Millisecond)
			var got admits
			for range 40 { // for a second, each refused request comes again after 25 ms
				for _, r := range all {
					got.try(r, 60)
				}
				time.Sleep(25 * time.Millisecond)
			}
			if admitted := len(got.soFar()); admitted < 60 || admitted > 66 {
				t.Errorf("%d of 60 requests were admitted at %d replicas", admitted, n)
			}
		})
	}
}

// TestARequestOfALimitsSizeAtEachReplicaIsAdmittedOnce has one at each replica
// at the same moment, every minute, and then one at only one of them, which is
// admitted. The limit is that of all models, of one, or both.
func TestARequestOfALimitsSizeAtEachReplicaIsAdmittedOnce(t *testing.T) {
	for i, size := range []int64{60_000, 40_000, 21_000, 60_000, 40_000, 21_000, 60_000, 40_000, 21_000} {
		limits := [][]string{{"60k/minute"}, {"60k/minute", "60k/minute luna"}, {"90k/minute", "60k/minute luna"}}[i/3]
		limit(t, 3, limits, func(w *world, all []*limitedReplica) {
			w.hub.Delay(2*time.Millisecond, 2*time.Millisecond)
			admitting := 0
			for range 10 {
				var used atomic.Int64
				for _, r := range all {
					r.admit("alice", ratelimit.Estimate{Prompt: size, Model: "luna"}, func(admitted limiter.Reservation) {
						used.Add(size)
						admitted.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: size})
					})
				}
				time.Sleep(2 * time.Second)
				sum := used.Load()
				if sum > 60_000 {
					t.Errorf("requests of %d used %d tokens of %s", size, sum, limits)
				}
				for _, u := range all[0].callers.Get(time.Now(), "alice").Snapshot(time.Now()).Limits {
					if u.Used != sum { // those that were refused gave it back
						t.Errorf("after requests of %d, %d are used of %s, want %d", size, u.Used, u.Limit, sum)
					}
				}
				if sum > 0 {
					admitting++
				}
				time.Sleep(time.Minute)
			}
			if admitting < 5 { // at random times, one comes first
				t.Errorf("%s: of requests of %d, some were admitted in %d of 10 minutes", limits, size, admitting)
			}
			began := time.Now()
			var alone admits
			all[1].admit("alice", ratelimit.Estimate{Prompt: size, Model: "luna"}, func(limiter.Reservation) { alone.add() })
			time.Sleep(2 * time.Second)
			if at := alone.soFar(); len(at) == 0 || at[0].Sub(began) > 250*time.Millisecond {
				t.Errorf("%s: a request of %d alone at %s was admitted at %v", limits, size, began, at)
			}
		})
	}
}

func TestAStoreThatHangsLetsNoMorePassThanALimit(t *testing.T) {
	for _, before := range []int{0, 30, 60} {
		limit(t, 3, []string{"60/minute"}, func(w *world, all []*limitedReplica) {
			var got admits
			for range 20 {
				got.try(all[0], before-len(got.soFar()))
				time.Sleep(100 * time.Millisecond)
			}
			goOn := w.hub.Hang()
			for range 400 {
				for _, r := range all {
					got.try(r, 1)
				}
				time.Sleep(100 * time.Millisecond)
			}
			goOn()
			for range 600 {
				for _, r := range all {
					got.try(r, 1)
				}
				time.Sleep(100 * time.Millisecond)
			}
			if most := mostInAMinute(got.soFar()); most > 66 || most < 60 {
				t.Errorf("after %d requests at one replica, %d were admitted in a minute", before, most)
			}
		})
	}
}

func TestAWholeLimitMayBeUsedAtOneReplica(t *testing.T) {
	for _, text := range []string{"60/minute", "60/day"} {
		limit(t, 3, []string{text}, func(w *world, all []*limitedReplica) {
			w.hub.Delay(2*time.Millisecond, 2*time.Millisecond)
			var got admits
			for range 20 {
				got.try(all[1], 60)
				if now := time.Now(); len(got.soFar()) < 55 { // after that, each waits until the others were heard
					refusal := all[1].callers.Get(now, "alice").Check(now, ratelimit.Estimate{Prompt: 1})
					if refusal == nil || refusal.Reason != ratelimit.OverPart || refusal.Wait <= 0 || refusal.Wait > time.Second {
						t.Fatalf("%s: more may be used soon, but got %+v", text, refusal)
					}
				}
				time.Sleep(100 * time.Millisecond)
			}
			if admitted := len(got.soFar()); admitted != 60 {
				t.Errorf("%s: %d of 60 requests were admitted in 2 s", text, admitted)
			}
		})
	}
}

// All of a limit was used at once, in the last quarter of a minute, before a
// replica starts. That use is not over early there.
func TestAReplicaThatStartsKnowsWhenALimitWasUsed(t *testing.T) {
	limit(t, 3, []string{"300/minute"}, func(w *world, all []*limitedReplica) {
		time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(45 * time.Second)))
		var got admits
		for range 150 {
			for _, r := range all {
				got.try(r, 5)
			}
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(25 * time.Second)
		all[0].stop()
		all[0] = w.startLimited("300/minute")
		for range 600 {
			for _, r := range all {
				got.try(r, 5)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if most := mostInAMinute(got.soFar()); most > 315 || most < 300 {
			t.Errorf("%d of 300 were admitted in a minute", most)
		}
	})
}

// TestWhateverHappensALimitHoldsAtAllReplicasTogether has bursts come anywhere,
// and a store that hangs, is down and loses its data. The limit is that of all
// models, of one, or both.
func TestWhateverHappensALimitHoldsAtAllReplicasTogether(t *testing.T) {
	for seed := range uint64(6) {
		limits := [][]string{{"300/minute"}, {"300/minute luna"}, {"300/minute", "300/minute luna"}}[seed%3]
		limit(t, 2+int(seed)%4, limits, func(w *world, all []*limitedReplica) {
			random, goOn := rand.New(rand.NewPCG(seed, 7)), func() {}
			w.hub.Delay(3*time.Millisecond, 3*time.Millisecond)
			var got admits
			for range 3000 {
				if random.IntN(100) == 0 {
					goOn()
					switch goOn = func() {}; random.IntN(4) {
					case 0:
						goOn = w.hub.Hang()
					case 1:
						w.hub.Fail(errors.New("down"))
						goOn = func() { w.hub.Fail(nil) }
					case 2:
						w.hub.Flush()
					}
				}
				got.try(all[random.IntN(len(all))], random.IntN(1+random.IntN(100)))
				time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
			}
			goOn()
			// 25/24 of the limit, and what is late: mostly after an outage
			if most := mostInAMinute(got.soFar()); most > 330 {
				t.Errorf("seed %d: %d of 300 requests were admitted in a minute", seed, most)
			}
			if len(got.soFar()) == 0 {
				t.Error("nothing was admitted")
			}
		})
	}
}

// TestALimitHoldsAtManyReplicasFromIdle has callers that ask for three times
// their limit, each request at any replica.
func TestALimitHoldsAtManyReplicasFromIdle(t *testing.T) {
	if bubble.Race {
		t.Skip("thirty replicas take a minute")
	}
	const n, number = 30, 20
	limit(t, n, []string{"600/minute"}, func(w *world, all []*limitedReplica) {
		w.hub.Delay(2*time.Millisecond, 2*time.Millisecond)
		random := rand.New(rand.NewPCG(1, 3))
		got := make([]admits, number)
		for began := time.Now(); time.Since(began) < 75*time.Second; {
			time.Sleep(time.Duration(random.ExpFloat64() / 3 / number * float64(time.Second)))
			i := random.IntN(number)
			all[random.IntN(n)].admit(fmt.Sprint(i), ratelimit.Estimate{Prompt: 10}, func(r limiter.Reservation) {
				r.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 10})
				got[i].add()
			})
		}
		for i := range got {
			if most := 10 * mostInAMinute(got[i].soFar()); most > 630 || most < 590 {
				t.Errorf("caller %d used %d of 600 tokens in a minute", i, most)
			}
		}
	})
}

// setStore has a clock that is set while replicas run.
type setStore struct {
	state.Store
	by *atomic.Int64
}

func (s setStore) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	kept, now, err := s.Store.Load(ctx, groups)
	return kept, now.Add(time.Duration(s.by.Load())), err
}

func TestAStoresClockThatIsSetEmptiesNoWindow(t *testing.T) {
	for _, set := range []time.Duration{-5 * time.Minute, -time.Minute, -3 * time.Second, time.Hour} {
		share(t, 0, func(w *world) {
			var by atomic.Int64
			start := func() *limitedReplica {
				r := &limitedReplica{w.startWith(setStore{w.hub.Store(), &by}), limiter.NewLimiters(nil)}
				r.callers.Configure(time.Now(), func(string) limiter.Settings {
					return limiter.Settings{Limits: []ratelimit.Limit{{Kind: ratelimit.Tokens, Amount: 10_000, Unit: ratelimit.Minute}}}
				})
				r.link.ShareUse("the pool", r.callers)
				return r
			}
			all := []*limitedReplica{start(), start()}
			time.Sleep(3 * time.Second)
			all[0].spend("alice", 3310)
			all[1].spend("alice", 2000)
			time.Sleep(3 * time.Second)
			wantUsed(t, "alice", 5310, all...)
			by.Store(int64(set))
			time.Sleep(5 * time.Second)
			all = append(all, start())
			time.Sleep(2 * time.Second)
			wantUsed(t, "alice", 5310, all...)
			time.Sleep(72 * time.Second)
			wantUsed(t, "alice", 0, all[:2]...)
		})
	}
}
