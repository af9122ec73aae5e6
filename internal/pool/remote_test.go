package pool

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// replicas are two pools with the same backend, of which the second hears what
// the first one tells, a second later.
func replicas(t *testing.T) (here, there testPool, heard *events) {
	here, _, _ = poolOf(t, "a")
	there, _, heard = poolOf(t, "a")
	here.listeners = append(here.listeners, tells{there.Members[0]})
	return here, there, heard
}

// tells is a Listener that tells another replica's member.
type tells struct{ m *Member }

func (l tells) Happened(e Event) {
	now := e.Cooldown.Since.Add(time.Second)
	switch e.Happening {
	case Began, Grew:
		l.m.Hear(e.Cooldown, e.Cooldown.Until.Sub(now), now)
		l.m.Hear(e.Cooldown, e.Cooldown.Until.Sub(now), now) // it may come twice
	case Doubted:
		l.m.HearDoubt(e.Cooldown)
	case Disproved:
		l.m.HearDisproved(e.Cooldown)
	case Drained, Resumed:
		l.m.HearDrained(e.Happening == Drained, e.Order)
	}
}

func wantHeard(t *testing.T, heard *events, want ...string) {
	t.Helper()
	if !slices.Equal(*heard, want) {
		t.Errorf("heard %q, want %q", *heard, want)
	}
}

func TestACooldownHoldsWhereItWasHeard(t *testing.T) {
	here, there, heard := replicas(t)
	a := here.Members[0]
	a.CoolDown(throttle(10, 1), start)
	wantPick(t, there, 1, at(9.9), "nobody")
	a.CoolDown(throttle(18, 1), at(2))
	a.CoolDown(throttle(1, 1), at(3)) // it changes nothing
	wantPick(t, there, 1, at(19.9), "nobody")
	wantPick(t, there, 1, at(20), "a")
	wantHeard(t, heard, "a began elsewhere throttled 10s", "a grew elsewhere throttled 20s")
}

func TestCooldownsThatAreHeardDoNotTakeTheirPlacesInTurn(t *testing.T) {
	_, there, heard := replicas(t)
	a := there.Members[0]
	hear := func(model string, seconds int) {
		length := time.Duration(seconds) * time.Second
		a.Hear(Cooldown{ID: uint64(len(model)), Model: model, Since: start, Until: start.Add(length), Throttle: true}, length, start)
	}
	const most = tableSets * setSize
	comparison := func() {
		for i := range 3 * most {
			hear(fmt.Sprint("model-", i), 600+i)
		}
	}
	a.Served(Scope{Model: "known"}, start)
	comparison()
	began := len(*heard)
	if began > most || began < most*9/10 {
		t.Errorf("%d cooldowns started, want nearly %d", began, most)
	}
	hear("known", 300) // is worth more
	if n := len(*heard); n != began+1 {
		t.Errorf("%d cooldowns started, want one more than %d", n, began)
	}
	for range 3 {
		comparison()
	}
	if n := len(*heard); n != began+1 {
		t.Errorf("%d cooldowns started again", n-began-1)
	}
	a.Hear(Cooldown{ID: 1, Model: "later", Since: at(5600), Until: at(5610), Throttle: true}, 10*time.Second, at(5600))
	if n := len(*heard); n != began+2 {
		t.Error("a cooldown that is over keeps another from being heard")
	}
}

func TestAServedProbeEndsTheCooldownWhereItWasHeard(t *testing.T) {
	here, there, heard := replicas(t)
	a := here.Members[0]
	a.CoolDown(throttle(10, 1), start)
	there.Members[0].HearProbe(there.Snapshot(at(1))[0].Cooldowns[0], at(10))
	wantPick(t, here, 1, at(10), "a")
	// nobody else is left, so a suspect is tried: it is not kept waiting by
	// name
	if s := there.Members[0].standing((&asks{model: "m", cost: 1}).of(there.Pool), at(10.5)); s != trialPending {
		t.Errorf("while another replica probes, the standing is %v, want %v", s, trialPending)
	}
	a.Served(Scope{Model: "m"}, at(10))
	if s := there.Members[0].standing((&asks{model: "m", cost: 1}).of(there.Pool), at(10.5)); s != ready {
		t.Errorf("after the probe was served, the standing is %v, want %v", s, ready)
	}
	wantHeard(t, heard, "a began elsewhere throttled 10s", "a disproved elsewhere throttled 10s", "a ended elsewhere throttled 10s")
}

