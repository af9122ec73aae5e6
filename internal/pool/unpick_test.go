package pool

import (
	"testing"
	"time"
)

// TestAPickThatIsUndoneKeepsNobodyAway undoes picks that give one request a
// right: another one gets it at once, and only one does.
func TestAPickThatIsUndoneKeepsNobodyAway(t *testing.T) {
	for name, tc := range map[string]struct {
		rests func(t *testing.T, a, b *Member)
		cost  int64
		picks time.Time
	}{
		"the probe after a throttle": {func(_ *testing.T, a, _ *Member) { a.CoolDown(throttle(10, 1), start) }, 1, at(10)},
		"the probe after a failure":  {func(_ *testing.T, a, _ *Member) { a.CoolDown(failure(10), start) }, 1, at(10)},
		"the check of a throttle": {func(_ *testing.T, a, _ *Member) {
			a.CoolDown(throttle(10, 100), start)
			a.Doubt(false, Scope{Model: "m"}, start)
		}, 1, at(1)},
		"a try of a guess": {func(_ *testing.T, a, b *Member) {
			a.CoolDown(guessOf(10), start)
			b.CoolDown(throttle(60, 1), start) // a guess is the last resort
		}, 1, at(1)},
		"a trial of a silence": {func(t *testing.T, a, _ *Member) { silent(t, a, "m", start) }, 1, at(1)},
	} {
		t.Run(name, func(t *testing.T) {
			p, members, _ := poolOf(t, "a:1:1", "b:2:1")
			p.Watches = true
			tc.rests(t, members["a"], members["b"])
			pick := func() (*Ask, *Member) {
				r := (&asks{model: "m", cost: tc.cost, kind: streamed}).of(p.Pool)
				return r, p.Pool.Pick(r, tc.picks)
			}
			for range 3 {
				r, m := pick()
				if m != members["a"] {
					t.Fatalf("%v is picked, want a", m)
				}
				m.Unpick(r, tc.picks)
			}
			pick()
			if _, m := pick(); m == members["a"] {
				t.Error("two requests are sent ahead")
			}
			if n := members["a"].InFlight(); n != 1 {
				t.Errorf("a has %d requests, want 1", n)
			}
		})
	}
}

// TestAMoveThatIsUndoneKeepsNobodyAway as a pick.
func TestAMoveThatIsUndoneKeepsNobodyAway(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1")
	p.Watches = true
	r := (&asks{model: "m", kind: streamed, tried: []*Member{members["a"]}}).of(p.Pool)
	members["b"].CoolDown(throttle(10, 1), start)
	move := func() *Member { return p.PickAnswering(r, time.Second, at(10)) }
	for range 3 {
		if m := move(); m != members["b"] {
			t.Fatalf("it moves to %v, want b", m)
		}
		members["b"].Unpick(r, at(10))
	}
	move()
	if m := move(); m != nil {
		t.Errorf("two requests move to %s", m.Name)
	}
}
