package waiting

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

var key = Key{Model: "gpt-4o"}

// many is more than any test has of requests.
const many = 1e6

// inBubble runs a test in virtual time with queues of a wait of 10 s, and
// checks that no request waits in the end.
func inBubble(t *testing.T, test func(*testing.T, *Queues)) {
	t.Helper()
	bubble.Test(t, func(t *testing.T) {
		l := New(10*time.Second, false)
		test(t, l)
		time.Sleep(time.Second) // until no gate is left
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.Len() != 0 || len(l.byKey) != 0 || bodies.Load() != 0 {
			t.Errorf("%d requests wait in %d queues, with bodies of %d bytes", l.Len(), len(l.byKey), bodies.Load())
		}
	})
}

// join gives a request a place for a time, or fails.
func join(t *testing.T, l *Queues, tier int, d time.Duration, r Return) *Ticket {
	t.Helper()
	now := time.Now()
	p, none := l.Join(now, Waiter{Tier: tier}, now.Add(d), 10, r)
	if p == nil {
		t.Errorf("a request got no place: %s", none)
	}
	return p
}

// want checks what comes of a wait, and when.
func want(t *testing.T, p *Ticket, result Result, after time.Duration) {
	t.Helper()
	begin := time.Now()
	if got := p.Wait(nil); got != result || time.Since(begin) != after {
		t.Errorf("it is %s after %s, want %s after %s", got, time.Since(begin), result, after)
	}
}

func in(d time.Duration) Return { return Return{Key: key, Places: many, At: time.Now().Add(d)} }

func TestTheFirstRequestTriesAtOnceAndThenWhenItMay(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		p := join(t, l, 0, time.Second, in(time.Second))
		want(t, p, Called, 0)
		p.Stay(time.Now(), in(300*time.Millisecond))
		want(t, p, Called, 300*time.Millisecond)
		p.Go(time.Now(), key)
	})
}

// LiteLLM #6867: requests in its queue looked every 3 ms whether they may go.
func TestARequestTriesOnlyWhenItMayGoOrSomethingHasChanged(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		var wg sync.WaitGroup
		turns := 0
		for range 10 {
			p := join(t, l, 0, 9*time.Second, in(time.Second))
			wg.Go(func() {
				for p.Wait(nil) == Called {
					turns++
					if turns <= 10 { // each finds out something else
						p.Stay(time.Now(), in(500*time.Millisecond))
						continue
					}
					p.Go(time.Now(), key)
					return
				}
			})
		}
		wg.Wait()
		if turns != 20 {
			t.Errorf("they tried %d times, want 20", turns)
		}
	})
}

func TestWakeHasTheFirstRequestTry(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first, second := join(t, l, 0, 9*time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0))
		want(t, first, Called, 0)
		l.Wake(time.Now(), "") // while it tries
		first.Stay(time.Now(), in(time.Second))
		want(t, first, Called, 0)
		first.Stay(time.Now(), in(time.Second))
		l.Wake(time.Now(), "alice")
		synctest.Wait()
		time.AfterFunc(100*time.Millisecond, func() { l.Wake(time.Now(), "") })
		want(t, first, Called, 100*time.Millisecond)
		first.Go(time.Now(), key)
		want(t, second, Called, time.Millisecond)
		second.Go(time.Now(), key)
	})
}

// every20 is a return whose probe has a pause. The others follow each other
// every 20 ms.
func every20(d, pause time.Duration) Return {
	r := in(d)
	r.Pause, r.Every = pause, 20*time.Millisecond
	return r
}

func TestTheOthersFollowAProbeAtItsFirstByteOrAfterAPause(t *testing.T) {
	for _, row := range []struct{ pause, firstByte, want time.Duration }{
		{100 * time.Millisecond, time.Hour, 100 * time.Millisecond},
		{10 * time.Millisecond, time.Hour, 20 * time.Millisecond},
		{time.Second, time.Hour, 500 * time.Millisecond}, // a twentieth of the longest wait
		{100 * time.Millisecond, 30 * time.Millisecond, 30 * time.Millisecond},
		{100 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond},
	} {
		inBubble(t, func(t *testing.T, l *Queues) {
			r := every20(time.Second, row.pause)
			var places []*Ticket
			for range 4 {
				places = append(places, join(t, l, 0, 9*time.Second, r))
			}
			want(t, places[0], Called, 0)
			places[0].Stay(time.Now(), r)
			want(t, places[0], Called, time.Second)
			places[0].Go(time.Now(), key)
			time.AfterFunc(row.firstByte, func() { places[0].FirstByte(time.Now()) })
			want(t, places[1], Called, row.want)
			places[1].Go(time.Now(), key)
			want(t, places[2], Called, 20*time.Millisecond)
			places[2].Go(time.Now(), key)
			places[1].Stay(time.Now(), every20(time.Second, row.pause)) // it was refused
			want(t, places[1], Called, 0)
			places[1].Stay(time.Now(), every20(time.Second, row.pause))
			places[0].FirstByte(time.Now()) // of the probe before
			want(t, places[1], Called, time.Second)
			places[1].Go(time.Now(), key)
			want(t, places[3], Called, min(500*time.Millisecond, max(row.pause, 20*time.Millisecond)))
			places[3].Go(time.Now(), key)
			time.Sleep(2 * time.Hour)
		})
	}
}

