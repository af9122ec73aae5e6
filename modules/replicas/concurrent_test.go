package replicas

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// inFlight counts the requests of a caller that are in flight at all replicas.
type inFlight struct {
	mu        sync.Mutex
	now, most int
	// at are those of each replica. A replica that has ended has none.
	at    map[*limitedReplica]int
	ended map[*limitedReplica]bool
	// served is the sum of the times of all requests.
	served time.Duration
}

func newInFlight() *inFlight {
	return &inFlight{at: make(map[*limitedReplica]int), ended: make(map[*limitedReplica]bool)}
}

// try sends requests to a replica at once. Each of them lasts for a time, which
// is asked for under the lock.
func (o *inFlight) try(r *limitedReplica, requests int, lasts func() time.Duration) {
	for range requests {
		r.admit("alice", ratelimit.Estimate{Prompt: 1}, func(admitted limiter.Reservation) {
			o.mu.Lock()
			defer o.mu.Unlock()
			if o.ended[r] {
				return // it waited there
			}
			o.now++
			o.at[r]++
			o.most = max(o.most, o.now)
			long := lasts()
			o.served += long
			time.AfterFunc(long, func() {
				o.mu.Lock()
				if !o.ended[r] {
					o.now--
					o.at[r]--
				}
				o.mu.Unlock()
				admitted.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 1}) // from here on, another one may be admitted
			})
		})
	}
}

// end ends a replica and all its requests.
func (o *inFlight) end(r *limitedReplica) {
	o.mu.Lock()
	o.now -= o.at[r]
	o.at[r], o.ended[r] = 0, true
	o.mu.Unlock()
	r.stop()
}

// of returns how many are in flight at a replica.
func (o *inFlight) of(r *limitedReplica) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.at[r]
}

// forgetServed starts the sum of times anew.
func (o *inFlight) forgetServed() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.served = 0
}

// mean returns how many were in flight on average in a time.
func (o *inFlight) mean(in time.Duration) float64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.served.Seconds() / in.Seconds()
}

// take returns how many are in flight at all replicas, and how many were at
// most since the previous call.
func (o *inFlight) take() (now, most int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	most, o.most = o.most, o.now
	return o.now, most
}

