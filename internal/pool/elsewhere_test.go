package pool

import (
	"slices"
	"testing"
	"time"
)

// replicas are two pools with the same backend, of which the second hears what
// the first one tells, a second later.
func replicas(t *testing.T) (here, there *Pool, heard *events) {
	here, _, _ = poolOf(t, "a")
	there, _, heard = poolOf(t, "a")
	here.listeners = append(here.listeners, tells{there.Members[0]})
	return here, there, heard
}

// tells is a Listener that tells another replica's member.
type tells struct{ m *Member }

func (l tells) Happened(e Event) {
	now := e.Bench.Since.Add(time.Second)
	switch e.Happening {
	case Began, Grew:
		l.m.Hear(e.Bench, e.Bench.Until.Sub(now), now)
		l.m.Hear(e.Bench, e.Bench.Until.Sub(now), now) // it may come twice
	case Doubted:
		l.m.HearDoubt(e.Bench)
	case Disproved:
		l.m.HearDisproved(e.Bench)
	case Drained, Resumed:
		l.m.HearDrained(e.Happening == Drained)
	}
}

func wantHeard(t *testing.T, heard *events, want ...string) {
	t.Helper()
	if !slices.Equal(*heard, want) {
		t.Errorf("heard %q, want %q", *heard, want)
	}
}

func TestABenchHoldsWhereItWasHeard(t *testing.T) {
	here, there, heard := replicas(t)
	a := here.Members[0]
	a.Bench(throttle(10, 1), start)
	wantPick(t, there, 1, at(9.9), "nobody")
	a.Bench(throttle(18, 1), at(2))
	a.Bench(throttle(1, 1), at(3)) // it changes nothing
	wantPick(t, there, 1, at(19.9), "nobody")
	wantPick(t, there, 1, at(20), "a")
	wantHeard(t, heard, "a began elsewhere throttled 10s", "a grew elsewhere throttled 20s")
}

func TestAServedProbeEndsTheBenchWhereItWasHeard(t *testing.T) {
	here, there, heard := replicas(t)
	a := here.Members[0]
	a.Bench(throttle(10, 1), start)
	there.Members[0].HearProbe(there.Snapshot(at(1))[0].Benches[0], at(10))
	wantPick(t, here, 1, at(10), "a")
	// nobody else is left, so a suspect is tried: it is not kept waiting by name
	if s := there.Members[0].standing("m", 1, at(10.5)); s != waiting {
		t.Errorf("while another replica probes, the standing is %v, want %v", s, waiting)
	}
	a.Served("m", at(10))
	if s := there.Members[0].standing("m", 1, at(10.5)); s != ready {
		t.Errorf("after the probe was served, the standing is %v, want %v", s, ready)
	}
	wantHeard(t, heard, "a began elsewhere throttled 10s", "a disproved elsewhere throttled 10s", "a ended elsewhere throttled 10s")
}

func TestABenchThatGrewHereIsNotDisprovedElsewhere(t *testing.T) {
	here, there, _ := replicas(t)
	here.Members[0].Bench(throttle(10, 1), start)
	there.Members[0].Bench(throttle(20, 1), at(2))
	here.Members[0].Served("m", at(5))
	wantPick(t, there, 1, at(6), "nobody")
	wantPick(t, there, 1, at(21.9), "nobody")
}

func TestDoubtIsSharedWithTheCost(t *testing.T) {
	here, there, _ := replicas(t)
	a := here.Members[0]
	a.Bench(throttle(60, 1000), start)
	wantPick(t, there, 10, at(1), "nobody")
	a.Doubt("m", start)
	wantPick(t, there, 1000, at(1), "nobody")
	wantPick(t, there, 10, at(1), "a")
}

func TestADrainHoldsElsewhere(t *testing.T) {
	here, there, heard := replicas(t)
	here.Members[0].Drain()
	if !there.Members[0].Drained() {
		t.Error("a drain was not heard")
	}
	here.Members[0].Resume()
	if there.Members[0].Drained() {
		t.Error("the end of a drain was not heard")
	}
	wantHeard(t, heard, "a drained elsewhere", "a resumed elsewhere")
}

func TestABenchOfTheWholeBackendIsHeardAsSuch(t *testing.T) {
	here, there, _ := replicas(t)
	here.Members[0].Bench(Refusal{Reason: Reason{Class: "quota", Status: 429}, Throttle: true, Whole: true, Wait: time.Minute}, start)
	if m := there.Pick(&asks{model: "another"}, at(1)); m != nil {
		t.Error("the bench of a whole backend holds for one model only")
	}
}