func TestTheTurnPassesOnWhenARequestLeaves(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first, second, third := join(t, l, 0, 9*time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0))
		ctx, leave := context.WithCancel(t.Context())
		leave()
		if got := first.Wait(ctx.Done()); got != Left { // although it is its turn
			t.Errorf("it is %s", got)
		}
		want(t, second, Called, 0)
		second.Leave(time.Now())
		want(t, third, Called, 0)
		third.Leave(time.Now())
	})
}

func TestEachWaitEndsInTime(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first, second, third := join(t, l, 0, time.Second, in(0)), join(t, l, 0, 2*time.Second, in(0)), join(t, l, 0, 500*time.Millisecond, in(0))
		want(t, first, Called, 0)
		first.Stay(time.Now(), in(5*time.Second))
		want(t, third, Over, 500*time.Millisecond)
		want(t, first, Over, 500*time.Millisecond)
		want(t, second, Called, 0)
		second.Stay(time.Now(), in(5*time.Second))
		want(t, second, Over, time.Second)
	})
}

func TestCloseEndsAllWaits(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first, second, gone := join(t, l, 1, 9*time.Second, in(0)), join(t, l, 1, 9*time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0))
		want(t, first, Called, 0)
		first.Stay(time.Now(), in(time.Second))
		want(t, gone, Called, 0)
		gone.Go(time.Now(), key)
		want(t, first, Called, time.Millisecond)
		l.Close()
		want(t, second, Stopped, 0)
		first.Stay(time.Now(), in(time.Second))
		want(t, first, Stopped, 0)
		gone.Stay(time.Now(), in(time.Second))
		want(t, gone, Stopped, 0)
		if p, none := l.Join(time.Now(), Waiter{}, time.Now().Add(time.Second), 10, in(0)); p != nil || none != Stopped {
			t.Errorf("a request got the place %v: %s", p, none)
		}
	})
}

// A random load of three tiers, with clients that leave, cooldowns that grow,
// refusals and first bytes. Whoever goes was the first of the requests that
// wait.
func TestRandomWaitsKeepTheOrder(t *testing.T) {
	for seed := range uint64(20) {
		inBubble(t, func(t *testing.T, l *Queues) {
			random := rand.New(rand.NewPCG(seed, 1))
			var mu sync.Mutex
			var wg sync.WaitGroup
			chance := func(n int) int {
				mu.Lock()
				defer mu.Unlock()
				return random.IntN(n)
			}
			for range 400 {
				time.Sleep(time.Duration(chance(20)) * time.Millisecond)
				ctx, leave := context.WithCancel(t.Context())
				if chance(5) == 0 {
					ctx, leave = context.WithTimeout(ctx, time.Duration(1+chance(500))*time.Millisecond)
				}
				wait := time.Duration(1+chance(3000)) * time.Millisecond
				p, none := l.Join(time.Now(), Waiter{Tier: chance(3)}, time.Now().Add(wait), 10, in(0))
				if p == nil {
					t.Fatal(none)
				}
				wg.Go(func() {
					defer leave()
					begin, again := time.Now(), chance(3)
					for {
						switch p.Wait(ctx.Done()) {
						case Called:
						case Over:
							if took := time.Since(begin); took < wait {
								t.Errorf("a wait of %s is over after %s", wait, took)
							}
							return
						default:
							return
						}
						if took := time.Since(begin); took > wait {
							t.Errorf("a wait of %s took %s", wait, took)
						}
						next := Return{Key: key, Places: many, At: time.Now().Add(time.Duration(1+chance(30)) * time.Millisecond), Pause: time.Duration(chance(20)) * time.Millisecond}
						switch chance(8) {
						case 0:
							p.Stay(time.Now(), next)
							continue
						case 1:
							p.Leave(time.Now())
							return
						case 2:
							l.Wake(time.Now(), "")
						}
						l.mu.Lock()
						s := l.byKey[key]
						if s.called != p || !slices.IsSortedFunc(positions(s), compare) {
							t.Error("the order is wrong, or a request goes that is not called")
						}
						l.mu.Unlock()
						p.Go(time.Now(), key)
						time.Sleep(time.Duration(chance(30)) * time.Millisecond)
						if again > 0 && time.Since(begin) < wait {
							again--
							p.Stay(time.Now(), next)
							continue
						}
						p.FirstByte(time.Now())
						return
					}
				})
			}
			wg.Wait()
		})
	}
}

