package pool

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

func TestADrainedMemberIsTheLastChoice(t *testing.T) {
	p, members, heard := poolOf(t, "a", "b:2:1")
	members["a"].Drain(Order{})
	members["a"].Drain(Order{})
	wantPick(t, p, 1, start, "b")
	members["b"].CoolDown(throttle(10, 1), start)
	wantPick(t, p, 1, start, "a")
	members["a"].Resume(Order{})
	members["a"].Resume(Order{})
	wantPick(t, p, 1, at(11), "a")
	if want := []string{"a drained", "a drained", "b began throttled 10s", "a resumed", "a resumed"}; !slices.Equal(*heard, want) {
		t.Errorf("heard %q, want %q", *heard, want)
	}
}

func TestADrainOutlivesThePool(t *testing.T) {
	health := new(Health)
	old := New([]*Member{NewMember("a", health)})
	old.Members[0].Drain(Order{})
	old.Close()
	if next := New([]*Member{NewMember("a", health), NewMember("b", health)}); !next.Members[0].Drained() || next.Members[1].Drained() {
		t.Error("a member is drained by its name")
	}
}

func TestAResetEndsEveryCooldown(t *testing.T) {
	p, members, heard := poolOf(t, "a")
	a := members["a"]
	a.CoolDown(throttle(10, 1), start)
	a.CoolDown(Refusal{Reason: Reason{Class: "credential"}, Whole: true, Wait: time.Minute}, start)
	a.Reset(Order{})
	wantPick(t, p, 1, at(1), "a")
	want := []string{"a began throttled 10s", "a began credential 1m0s", "a reset",
		"a disproved credential 1m0s", "a ended credential 1m0s", "a disproved throttled 10s", "a ended throttled 10s"}
	if !slices.Equal(*heard, want) {
		t.Errorf("heard %q, want %q", *heard, want)
	}
}

func TestASnapshotTellsTheStateOfEveryMember(t *testing.T) {
	p, members, _ := poolOf(t, "a", "b", "c")
	members["a"].CoolDown(throttle(10, 1), start)
	members["b"].CoolDown(failure(10), start)
	members["c"].Drain(Order{})
	p.Pick(&asks{model: "other"}, start)
	states := func(seconds float64) (text []string) {
		for _, s := range p.Snapshot(at(seconds)) {
			text = append(text, fmt.Sprint(s.Member.Name, " cooldowns ", len(s.Cooldowns), " probing ", s.Probing, " drained ", s.Drained))
		}
		return text
	}
	for _, c := range []struct {
		seconds float64
		want    []string
	}{
		{9, []string{"a cooldowns 1 probing false drained false", "b cooldowns 1 probing false drained false", "c cooldowns 0 probing false drained true"}},
		{11, []string{"a cooldowns 0 probing false drained false", "b cooldowns 0 probing true drained false", "c cooldowns 0 probing false drained true"}},
	} {
		if got := states(c.seconds); !slices.Equal(got, c.want) {
			t.Errorf("after %v s: %q, want %q", c.seconds, got, c.want)
		}
	}
	var total int64
	for _, s := range p.Snapshot(start) {
		total += s.InFlight
	}
	if total != 1 {
		t.Errorf("%d requests are in flight, want 1", total)
	}
}

// told is a Listener that may be called by timers.
type told chan string

func (c told) Happened(e Event) {
	if e.Happening == Ended {
		c <- fmt.Sprint(e.Member.Name, " ", time.Since(start))
	}
}

func TestTheEndOfACooldownIsToldWhenItsTimeHasPassed(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		began := time.Now()
		heard := make(told, 10)
		a, b := NewMember("a", new(Health)), NewMember("b", new(Health))
		p := New([]*Member{a, b}, heard)
		coolDown := func(m *Member, seconds float64) { m.CoolDown(throttle(seconds, 1), time.Now()) }
		wantEnd := func(name string, after time.Duration) {
			t.Helper()
			got := <-heard
			if want := fmt.Sprint(name, " ", began.Add(after).Sub(start)); got != want {
				t.Errorf("heard %s, want %s", got, want)
			}
		}
		coolDown(a, 10)
		coolDown(b, 3)
		time.Sleep(time.Second)
		coolDown(a, 19) // it grows
		wantEnd("b", 3*time.Second)
		wantEnd("a", 20*time.Second)
		p.Pick((&asks{model: "m"}).of(p), time.Now())
		p.Pick((&asks{model: "m"}).of(p), time.Now())
		a.Served(Scope{Model: "m"}, time.Now())

		// the next pool with the same backends tells of what the closed one
		// began
		coolDown(a, 5)
		p.Close()
		next := New([]*Member{NewMember("a", a.health)}, heard)
		wantEnd("a", 25*time.Second)

		// a cooldown that begins at the very end of another one
		next.Members[0].CoolDown(throttle(5, 1), time.Now())
		time.Sleep(5 * time.Second)
		next.Members[0].CoolDown(throttle(5, 1), time.Now())
		wantEnd("a", 30*time.Second)
		wantEnd("a", 35*time.Second)
		next.Close()
		if len(heard) > 0 {
			t.Errorf("an end was told twice: %s", <-heard)
		}
	})
}

func TestAClosedPoolLeavesNoTimer(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		heard := make(told, 1)
		a := NewMember("a", new(Health))
		p := New([]*Member{a}, heard)
		a.CoolDown(throttle(10, 1), time.Now())
		p.Close()
		time.Sleep(time.Minute)
		if len(heard) > 0 {
			t.Error("a closed pool told of a cooldown's end")
		}
	})
}
