package waiting

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
)

var key = Key{Model: "gpt-4o"}

// inBubble runs a test in virtual time with lists of a wait of 10 s, and checks
// that no request waits in the end.
func inBubble(t *testing.T, places int, test func(*testing.T, *Lists)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := New(&Options{Duration: caddy.Duration(10 * time.Second), Places: &places}, false)
		test(t, l)
		if l.Len() != 0 || len(l.byKey) != 0 {
			t.Errorf("%d requests wait in %d lists", l.Len(), len(l.byKey))
		}
	})
}

// join gives a request a place for a time, or fails.
func join(t *testing.T, l *Lists, tier int, d time.Duration, r Return) *Place {
	t.Helper()
	now := time.Now()
	p, none := l.Join(now, key, Who{Tier: tier}, now.Add(d), r)
	if p == nil {
		t.Errorf("a request got no place: %s", none)
	}
	return p
}

// want checks what comes of a wait, and when.
func want(t *testing.T, p *Place, result Result, after time.Duration) {
	t.Helper()
	begin := time.Now()
	if got := p.Wait(nil); got != result || time.Since(begin) != after {
		t.Errorf("it is %s after %s, want %s after %s", got, time.Since(begin), result, after)
	}
}

func in(d time.Duration) Return { return Return{At: time.Now().Add(d)} }

func TestTheFirstRequestTriesAtOnceAndThenWhenItMay(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		p := join(t, l, 0, time.Second, in(time.Second))
		want(t, p, Turn, 0)
		p.Stay(time.Now(), in(300*time.Millisecond))
		want(t, p, Turn, 300*time.Millisecond)
		p.Go(time.Now())
	})
}

// LiteLLM #6867: requests in its queue looked every 3 ms whether they may go.
func TestARequestTriesOnlyWhenItMayGoOrSomethingHasChanged(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		var wg sync.WaitGroup
		turns := 0
		for range 10 {
			p := join(t, l, 0, 9*time.Second, in(time.Second))
			wg.Go(func() {
				for p.Wait(nil) == Turn {
					turns++
					if turns <= 10 { // each finds out something else
						p.Stay(time.Now(), in(500*time.Millisecond))
						continue
					}
					p.Go(time.Now())
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
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		first, second := join(t, l, 0, 9*time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0))
		want(t, first, Turn, 0)
		l.Wake(time.Now(), "") // while it tries
		first.Stay(time.Now(), in(time.Second))
		want(t, first, Turn, 0)
		first.Stay(time.Now(), in(time.Second))
		l.Wake(time.Now(), "alice")
		synctest.Wait()
		time.AfterFunc(100*time.Millisecond, func() { l.Wake(time.Now(), "") })
		want(t, first, Turn, 100*time.Millisecond)
		first.Go(time.Now())
		want(t, second, Turn, 0)
		second.Go(time.Now())
	})
}

func TestTheNextOneGoesAfterThePauseOrAtTheFirstByte(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		var places []*Place
		for range 5 {
			places = append(places, join(t, l, 0, 9*time.Second, in(0)))
		}
		want(t, places[0], Turn, 0)
		places[0].Stay(time.Now(), Return{At: time.Now(), Pause: 100 * time.Millisecond})
		want(t, places[0], Turn, 0)
		places[0].Go(time.Now())
		want(t, places[1], Turn, 100*time.Millisecond)
		places[1].Go(time.Now())
		time.AfterFunc(30*time.Millisecond, func() { places[0].FirstByte(time.Now()) })
		want(t, places[2], Turn, 30*time.Millisecond)
		places[2].Go(time.Now())
		want(t, places[3], Turn, 50*time.Millisecond) // the first byte has halved the pause
		places[3].Go(time.Now())
		places[2].Stay(time.Now(), Return{At: time.Now().Add(time.Second), Pause: 100 * time.Millisecond}) // it was refused
		places[1].FirstByte(time.Now())                                                                    // of the round before
		want(t, places[2], Turn, time.Second)
		places[2].Go(time.Now())
		want(t, places[4], Turn, 100*time.Millisecond)
		places[4].Go(time.Now())
	})
}

