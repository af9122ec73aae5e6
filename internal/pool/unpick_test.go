package pool

import (
	"testing"
	"time"
)

// withQuotas has the request in a pool with quotas, which keep it away from no
// member.
func withQuotas(r *Ask) *Ask {
	r.Quotas = &Quotas{Over: make([]Over, len(r.At))}
	return r
}

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
				r := withQuotas((&asks{model: "m", cost: tc.cost, kind: streamed}).of(p.Pool))
				return r, p.Pool.Pick(r, tc.picks)
			}
			for range 3 {
				r, m := pick()
				if m != members["a"] {
					t.Fatalf("%v is picked, want a", m)
				}
				m.Unpick(r)
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
	move := func() *Moving { return p.PickAnswering(r, time.Second, at(10)) }
	for range 3 {
		moving := move()
		if moving == nil || moving.To != members["b"] {
			t.Fatalf("it moves to %v, want b", moving)
		}
		moving.Undo()
	}
	move()
	if moving := move(); moving != nil {
		t.Errorf("two requests move to %s", moving.To.Name)
	}
}

// TestAnUndoneLastResortIsNoTrialOfASilence picks a silent member as the last
// one that is left, and undoes that.
func TestAnUndoneLastResortIsNoTrialOfASilence(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1")
	p.Watches = true
	a := members["a"]
	silent(t, a, "m", start)
	r := withQuotas((&asks{model: "m", kind: streamed}).of(p.Pool))
	for _, second := range []float64{1, 3, 7, 15} {
		if m := p.Pool.Pick(r, at(second)); m != a {
			t.Fatalf("%v is picked", m)
		}
	}
	now := at(20)
	if rank := a.rank(r, now); rank != suspect {
		t.Fatalf("the rank is %d", rank)
	}
	p.Pool.Pick(r, now).Unpick(r)
	if rank := a.rank(r, now); rank != suspect {
		t.Errorf("the rank is %d, want %d: the next trial is due at 31 s", rank, suspect)
	}
}

// during calls a function at the end of a cooldown, once.
type during struct{ call func() }

func (d *during) Happened(e Event) {
	if d.call != nil && e.Happening == Ended {
		call := d.call
		d.call = nil
		call()
	}
}

// TestAPickThatLosesOneRightKeepsNone has another request take the probe of a
// failure just after this one got the right to try a silence.
func TestAPickThatLosesOneRightKeepsNone(t *testing.T) {
	heard := new(during)
	p, members := poolThatTells(t, []string{"a:1:1", "b:2:1"}, heard)
	p.Watches = true
	a := members["a"]
	silent(t, a, "m", start)
	whole := throttle(1, 1)
	whole.Whole, whole.Model = true, ""
	a.CoolDown(whole, start)
	fails := failure(2)
	fails.Whole, fails.Model = true, ""
	a.CoolDown(fails, start)
	// the probe of the throttle was sent, and not refused
	sent := a.health.whole.throttle.Load()
	sent.probe.Store(sent.trialAt(at(1)))
	now := at(3)
	other := (&asks{model: "n", kind: streamed, cost: 1}).of(p.Pool)
	heard.call = func() {
		if m := p.Pool.Pick(other, now.Add(-time.Millisecond)); m != a {
			t.Fatalf("the other one goes to %v", m)
		}
	}
	r := (&asks{model: "m", kind: streamed, cost: 1}).of(p.Pool)
	due := a.silence(r).Due(now)
	if m := p.Pool.Pick(r, now); m != members["b"] || !due {
		t.Fatalf("it goes to %v, due %t", m, due)
	}
	if !a.silence(r).Due(now) {
		t.Error("the request went to b, but others do not try a's silence")
	}
}

// TestAnUndoneLastResortIsNoProbe of a request that came at the same time as
// the probe, as on a system whose clock is coarse.
func TestAnUndoneLastResortIsNoProbe(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1")
	members["a"].CoolDown(failure(10), start)
	now := at(10)
	r := withQuotas((&asks{model: "m", kind: streamed, cost: 1}).of(p.Pool))
	p.Pool.Pick(r, now) // the probe
	if rank := members["a"].rank(r, now); rank != suspect {
		t.Fatalf("the rank is %d", rank)
	}
	p.Pool.Pick(r, now).Unpick(r) // as the last resort
	if rank := members["a"].rank(r, now); rank != suspect {
		t.Errorf("the rank is %d: there would be a second probe", rank)
	}
}

// TestAMoveThatLosesOneRightKeepsNone has another request take the probe of a
// failure just after this one got the right to find out whether b answers.
func TestAMoveThatLosesOneRightKeepsNone(t *testing.T) {
	heard := new(during)
	p, members := poolThatTells(t, []string{"a:1:1", "b:2:1"}, heard)
	p.Watches = true
	b := members["b"]
	whole := throttle(1, 1)
	whole.Whole, whole.Model = true, ""
	b.CoolDown(whole, start)
	fails := failure(2)
	fails.Whole, fails.Model = true, ""
	b.CoolDown(fails, start)
	// the probe of the throttle was sent, and not refused
	sent := b.health.whole.throttle.Load()
	sent.probe.Store(sent.trialAt(at(1)))
	now := at(3)
	other := (&asks{model: "n", kind: streamed, cost: 1, tried: []*Member{members["a"]}}).of(p.Pool)
	heard.call = func() {
		if m := p.Pool.Pick(other, now.Add(-time.Millisecond)); m != b {
			t.Fatalf("the other one goes to %v", m)
		}
	}
	r := (&asks{model: "m", kind: streamed, cost: 1, tried: []*Member{members["a"]}}).of(p.Pool)
	if moving := p.PickAnswering(r, time.Second, now); moving != nil {
		t.Fatalf("it moves to %s", moving.To.Name)
	}
	if heard.call != nil {
		t.Fatal("nothing came between")
	}
	if _, ok := b.health.latencies.Of(r.useAt(b)).Claim(now, time.Second); !ok {
		t.Error("the request did not move, but no other one may find out whether b answers")
	}
}
