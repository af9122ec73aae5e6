package pool

import (
	"testing"
	"time"
)

func TestWhyARequestGetsNoMember(t *testing.T) {
	for name, c := range map[string]struct {
		does      func(a, b *Member, ask *Ask)
		throttled string
		want      Why
		all       bool
	}{
		"all throttle": {does: func(a, b *Member, _ *Ask) { a.CoolDown(throttle(9, 1), at(0)); b.CoolDown(throttle(9, 1), at(0)) },
			throttled: "a", want: Why{Takes: true}, all: true},
		"one throttles, and the other has failed": {does: func(a, b *Member, ask *Ask) { a.CoolDown(throttle(9, 1), at(0)); ask.At[b.Index].Tried = true },
			throttled: "a", want: Why{Takes: true, Others: true}},
		"one that refused it throttles, even if it may be tried again": {does: func(a, b *Member, ask *Ask) {
			ask.At[a.Index].Tried, ask.At[a.Index].Refused = true, true
			ask.At[b.Index].Tried, ask.At[b.Index].Bar = true, Spent
		}, throttled: "a", want: Why{Takes: true, Others: true}},
		"others wait for both":                       {does: func(_, _ *Member, ask *Ask) { ask.At[0].Bar, ask.At[1].Bar = Behind, Behind }, throttled: "a", want: Why{Takes: true}, all: true},
		"both are full":                              {does: func(a, b *Member, _ *Ask) { fill(a); fill(b) }, want: Why{Takes: true, Busy: true}, all: true},
		"a full one that it has tried is not busy":   {does: func(a, b *Member, ask *Ask) { fill(a); fill(b); ask.At[0].Tried = true }, want: Why{Takes: true, Busy: true, Others: true}},
		"one throttles, and the other is full":       {does: func(a, b *Member, _ *Ask) { a.CoolDown(throttle(9, 1), at(0)); fill(b) }, throttled: "a", want: Why{Takes: true, Busy: true}},
		"its object is at another account, which is": {does: func(a, b *Member, ask *Ask) { ask.At[0].Elsewhere = true; b.CoolDown(throttle(9, 1), at(0)) }, throttled: "b", want: Why{Takes: true, Elsewhere: true}, all: true},
		"none takes it":                              {does: func(_, _ *Member, ask *Ask) { ask.At[0].Takes, ask.At[1].Takes = false, false }},
		"only one of another account takes it":       {does: func(_, _ *Member, ask *Ask) { ask.At[0].Takes, ask.At[1].Elsewhere = false, true }, want: Why{Elsewhere: true}},
	} {
		t.Run(name, func(t *testing.T) {
			p, members, _ := poolOf(t, "a:1:1", "b:2:1")
			ask := (&asks{model: "m", cost: 1}).of(p.Pool)
			c.does(members["a"], members["b"], ask)
			got := p.Why(ask, at(1))
			if throttled := got.Throttled; (throttled == nil) != (c.throttled == "") || throttled != nil && throttled.Name != c.throttled {
				t.Errorf("%v throttles, want %q", throttled, c.throttled)
			}
			if got.All() != c.all {
				t.Errorf("all for the same reason: %t", got.All())
			}
			if got.Throttled = nil; got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

// fill lets the member take no more requests.
func fill(m *Member) {
	m.MaxRequests = 1
	m.place().reserve()
}

func TestARequestThatMovesMayGoToAMemberThatRefusedIt(t *testing.T) {
	p, members, _ := poolOf(t, "silent:1:1", "refused:1:1", "spent:1:1", "unfit:1:1")
	p.Watches = true
	silent(t, members["silent"], "m", at(0))
	ask := (&asks{model: "m", kind: streamed, tried: []*Member{members["silent"]}}).of(p.Pool)
	for name, bar := range map[string]Bar{"refused": Throttled, "spent": Spent, "unfit": Unfit} {
		ask.At[members[name].Index].Bar = bar
	}
	if moving := p.PickAnswering(ask, time.Second, at(0.1)); moving == nil || moving.To != members["refused"] {
		t.Errorf("it moves to %v", moving)
	}
	if m := p.Pool.Pick(ask, at(0.1)); m != nil {
		t.Errorf("without a move, it goes to %s", m.Name)
	}
}