func TestACooldownThatGrewHereIsNotDisprovedElsewhere(t *testing.T) {
	here, there, _ := replicas(t)
	here.Members[0].CoolDown(throttle(10, 1), start)
	there.Members[0].CoolDown(throttle(20, 1), at(2))
	here.Members[0].Served(Scope{Model: "m"}, at(5))
	wantPick(t, there, 1, at(6), "nobody")
	wantPick(t, there, 1, at(21.9), "nobody")
}

func TestDoubtIsSharedWithTheCost(t *testing.T) {
	here, there, _ := replicas(t)
	a := here.Members[0]
	a.CoolDown(throttle(60, 1000), start)
	wantPick(t, there, 10, at(1), "nobody")
	a.Doubt(false, Scope{Model: "m"}, start)
	wantPick(t, there, 1000, at(1), "nobody")
	wantPick(t, there, 10, at(1), "a")
}

func TestADrainHoldsElsewhere(t *testing.T) {
	here, there, heard := replicas(t)
	here.Members[0].Drain(Order{})
	if !there.Members[0].Drained() {
		t.Error("a drain was not heard")
	}
	here.Members[0].Resume(Order{})
	if there.Members[0].Drained() {
		t.Error("the end of a drain was not heard")
	}
	wantHeard(t, heard, "a drained elsewhere", "a resumed elsewhere")
}

func TestACooldownOfTheWholeBackendIsHeardAsSuch(t *testing.T) {
	here, there, _ := replicas(t)
	here.Members[0].CoolDown(Refusal{Reason: Reason{Class: "quota", Status: 429}, Throttle: true, Whole: true, Wait: time.Minute}, start)
	if m := there.Pick(&asks{model: "another"}, at(1)); m != nil {
		t.Error("the cooldown of a whole backend holds for one model only")
	}
}

func TestCooldownsThatReplicasBeginAtOnceAreOne(t *testing.T) {
	for _, tt := range []struct {
		name string
		// waits are those of two refusals at the first replica, and one at the
		// second, in seconds; 0: there was none.
		first, again, second float64
	}{
		{"of the same length", 10, 0, 10},
		{"of about the same length", 10, 0, 10.3},
		{"of about the same length, one of which grew", 10, 10.1, 10.05},
		{"of another length", 10, 0, 15},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for range 20 { // IDs are random
				here, there := NewMember("a", new(Health)), NewMember("a", new(Health))
				ofHere, ofThere := new(cooldownsTold), new(cooldownsTold)
				New([]*Member{here}, ofHere)
				New([]*Member{there}, ofThere)
				here.CoolDown(throttle(tt.first, 1), start)
				if tt.again > 0 {
					here.CoolDown(throttle(tt.again, 1), start)
				}
				there.CoolDown(throttle(tt.second, 1), start)
				const delay = 10 * time.Millisecond
				for _, b := range *ofHere {
					there.Hear(b, b.Until.Sub(start), start.Add(delay))
				}
				for _, b := range *ofThere {
					here.Hear(b, b.Until.Sub(start), start.Add(delay))
				}
				a, b := here.pool.Snapshot(at(1))[0].Cooldowns[0], there.pool.Snapshot(at(1))[0].Cooldowns[0]
				if a.ID != b.ID {
					t.Errorf("the cooldowns are %x and %x", a.ID, b.ID)
				}
				if longest := at(max(tt.first, tt.again, tt.second)); a.Until.Before(longest) || b.Until.Before(longest) || a.Until.After(longest.Add(delay)) || b.Until.After(longest.Add(delay)) {
					t.Errorf("they end at %v and %v, want %v", a.Until, b.Until, longest)
				}
			}
		})
	}
}

// cooldownsTold is a Listener that keeps the cooldowns that other replicas get.
type cooldownsTold []Cooldown

func (l *cooldownsTold) Happened(e Event) {
	if !e.Remote && (e.Happening == Began || e.Happening == Grew) {
		*l = append(*l, e.Cooldown)
	}
}