func TestAReturnFromATryDoesNotHideAChangeFromTheRequestThatTries(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first, second := join(t, l, 0, 5*time.Second, in(time.Second)), join(t, l, 0, 5*time.Second, in(time.Second))
		want(t, first, Called, 0)
		first.Go(time.Now(), key)
		want(t, second, Called, time.Millisecond)
		l.Wake(time.Now(), "")
		first.Stay(time.Now(), in(3*time.Second))
		second.Stay(time.Now(), in(3*time.Second)) // it was found out before the change
		want(t, first, Called, 0)
		first.Leave(time.Now())
		want(t, second, Called, 0)
		second.Leave(time.Now())
	})
}

// Requests differ: what the first one has found out is not true for the next
// one.
func TestTheNextRequestTriesAtOnceWhenTheFirstOneLeaves(t *testing.T) {
	for name, leave := range map[string]func(*Queues, *Ticket){
		"its client leaves": func(_ *Queues, p *Ticket) { done := make(chan struct{}); close(done); p.Wait(done) },
		"it is over":        func(_ *Queues, p *Ticket) { p.Wait(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Queues) {
				first, second := join(t, l, 0, time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0))
				want(t, first, Called, 0)
				first.Stay(time.Now(), in(5*time.Second))
				leave(l, first)
				want(t, second, Called, 0)
				second.Leave(time.Now())
			})
		})
	}
}

func TestARequestMayWaitUntilTheEndOfItsTime(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first, second := join(t, l, 0, time.Second, in(0)), join(t, l, 0, time.Second, in(0))
		want(t, first, Called, 0)
		first.Stay(time.Now(), in(time.Second))
		want(t, first, Called, time.Second)
		first.Go(time.Now(), key)
		second.Leave(time.Now())
	})
}

func TestABetterTierDoesNotWaitForWhatAWorseOneHasFoundOut(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		worse := join(t, l, 2, 9*time.Second, in(0))
		want(t, worse, Called, 0)
		better := join(t, l, 1, 9*time.Second, in(0))
		worse.Stay(time.Now(), in(5*time.Second))
		want(t, better, Called, 0)
		better.Stay(time.Now(), in(time.Second))
		want(t, better, Called, time.Second)
		better.Go(time.Now(), key)
		want(t, worse, Called, time.Millisecond)
		worse.Go(time.Now(), key)
		better = join(t, l, 1, 9*time.Second, in(0))
		want(t, better, Called, time.Millisecond)
		better.Stay(time.Now(), in(time.Second))
		worse.Stay(time.Now(), in(5*time.Second)) // it was refused
		want(t, better, Called, time.Second)
		better.Leave(time.Now())
		want(t, worse, Called, 4*time.Second) // as it has found out itself
		worse.Leave(time.Now())
	})
}

// yields is what a request has found out whose tier has got its share.
func yields(d time.Duration) Return {
	return Return{Key: key, Places: many, At: time.Now().Add(d), Reason: "all", Yields: true}
}

func TestATierThatHasGotItsShareLetsOthersGoAndIsFirstWhenBothMay(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		better, worse := join(t, l, 1, 9*time.Second, in(0)), join(t, l, 2, 9*time.Second, in(0))
		want(t, better, Called, 0)
		better.Stay(time.Now(), yields(2*time.Second))
		want(t, worse, Called, 0)
		worse.Stay(time.Now(), in(time.Second))
		want(t, worse, Called, time.Second)
		worse.Stay(time.Now(), in(time.Second))
		want(t, better, Called, time.Second)
		better.Go(time.Now(), key)
		want(t, worse, Called, time.Millisecond)
		worse.Go(time.Now(), key)
	})
}

func TestEachTierStandsBehindThoseThatDoNotYieldToIt(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		places := []*Ticket{join(t, l, 1, 9*time.Second, in(0)), join(t, l, 2, 9*time.Second, in(0)), join(t, l, 3, 9*time.Second, in(0))}
		want(t, places[0], Called, 0)
		places[0].Stay(time.Now(), yields(2*time.Second))
		want(t, places[1], Called, 0)
		places[1].Stay(time.Now(), Return{Key: key, Places: many, At: time.Now().Add(time.Second), Reason: "two"})
		for tier, reason := range []any{nil, "all", "two", "two"} {
			if r, ok := l.Ahead(time.Now(), key, Waiter{Tier: tier}, nil); r.Reason != reason || ok != (tier > 0) {
				t.Errorf("a request of tier %d stands behind %v (%v), want %v", tier, r.Reason, ok, reason)
			}
		}
		for _, p := range places {
			p.Leave(time.Now())
		}
	})
}