func TestALongPauseIsShortenedSoThatTheListCanEmpty(t *testing.T) {
	inBubble(t, 100, func(t *testing.T, l *Lists) {
		first, second := join(t, l, 0, 9*time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0))
		want(t, first, Turn, 0)
		first.Stay(time.Now(), Return{At: time.Now().Add(time.Second), Pause: time.Second})
		want(t, first, Turn, time.Second)
		first.Go(time.Now())
		want(t, second, Turn, 100*time.Millisecond)
		second.Go(time.Now())
	})
}

func TestTheTurnPassesOnWhenARequestLeaves(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		first, second, third := join(t, l, 0, 9*time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0))
		ctx, leave := context.WithCancel(t.Context())
		leave()
		if got := first.Wait(ctx.Done()); got != Left { // although it is its turn
			t.Errorf("it is %s", got)
		}
		want(t, second, Turn, 0)
		second.Leave(time.Now())
		want(t, third, Turn, 0)
		third.Leave(time.Now())
	})
}

func TestEachWaitEndsInTime(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, l *Lists) {
		first, second, third := join(t, l, 0, time.Second, in(0)), join(t, l, 0, 2*time.Second, in(0)), join(t, l, 0, 500*time.Millisecond, in(0))
		if p, none := l.Join(time.Now(), key, Who{}, time.Now().Add(time.Second), in(0)); p != nil || none != Full {
			t.Errorf("a fourth request got the place %v: %s", p, none)
		}
		want(t, first, Turn, 0)
		first.Stay(time.Now(), in(5*time.Second))
		want(t, third, Over, 500*time.Millisecond)
		want(t, first, Over, 500*time.Millisecond)
		want(t, second, Turn, 0)
		second.Stay(time.Now(), in(5*time.Second))
		want(t, second, Over, time.Second)
	})
}

func TestCloseEndsAllWaits(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		first, second, gone := join(t, l, 1, 9*time.Second, in(0)), join(t, l, 1, 9*time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0))
		want(t, first, Turn, 0)
		first.Stay(time.Now(), in(time.Second))
		want(t, gone, Turn, 0)
		gone.Go(time.Now())
		want(t, first, Turn, 0)
		l.Close()
		want(t, second, Stopped, 0)
		first.Stay(time.Now(), in(time.Second))
		want(t, first, Stopped, 0)
		gone.Stay(time.Now(), in(time.Second))
		want(t, gone, Stopped, 0)
		if p, none := l.Join(time.Now(), key, Who{}, time.Now().Add(time.Second), in(0)); p != nil || none != Stopped {
			t.Errorf("a request got the place %v: %s", p, none)
		}
	})
}

