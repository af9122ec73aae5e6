package pool

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// guess is a throttle for which the backend named no time.
func guessOf(seconds float64) Refusal {
	r := throttle(seconds, 1)
	r.Guess = true
	return r
}

func TestWhileNoOtherMemberIsLeftOneRequestAtATimeTriesAGuess(t *testing.T) {
	for _, c := range []struct {
		guess, step float64
	}{{10, 0.5}, {60, 3}, {5, 0.25}, {1, 0.25}} {
		p, members, _ := poolOf(t, "a")
		members["a"].CoolDown(guessOf(c.guess), start)
		for i := 1; float64(i)*c.step < c.guess; i++ {
			due := at(float64(i) * c.step)
			wantPick(t, p, 1, due.Add(-time.Nanosecond), "nobody")
			wantPick(t, p, 1, due, "a")
			wantPick(t, p, 1, due, "nobody")
		}
	}
}

func TestATimeThatTheBackendNamedIsNotTried(t *testing.T) {
	p, members, _ := poolOf(t, "a", "b")
	members["a"].CoolDown(throttle(10, 1), start)
	quota := throttle(10, 1)
	quota.Whole = true
	members["b"].CoolDown(guessOf(10), start)
	members["b"].CoolDown(quota, start)
	for i := range 100 {
		wantPick(t, p, 1, at(float64(i)/10), "nobody")
	}
	wantPick(t, p, 1, at(10), "a")
}

func TestAGuessIsTriedAfterAllOtherMembers(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1", "c:2:0")
	members["a"].CoolDown(guessOf(10), start)
	wantPick(t, p, 1, at(1), "b")
	members["b"].CoolDown(failure(10), at(1))
	wantPick(t, p, 1, at(2), "c")
	members["c"].CoolDown(failure(10), at(2))
	wantPick(t, p, 1, at(3), "b")
	wantPick(t, p, 1, at(4), "b")
	r := &asks{model: "m", tried: []*Member{members["b"], members["c"]}}
	if m := p.Pick(r, at(5)); m != members["a"] {
		t.Errorf("after all others it went to %v, want a", m)
	}
	if !members["a"].Throttles((&asks{model: "m"}).of(members["a"].pool), at(6)) {
		t.Error("a guess that may be tried does not count as a throttle")
	}
}

func TestARefusedTryIsFollowedByAnother(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	members["a"].CoolDown(guessOf(10), start)
	wantPick(t, p, 1, at(0.6), "a")
	members["a"].CoolDown(guessOf(10), at(0.7))
	wantPick(t, p, 1, at(1.15), "nobody")
	wantPick(t, p, 1, at(1.25), "a")
	if wait := p.Wait((&asks{model: "m"}).of(p.Pool), at(1.25)); wait != 9450*time.Millisecond {
		t.Errorf("the wait is %s, want the end of the guess", wait)
	}
}

func TestAServedTryDoesNotEndATimeThatTheBackendHasNamedSince(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	members["a"].CoolDown(guessOf(10), start)
	wantPick(t, p, 1, at(0.6), "a")
	members["a"].CoolDown(throttle(1, 1), at(1)) // it ends before the guess
	members["a"].Served(Scope{Model: "m"}, at(0.6))
	wantPick(t, p, 1, at(1.9), "nobody")
	members["a"].Served(Scope{Model: "m"}, at(1.1))
	wantPick(t, p, 1, at(1.9), "a")
}

func TestAServedTryEndsTheGuess(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	members["a"].CoolDown(guessOf(10), start)
	wantPick(t, p, 1, at(0.6), "a")
	members["a"].Served(Scope{Model: "m"}, at(0.6))
	for range 3 {
		wantPick(t, p, 1, at(0.7), "a")
	}
}

func TestWithinAGuessTheTimeThatTheBackendNamedIsKept(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	members["a"].CoolDown(guessOf(10), start)
	wantPick(t, p, 1, at(0.6), "a")
	members["a"].CoolDown(throttle(5, 1), at(0.6)) // it names 5.6 s, and the guess is 10 s
	wantPick(t, p, 1, at(5.5), "nobody")
	wantPick(t, p, 1, at(5.6), "a")
	members["a"].CoolDown(throttle(5, 1), at(5.6)) // it names 10.6 s
	wantPick(t, p, 1, at(10.5), "nobody")
	members["a"].CoolDown(guessOf(10), at(10.5)) // until 20.5 s
	wantPick(t, p, 1, at(10.59), "nobody")
	wantPick(t, p, 1, at(11), "a")
}

func TestATimeThatZeroHasGrownToIsAGuess(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	zero := Refusal{Throttle: true, Model: "m", Wait: time.Second, Longest: 10 * time.Second}
	refused := func(seconds float64) {
		zero.Started = at(seconds)
		members["a"].CoolDown(zero, at(seconds))
	}
	refused(0)
	wantPick(t, p, 1, at(0.9), "nobody") // until 1 s the shortest cooldown holds
	for _, seconds := range []float64{1, 3, 7} {
		refused(seconds) // until 3, 7, 15 s
	}
	wantPick(t, p, 1, at(7.39), "nobody")
	wantPick(t, p, 1, at(7.4), "a")
	refused(7.4)
	wantPick(t, p, 1, at(7.7), "nobody")
	wantPick(t, p, 1, at(7.8), "a")
	if end := members["a"].returns((&asks{model: "m"}).of(members["a"].pool), at(7.8)); !end.Equal(at(15)) {
		t.Errorf("refused tries moved the end to %s", end.Sub(start))
	}
}

func TestReplicasTryAGuessThatTheyHearOf(t *testing.T) {
	_, members, _ := poolOf(t, "a")
	members["a"].CoolDown(guessOf(10), start)
	heard := slices.Collect(members["a"].health.cooldowns())[0].Cooldown
	there, others, _ := poolOf(t, "a")
	others["a"].Hear(heard, 9*time.Second, at(1))
	wantPick(t, there, 1, at(1.4), "nobody")
	wantPick(t, there, 1, at(1.5), "a")
	wantPick(t, there, 1, at(1.5), "nobody")
}

func TestOfManyRequestsOneTriesAGuess(t *testing.T) {
	p, members, _ := poolOf(t, "a", "b")
	members["a"].CoolDown(guessOf(10), start)
	members["b"].CoolDown(guessOf(10), start)
	var all sync.WaitGroup
	var tried atomic.Int64
	for range 100 {
		all.Go(func() {
			if p.Pick(&asks{model: "m"}, at(1)) != nil {
				tried.Add(1)
			}
		})
	}
	if all.Wait(); tried.Load() != 2 {
		t.Errorf("%d requests tried two members, want one for each", tried.Load())
	}
}

// A cooldown of the whole backend that is in doubt does not hold for a small
// request, which may then try the guess of its model.
func TestAGuessIsTriedNextToACooldownInDoubt(t *testing.T) {
	p, members, _ := poolOf(t, "a")
	budget := throttle(60, 100)
	budget.Whole = true
	members["a"].CoolDown(budget, start)
	members["a"].Doubt(true, Scope{Model: "m"}, start)
	members["a"].CoolDown(guessOf(10), start)
	wantPick(t, p, 1, at(1), "a")
	wantPick(t, p, 1, at(1), "nobody")
}