func TestATierThatHasGotItsShareTakesNoPlaceOfAWorseOne(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		l.apart = true
		two := func(yields bool) Return {
			return Return{Key: key, Places: 2, At: time.Now().Add(time.Second), Yields: yields}
		}
		var places []*Ticket
		for i, waiter := range []struct {
			tier   int
			yields bool
			place  bool
		}{{1, true, true}, {1, true, true}, {1, true, false}, {2, false, true}, {2, false, true}, {2, false, false}} {
			p, _ := l.Join(time.Now(), Waiter{Tier: waiter.tier}, time.Now().Add(time.Second), 10, two(waiter.yields))
			if (p != nil) != waiter.place {
				t.Errorf("request %d of tier %d has place %v", i, waiter.tier, p)
			}
			if i == 0 {
				want(t, p, Called, 0)
				p.Stay(time.Now(), two(true))
			}
			places = append(places, p)
		}
		leaveAll(places)
	})
}

func TestAWorseTierStandsBehindABetterOneWhoseTimeHasCome(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		r := func() Return {
			return Return{Key: key, Places: many, At: time.Now().Add(500 * time.Millisecond), Pause: 50 * time.Millisecond, Yields: true}
		}
		first, second := join(t, l, 1, 9*time.Second, r()), join(t, l, 1, 9*time.Second, r())
		want(t, first, Called, 0)
		first.Stay(time.Now(), r())
		if _, ok := l.Ahead(time.Now(), key, Waiter{Tier: 2}, nil); ok {
			t.Error("it stands behind one that yields")
		}
		want(t, first, Called, 500*time.Millisecond)
		if _, ok := l.Ahead(time.Now(), key, Waiter{Tier: 2}, nil); !ok {
			t.Error("it stands behind none while the better one tries")
		}
		first.Go(time.Now(), key)
		if _, ok := l.Ahead(time.Now(), key, Waiter{Tier: 2}, nil); !ok {
			t.Error("it stands behind none while the better one waits for the pause")
		}
		want(t, second, Called, 50*time.Millisecond)
		second.Go(time.Now(), key)
	})
}

// At 1 s the time of the second one has come, and its wait ends. That of a
// third tier ends, too.
func TestTheEndOfAWaitTakesNoTurnFromABetterTier(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		places := []*Ticket{join(t, l, 1, 9*time.Second, in(0)), join(t, l, 2, time.Second, in(0)), join(t, l, 3, time.Second, in(0))}
		want(t, places[0], Called, 0)
		places[0].Stay(time.Now(), yields(5*time.Second))
		want(t, places[1], Called, 0)
		places[1].Stay(time.Now(), in(time.Second))
		want(t, places[1], Called, time.Second)
		for _, p := range places {
			p.Leave(time.Now())
		}
	})
}

func TestTheEndOfAWorseTiersWaitIsNothingNewForTheFirstRequest(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first := join(t, l, 1, 9*time.Second, in(0))
		want(t, first, Called, 0)
		first.Stay(time.Now(), in(3*time.Second))
		worse := join(t, l, 2, time.Second, in(0))
		go worse.Wait(nil)
		want(t, first, Called, 3*time.Second)
		first.Leave(time.Now())
	})
}

func TestARequestThatIsRefusedAndYieldsBeginsANewRound(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first, second := join(t, l, 1, 9*time.Second, in(0)), join(t, l, 2, 9*time.Second, in(0))
		want(t, first, Called, 0)
		first.Stay(time.Now(), Return{Key: key, Places: many, At: time.Now().Add(100 * time.Millisecond), Pause: time.Second})
		want(t, first, Called, 100*time.Millisecond)
		first.Go(time.Now(), key)
		time.Sleep(10 * time.Millisecond)
		first.Stay(time.Now(), yields(5*time.Second))
		want(t, second, Called, 0)
		second.Go(time.Now(), key)
		first.Leave(time.Now())
	})
}

func TestNextIsWhatTheFirstRequestHasFoundOut(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first, second := join(t, l, 0, 9*time.Second, Return{Key: key, Places: many, Reason: "a"}), join(t, l, 0, 9*time.Second, Return{Key: key, Places: many, Reason: "a and b"})
		want(t, first, Called, 0)
		first.Stay(time.Now(), Return{Key: key, Places: many, At: time.Now(), Pause: time.Second, Reason: "a"})
		want(t, first, Called, 0)
		first.Go(time.Now(), key)
		if r, ok := l.Ahead(time.Now(), key, Waiter{Tier: 0}, nil); !ok || r.Reason != "a and b" {
			t.Errorf("the next request waits for %v (%v), want a and b", r.Reason, ok)
		}
		want(t, second, Called, 500*time.Millisecond)
		second.Go(time.Now(), key)
	})
}