// A random load of three tiers, with clients that leave, cooldowns that grow,
// refusals and first bytes. Whoever goes was the first of the requests that
// wait.
func TestRandomWaitsKeepTheOrder(t *testing.T) {
	for seed := range uint64(20) {
		inBubble(t, 1000, func(t *testing.T, l *Lists) {
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
				p, none := l.Join(time.Now(), key, Who{Tier: chance(3)}, time.Now().Add(wait), in(0))
				if p == nil {
					t.Fatal(none)
				}
				wg.Go(func() {
					defer leave()
					begin, again := time.Now(), chance(3)
					for {
						switch p.Wait(ctx.Done()) {
						case Turn:
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
						next := Return{At: time.Now().Add(time.Duration(1+chance(30)) * time.Millisecond), Pause: time.Duration(chance(20)) * time.Millisecond}
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
						if s.called != p || !slices.IsSortedFunc(s.places, compare) {
							t.Error("the order is wrong, or a request goes that is not called")
						}
						l.mu.Unlock()
						p.Go(time.Now())
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

func TestOptionsAreChecked(t *testing.T) {
	for text, want := range map[string]string{
		"1s": "", "10s": "", "1s 1": "", "43ms 1000": "",
		"0":       "wait '0s' is not a duration above 0, of at most 10s",
		"-1s":     "wait '-1s' is not a duration above 0, of at most 10s",
		"11s":     "wait '11s' is not a duration above 0, of at most 10s",
		"off":     "wait 'off' is not a duration above 0, of at most 10s",
		"1s 0":    "wait: places '0' is not a whole number from 1 to 1000",
		"1s x":    "wait: places 'x' is not a whole number from 1 to 1000",
		"1s 1.5":  "wait: places '1.5' is not a whole number from 1 to 1000",
		"1s 1001": "wait: places '1001' is not a whole number from 1 to 1000",
	} {
		var o Options
		err := o.UnmarshalArgs(strings.Fields(text))
		if err == nil && want != "" || err != nil && err.Error() != want {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
	if New(nil, false) != nil || New(nil, false).Len() != 0 || (*Options)(nil).Check() != nil {
		t.Error("there are lists without options")
	}
}

func TestAReturnFromATryDoesNotHideAChangeFromTheRequestThatTries(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		first, second := join(t, l, 0, 5*time.Second, in(time.Second)), join(t, l, 0, 5*time.Second, in(time.Second))
		want(t, first, Turn, 0)
		first.Go(time.Now())
		want(t, second, Turn, 0)
		l.Wake(time.Now(), "")
		first.Stay(time.Now(), in(3*time.Second))
		second.Stay(time.Now(), in(3*time.Second)) // it was found out before the change
		want(t, first, Turn, 0)
		first.Leave(time.Now())
		want(t, second, Turn, 0)
		second.Leave(time.Now())
	})
}

func TestABetterTierTakesTheLastPlaceOfAWorseOne(t *testing.T) {
	inBubble(t, 2, func(t *testing.T, l *Lists) {
		later := in(time.Second)
		called, last := join(t, l, 2, time.Second, later), join(t, l, 2, time.Second, later)
		want(t, called, Turn, 0)
		called.Stay(time.Now(), later)
		better := join(t, l, 1, time.Second, later)
		want(t, last, Full, 0)
		if p, none := l.Join(time.Now(), key, Who{Tier: 2}, later.At, later); p != nil || none != Full {
			t.Errorf("one of the same tier got a place, or %s", none)
		}
		want(t, better, Turn, 0)
		better.Go(time.Now())
		want(t, called, Turn, 0)
		called.Leave(time.Now())
	})
}

// Requests differ: what the first one has found out is not true for the next
// one.
func TestTheNextRequestTriesAtOnceWhenTheFirstOneLeaves(t *testing.T) {
	for name, leave := range map[string]func(*Lists, *Place){
		"its client leaves": func(_ *Lists, p *Place) { done := make(chan struct{}); close(done); p.Wait(done) },
		"it is over":        func(*Lists, *Place) { time.Sleep(time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 10, func(t *testing.T, l *Lists) {
				first, second := join(t, l, 0, time.Second, in(0)), join(t, l, 0, 9*time.Second, in(0))
				want(t, first, Turn, 0)
				first.Stay(time.Now(), in(5*time.Second))
				leave(l, first)
				want(t, second, Turn, 0)
				second.Leave(time.Now())
			})
		})
	}
}

func TestARequestMayWaitUntilTheEndOfItsTime(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		first, second := join(t, l, 0, time.Second, in(0)), join(t, l, 0, time.Second, in(0))
		want(t, first, Turn, 0)
		first.Stay(time.Now(), in(time.Second))
		want(t, first, Turn, time.Second)
		first.Go(time.Now())
		second.Leave(time.Now())
	})
}

func TestABetterTierDoesNotWaitForWhatAWorseOneHasFoundOut(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		worse := join(t, l, 2, 9*time.Second, in(0))
		want(t, worse, Turn, 0)
		better := join(t, l, 1, 9*time.Second, in(0))
		worse.Stay(time.Now(), in(5*time.Second))
		want(t, better, Turn, 0)
		better.Stay(time.Now(), in(time.Second))
		want(t, better, Turn, time.Second)
		better.Go(time.Now())
		want(t, worse, Turn, 0)
		worse.Go(time.Now())
		better = join(t, l, 1, 9*time.Second, in(0))
		want(t, better, Turn, 0)
		better.Stay(time.Now(), in(time.Second))
		worse.Stay(time.Now(), in(5*time.Second)) // it was refused
		want(t, better, Turn, 0)
		better.Leave(time.Now())
		want(t, worse, Turn, 0)
		worse.Leave(time.Now())
	})
}

// yields is what a request has found out whose tier has got its share.
func yields(d time.Duration) Return {
	return Return{At: time.Now().Add(d), Reason: "all", Yields: true}
}

func TestATierThatHasGotItsShareLetsOthersGoAndIsFirstWhenBothMay(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		better, worse := join(t, l, 1, 9*time.Second, in(0)), join(t, l, 2, 9*time.Second, in(0))
		want(t, better, Turn, 0)
		better.Stay(time.Now(), yields(2*time.Second))
		want(t, worse, Turn, 0)
		worse.Stay(time.Now(), in(time.Second))
		want(t, better, Turn, 0) // it may go before the worse one does
		better.Stay(time.Now(), yields(2*time.Second))
		want(t, worse, Turn, time.Second)
		worse.Stay(time.Now(), in(time.Second))
		want(t, better, Turn, 0)
		better.Stay(time.Now(), yields(time.Second))
		want(t, better, Turn, time.Second)
		better.Go(time.Now())
		want(t, worse, Turn, 0)
		worse.Go(time.Now())
	})
}

func TestEachTierStandsBehindThoseThatDoNotYieldToIt(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		places := []*Place{join(t, l, 1, 9*time.Second, in(0)), join(t, l, 2, 9*time.Second, in(0)), join(t, l, 3, 9*time.Second, in(0))}
		want(t, places[0], Turn, 0)
		places[0].Stay(time.Now(), yields(2*time.Second))
		want(t, places[1], Turn, 0)
		places[1].Stay(time.Now(), Return{At: time.Now().Add(time.Second), Reason: "two"})
		want(t, places[0], Turn, 0)
		places[0].Stay(time.Now(), yields(2*time.Second))
		for tier, reason := range []any{nil, "all", "two", "two"} {
			if r, ok := l.Next(time.Now(), key, tier); r.Reason != reason || ok != (tier > 0) {
				t.Errorf("a request of tier %d stands behind %v (%v), want %v", tier, r.Reason, ok, reason)
			}
		}
		for _, p := range places {
			p.Leave(time.Now())
		}
	})
}