func always(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

// startCounting adds a replica whose callers have a maximum of concurrent
// requests.
func (w *world) startCounting(store state.Store, maxRequests int) *limitedReplica {
	w.Helper()
	r := &limitedReplica{w.startWith(store), limiter.NewLimiters(nil)}
	r.callers.Configure(time.Now(), func(string) limiter.Settings { return limiter.Settings{MaxRequests: maxRequests} })
	r.link.ShareUse("the pool", r.callers)
	return r
}

// count runs a test with n replicas whose callers have a maximum of concurrent
// requests, and whose links can be cut.
func count(t *testing.T, n, maxRequests int, test func(w *world, all []*limitedReplica, links []*cutStore)) {
	t.Helper()
	share(t, 0, func(w *world) {
		all, links := make([]*limitedReplica, n), make([]*cutStore, n)
		for i := range all {
			links[i] = &cutStore{Store: w.hub.Store()}
			all[i] = w.startCounting(links[i], maxRequests)
		}
		w.hub.Delay(2*time.Millisecond, 2*time.Millisecond)
		time.Sleep(6 * time.Second)
		test(w, all, links)
		time.Sleep(time.Minute) // all requests are over
	})
}

func TestRequestsAtOnceAtEachReplicaDoNotPassMaxRequestsTogether(t *testing.T) {
	for _, n := range []int{2, 3, 10} {
		for _, most := range []int{1, 2, 7, 20, 100} {
			count(t, n, most, func(w *world, all []*limitedReplica, _ []*cutStore) {
				o := newInFlight()
				for range 100 { // for ten seconds, each refused request comes again after 0.1 s
					for _, r := range all {
						o.try(r, 1+most, always(time.Hour))
					}
					time.Sleep(100 * time.Millisecond)
				}
				if now, _ := o.take(); now != most {
					t.Errorf("%d requests are in flight at %d replicas, want %d", now, n, most)
				}
			})
		}
	}
}

// TestABusyReplicaMayHaveAllOfMaxRequests while the others are idle, and the
// next one soon after.
func TestABusyReplicaMayHaveAllOfMaxRequests(t *testing.T) {
	for _, most := range []int{2, 20, 100} {
		count(t, 3, most, func(w *world, all []*limitedReplica, _ []*cutStore) {
			times := rand.New(rand.NewPCG(1, 2))
			lasts := func() time.Duration {
				return time.Duration((0.5 + times.ExpFloat64()) * float64(2*time.Second))
			}
			for i, r := range all {
				o := newInFlight()
				o.try(r, most, lasts)
				time.Sleep(20 * time.Millisecond)
				for range 200 { // it fills up within seconds
					o.try(r, 1, lasts)
					time.Sleep(10 * time.Millisecond)
				}
				o.forgetServed()
				const long = 30 * time.Second
				for range long / (10 * time.Millisecond) {
					o.try(r, 1+most/20, lasts)
					time.Sleep(10 * time.Millisecond)
				}
				if _, sum := o.take(); sum > most {
					t.Errorf("replica %d had %d of %d in flight", i, sum, most)
				}
				if mean := o.mean(long); mean < 0.95*float64(most) {
					t.Errorf("on average, replica %d had %.1f of %d in flight", i, mean, most)
				}
				time.Sleep(20 * time.Second)
			}
		})
	}
}

// TestReplicasHaveAllOfMaxRequestsTogether and no more, if each of them is
// asked for all of it.
func TestReplicasHaveAllOfMaxRequestsTogether(t *testing.T) {
	for _, n := range []int{3, 10} {
		for _, most := range []int{5, 30, 200} {
			count(t, n, most, func(w *world, all []*limitedReplica, _ []*cutStore) {
				random, times := rand.New(rand.NewPCG(3, 4)), rand.New(rand.NewPCG(5, 6))
				lasts := func() time.Duration { return time.Duration(200+times.IntN(6000)) * time.Millisecond }
				o, long := newInFlight(), time.Minute
				for began := time.Now(); time.Since(began) < long; {
					o.try(all[random.IntN(n)], 1+random.IntN(1+most/20), lasts)
					time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
					if time.Since(began) < 5*time.Second {
						o.forgetServed()
					}
				}
				if _, sum := o.take(); sum > most {
					t.Errorf("%d replicas had %d of %d in flight", n, sum, most)
				}
				if mean := o.mean(long - 5*time.Second); mean < 0.9*float64(most) {
					t.Errorf("on average, %d replicas had %.1f of %d in flight", n, mean, most)
				}
			})
		}
	}
}

// TestMaxRequestsHoldsWhateverHappens has replicas that crash, restart or are
// cut off, and a store that hangs, is down or loses its data.
func TestMaxRequestsHoldsWhateverHappens(t *testing.T) {
	const most = 30
	for seed := range uint64(6) {
		count(t, 3, most, func(w *world, all []*limitedReplica, links []*cutStore) {
			random, times, goOn := rand.New(rand.NewPCG(seed, 9)), rand.New(rand.NewPCG(seed, 8)), func() {}
			lasts := func() time.Duration { return time.Duration(times.IntN(8000)) * time.Millisecond }
			o, largest := newInFlight(), 0
			for step := range 4000 {
				switch step % 300 {
				case 280: // and for some seconds, all is well
					goOn()
					goOn = func() {}
				case 100:
					i, what := random.IntN(3), random.IntN(7)
					switch what {
					case 0:
						goOn = w.hub.Hang()
					case 1:
						w.hub.Fail(errors.New("down"))
						goOn = func() { w.hub.Fail(nil) }
					case 2:
						w.hub.Flush()
					case 3:
						links[i].cut.Store(true)
						goOn = func() { links[i].cut.Store(false) }
					case 4, 5: // a crash, and a restart in order
						if what == 4 {
							links[i].cut.Store(true)
						}
						o.end(all[i])
						links[i] = &cutStore{Store: w.hub.Store()}
						all[i] = w.startCounting(links[i], most)
						all[i].usage.Expect(time.Now(), 3)
						time.Sleep(500 * time.Millisecond) // it is not ready before it has heard the others
					}
				}
				o.try(all[random.IntN(3)], random.IntN(20), lasts)
				time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
				_, sum := o.take()
				largest = max(largest, sum)
			}
			goOn()
			if largest > most*110/100 {
				t.Errorf("seed %d: %d of %d were in flight", seed, largest, most)
			}
			time.Sleep(70 * time.Second)
			o.take()
			for range 100 {
				o.try(all[0], 10, always(time.Hour))
				time.Sleep(100 * time.Millisecond)
			}
			if now, _ := o.take(); now != most {
				t.Errorf("seed %d: after all, %d of %d are in flight", seed, now, most)
			}
		})
	}
}

// fill sends requests until no more are admitted, and returns how many are in
// flight.
func (o *inFlight) fill(r *limitedReplica, lasts time.Duration) int {
	for range 40 {
		o.try(r, 5, always(lasts))
		time.Sleep(100 * time.Millisecond)
	}
	now, _ := o.take()
	return now
}

// TestRequestsOfAReplicaThatCrashedCountForAWhile as all of them until it is
// missed, and then as an equal part for the rest of a minute.
func TestRequestsOfAReplicaThatCrashedCountForAWhile(t *testing.T) {
	count(t, 3, 30, func(w *world, all []*limitedReplica, links []*cutStore) {
		o := newInFlight()
		if n := o.fill(all[2], time.Hour); n != 30 {
			t.Fatalf("%d are in flight", n)
		}
		links[2].cut.Store(true)
		o.end(all[2])
		if n := o.fill(all[0], time.Hour); n != 0 {
			t.Errorf("just after the crash, %d are in flight", n)
		}
		time.Sleep(10 * time.Second)
		if n := o.fill(all[0], time.Hour); n != 20 {
			t.Errorf("when it is missed, %d are in flight, want 20", n)
		}
		time.Sleep(time.Minute)
		if n := o.fill(all[1], time.Hour); n != 30 {
			t.Errorf("a minute later, %d are in flight, want 30", n)
		}
	})
}

// TestNoRequestOfAReplicaThatStopsCounts neither at those that run nor at one
// that starts and reads from the store what it has said.
func TestNoRequestOfAReplicaThatStopsCounts(t *testing.T) {
	count(t, 3, 30, func(w *world, all []*limitedReplica, _ []*cutStore) {
		o := newInFlight()
		o.fill(all[2], time.Hour)
		o.end(all[2])
		if n := o.fill(all[0], time.Hour); n != 30 {
			t.Errorf("%d are in flight, want 30", n)
		}
		o.end(all[0])
		if n := o.fill(w.startCounting(w.hub.Store(), 30), time.Hour); n != 30 {
			t.Errorf("at one that starts, %d are in flight, want 30", n)
		}
	})
}

func TestAReplicaWithoutAConnectionHasItsPartOfMaxRequests(t *testing.T) {
	for most, part := range map[int]int{2: 1, 20: 6, 30: 10} {
		count(t, 3, most, func(w *world, all []*limitedReplica, _ []*cutStore) {
			o := newInFlight()
			o.try(all[0], most, always(20*time.Second))
			time.Sleep(2 * time.Second)
			w.hub.Fail(errors.New("down"))
			time.Sleep(2 * time.Second)
			for range 50 {
				time.Sleep(2 * time.Second)
				for _, r := range all {
					o.try(r, 5, always(19500*time.Millisecond)) // none ends at this moment
				}
			}
			for i, r := range all {
				if n := o.of(r); n != part {
					t.Errorf("replica %d has %d of %d in flight, want %d", i, n, most, part)
				}
				if s := r.callers.Get(time.Now(), "alice").Snapshot(time.Now()); s.MaxRequests != part {
					t.Errorf("replica %d shows %d", i, s.MaxRequests)
				}
			}
			w.hub.Fail(nil)
			time.Sleep(30 * time.Second)
			if n := o.fill(all[1], time.Hour); n != most {
				t.Errorf("when the store is back, %d are in flight, want %d", n, most)
			}
		})
	}
}

func TestRequestsInFlightOutliveAReload(t *testing.T) {
	count(t, 2, 10, func(w *world, all []*limitedReplica, _ []*cutStore) {
		o := newInFlight()
		if n := o.fill(all[0], 30*time.Second); n != 10 {
			t.Fatalf("%d are in flight", n)
		}
		next := all[0].NewLink()
		next.ShareUse("the pool", all[0].callers)
		all[0].link.Close()
		if n := o.fill(all[1], time.Hour); n != 10 || o.of(all[1]) != 0 {
			t.Errorf("%d are in flight, %d of them at the other replica", n, o.of(all[1]))
		}
		time.Sleep(30 * time.Second)
		if n := o.fill(all[1], time.Hour); n != 10 || o.of(all[1]) != 10 {
			t.Errorf("%d are in flight, %d of them at the other replica", n, o.of(all[1]))
		}
		next.Close()
	})
}

// TestUploadsAtTwoReplicasDoNotRefuseEachOther when they end: as many of them
// are admitted as there may be.
func TestUploadsAtTwoReplicasDoNotRefuseEachOther(t *testing.T) {
	count(t, 2, 4, func(w *world, all []*limitedReplica, _ []*cutStore) {
		for _, r := range all {
			for range 4 {
				if refusal := r.callers.Get(time.Now(), "alice").Upload(); refusal != nil {
					t.Fatalf("an upload is refused: %+v", refusal)
				}
			}
			if refusal := r.callers.Get(time.Now(), "alice").Upload(); refusal == nil {
				t.Error("a replica has five uploads at a time")
			}
		}
		time.Sleep(5 * time.Second)
		admitted := 0
		for range 4 {
			for _, r := range all {
				c := r.callers.Get(time.Now(), "alice")
				c.Uploaded()
				if _, refusal := c.Admit(time.Now(), ratelimit.Estimate{Prompt: 1}); refusal == nil {
					admitted++
				}
			}
		}
		if admitted != 4 {
			t.Errorf("%d of 8 are admitted, want 4", admitted)
		}
	})
}

// TestMaxRequestsOfANewConfigCountsWhatRuns also at the other replicas.
func TestMaxRequestsOfANewConfigCountsWhatRuns(t *testing.T) {
	count(t, 2, 0, func(w *world, all []*limitedReplica, _ []*cutStore) {
		o := newInFlight()
		o.try(all[0], 50, always(time.Second)) // these do not run any more
		o.try(all[0], 10, always(50*time.Second))
		time.Sleep(5 * time.Second)
		for _, r := range all {
			r.callers.Configure(time.Now(), func(string) limiter.Settings { return limiter.Settings{MaxRequests: 15} })
		}
		time.Sleep(500 * time.Millisecond)
		if n := o.fill(all[1], time.Hour); n != 15 {
			t.Errorf("%d are in flight, want 15", n)
		}
	})
}

// TestRequestsThatAReplicaHasNotReportedYetCount because it reports them when
// others fill up what is left.
func TestRequestsThatAReplicaHasNotReportedYetCount(t *testing.T) {
	count(t, 2, 100, func(w *world, all []*limitedReplica, _ []*cutStore) {
		o := newInFlight()
		for range 10 {
			o.try(all[0], 4, always(time.Hour))
			time.Sleep(300 * time.Millisecond)
		}
		time.Sleep(4 * time.Second)
		o.try(all[1], 1, always(time.Hour))
		time.Sleep(600 * time.Millisecond) // that is reported
		o.try(all[1], 3, always(time.Hour))
		for range 15 {
			o.try(all[0], 70, always(time.Hour))
			time.Sleep(100 * time.Millisecond)
		}
		if now, most := o.take(); most > 100 || now < 99 {
			t.Errorf("%d, and at most %d, of 100 are in flight", now, most)
		}
	})
}

// TestASingleRequestIsAdmittedAtEachOfManyReplicas that have less than one
// request each, so that each request waits for the reports of all.
func TestASingleRequestIsAdmittedAtEachOfManyReplicas(t *testing.T) {
	if bubble.Race {
		t.Skip("seventy replicas take a minute")
	}
	count(t, 70, 20, func(w *world, all []*limitedReplica, _ []*cutStore) {
		o, admitted := newInFlight(), 0
		for i := range 5 {
			o.try(all[i], 1, always(5*time.Second))
			time.Sleep(2 * time.Second)
			admitted += o.of(all[i])
			time.Sleep(10 * time.Second)
		}
		if admitted != 5 {
			t.Errorf("%d of 5 requests are admitted", admitted)
		}
	})
}