func TestTiersApartHaveTheirOwnPlaces(t *testing.T) {
	inBubble(t, 2, func(t *testing.T, l *Lists) {
		l.apart = true
		var places []*Place
		for i, tier := range []int{1, 2, 1, 1, 2, 2, 0} { // 0: a caller without a tier
			p, _ := l.Join(time.Now(), key, Who{Tier: tier}, time.Now().Add(time.Second), in(time.Second))
			if (p != nil) != (i != 3 && i != 5) {
				t.Errorf("request %d of tier %d has place %v", i, tier, p)
			}
			if p != nil {
				places = append(places, p)
			}
		}
		for _, p := range places {
			p.Leave(time.Now())
		}
	})
}

func TestAWorseTierStandsBehindABetterOneWhoseTimeHasCome(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		r := func() Return {
			return Return{At: time.Now().Add(500 * time.Millisecond), Pause: 50 * time.Millisecond, Yields: true}
		}
		first, second := join(t, l, 1, 9*time.Second, r()), join(t, l, 1, 9*time.Second, r())
		want(t, first, Turn, 0)
		first.Stay(time.Now(), r())
		if _, ok := l.Next(time.Now(), key, 2); ok {
			t.Error("it stands behind one that yields")
		}
		want(t, first, Turn, 500*time.Millisecond)
		if _, ok := l.Next(time.Now(), key, 2); !ok {
			t.Error("it stands behind none while the better one tries")
		}
		first.Go(time.Now())
		if _, ok := l.Next(time.Now(), key, 2); !ok {
			t.Error("it stands behind none while the better one waits for the pause")
		}
		want(t, second, Turn, 50*time.Millisecond)
		second.Go(time.Now())
	})
}

// At 1 s the time of the second one has come, and its wait ends. That of a
// third tier ends, too.
func TestTheEndOfAWaitTakesNoTurnFromABetterTier(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		places := []*Place{join(t, l, 1, 9*time.Second, in(0)), join(t, l, 2, time.Second, in(0)), join(t, l, 3, time.Second, in(0))}
		want(t, places[0], Turn, 0)
		places[0].Stay(time.Now(), yields(5*time.Second))
		want(t, places[1], Turn, 0)
		places[1].Stay(time.Now(), in(time.Second))
		want(t, places[0], Turn, 0)
		places[0].Stay(time.Now(), yields(5*time.Second))
		want(t, places[1], Turn, time.Second)
		for _, p := range places {
			p.Leave(time.Now())
		}
	})
}

func TestTheEndOfAWorseTiersWaitIsNothingNewForTheFirstRequest(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		first := join(t, l, 1, 9*time.Second, in(0))
		want(t, first, Turn, 0)
		first.Stay(time.Now(), in(3*time.Second))
		join(t, l, 2, time.Second, in(0))
		want(t, first, Turn, 3*time.Second)
		first.Leave(time.Now())
	})
}

func TestPausesAreShortAlsoBehindOneThatYields(t *testing.T) {
	inBubble(t, 100, func(t *testing.T, l *Lists) { // 100 ms at most
		slow := func() Return {
			return Return{At: time.Now().Add(500 * time.Millisecond), Pause: time.Second, Yields: true}
		}
		first, second := join(t, l, 1, 9*time.Second, slow()), join(t, l, 1, 9*time.Second, slow())
		want(t, first, Turn, 0)
		first.Stay(time.Now(), slow())
		want(t, first, Turn, 500*time.Millisecond)
		first.Go(time.Now())
		want(t, second, Turn, 100*time.Millisecond)
		second.Go(time.Now())
	})
}

func TestACooldownAfterAShareHasItsPause(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		first, second := join(t, l, 1, 9*time.Second, yields(0)), join(t, l, 1, 9*time.Second, yields(0))
		want(t, first, Turn, 0)
		throttled := yields(100 * time.Millisecond)
		throttled.Pause = 50 * time.Millisecond
		first.Stay(time.Now(), throttled)
		want(t, first, Turn, 100*time.Millisecond)
		first.Go(time.Now())
		want(t, second, Turn, 50*time.Millisecond)
		second.Go(time.Now())
	})
}

func TestARequestThatIsRefusedAndYieldsBeginsANewRound(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		first, second := join(t, l, 1, 9*time.Second, in(0)), join(t, l, 2, 9*time.Second, in(0))
		want(t, first, Turn, 0)
		first.Stay(time.Now(), Return{At: time.Now().Add(100 * time.Millisecond), Pause: time.Second})
		want(t, first, Turn, 100*time.Millisecond)
		first.Go(time.Now())
		time.Sleep(10 * time.Millisecond)
		first.Stay(time.Now(), yields(5*time.Second))
		want(t, second, Turn, 0)
		second.Go(time.Now())
		first.Leave(time.Now())
	})
}

func TestNextIsWhatTheFirstRequestHasFoundOut(t *testing.T) {
	inBubble(t, 10, func(t *testing.T, l *Lists) {
		first, second := join(t, l, 0, 9*time.Second, Return{Reason: "a"}), join(t, l, 0, 9*time.Second, Return{Reason: "a and b"})
		want(t, first, Turn, 0)
		first.Stay(time.Now(), Return{At: time.Now(), Pause: time.Second, Reason: "a"})
		want(t, first, Turn, 0)
		first.Go(time.Now())
		if r, ok := l.Next(time.Now(), key, 0); !ok || r.Reason != "a and b" {
			t.Errorf("the next request waits for %v (%v), want a and b", r.Reason, ok)
		}
		want(t, second, Turn, time.Second)
		second.Go(time.Now())
	})
}
