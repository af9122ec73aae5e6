package pool

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
)

// silent makes the member silent for a model from now on.
func silent(t *testing.T, m *Member, model string, now time.Time) *pulse.Pulse {
	t.Helper()
	if m.Pulse(model, pulse.Streamed) != nil {
		t.Error("there is a pulse of a model that was never served")
	}
	m.Served(model, now)
	p := m.Pulse(model, pulse.Streamed)
	for range 20 {
		p.Sent(now.Add(-10 * time.Second))
		p.Heard(now.Add(-10*time.Second), now.Add(-9*time.Second), 4)
		p.Served(time.Second)
	}
	p.Sent(now.Add(-5 * time.Second))
	p.Sent(now.Add(-5 * time.Second))
	if f := p.Look(now.Add(-5*time.Second), now, 4); !f.Began {
		t.Fatalf("no silence: %+v", f)
	}
	return p
}

func TestASilentMemberIsASuspectForWhatItIsAskedInVain(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1")
	p.Silence = 4
	its := silent(t, members["a"], "m", at(0))
	pick := func(want string, r *asks, now time.Time) {
		t.Helper()
		m := p.Pick(r, now)
		if m == nil || m.Name != want {
			t.Errorf("at %s, %+v goes to %v, want %s", now.Sub(start), r, m, want)
		}
		if m != nil {
			m.Release()
		}
	}
	streams := asks{model: "m", kind: pulse.Streamed}
	pick("b", &streams, at(0.1))
	pick("a", &asks{model: "m", kind: pulse.Whole}, at(0.1))
	pick("a", &asks{model: "m"}, at(0.1))
	pick("a", &asks{model: "n", kind: pulse.Streamed}, at(0.1))
	pick("b", &asks{model: "m", kind: pulse.Streamed, once: true}, at(1.1)) // no trial
	pick("a", &streams, at(1.1))                                            // the trial
	pick("b", &streams, at(1.2))
	pick("a", &asks{model: "m", kind: pulse.Streamed, tried: []*Member{members["b"]}}, at(1.2)) // no other is left
	p.Silence = 0
	pick("a", &streams, at(1.2))
	p.Silence = 4
	its.Heard(at(1.1), at(1.3), 4)
	pick("a", &streams, at(1.3))
}

func TestANewIdentityHasNoSilence(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "b:2:1")
	p.Silence = 4
	members["a"].StartFresh("one")
	silent(t, members["a"], "m", at(0))
	members["a"].StartFresh("two")
	if m := p.Pick(&asks{model: "m", kind: pulse.Streamed}, at(0.1)); m != members["a"] {
		t.Errorf("the request goes to %s", m.Name)
	}
}

func TestARequestMovesOnlyWhereItMayGo(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "drained:1:1", "throttled:1:1", "full:1:1", "suspect:1:1", "late:2:1", "b:3:1")
	p.Silence = 4
	silent(t, members["a"], "m", at(0))
	members["drained"].Drain(Order{})
	members["throttled"].Bench(throttle(60, 1), at(0))
	members["full"].MaxRequests = 1
	p.Pick(&asks{model: "m", tried: []*Member{members["a"], members["suspect"], members["late"], members["b"]}}, at(0)) // takes its place
	members["suspect"].Bench(Refusal{Reason: Reason{Class: "failed"}, Model: "m", Wait: time.Minute}, at(0))
	members["late"].Served("m", at(0))
	late := members["late"].Pulse("m", pulse.Streamed)
	for range 20 {
		late.Sent(at(-1))
		late.Heard(at(-1), at(0), 4)
		late.Served(time.Second)
	}
	late.Sent(at(-20))
	late.Heard(at(-20), at(0), 4)
	r := asks{model: "m", kind: pulse.Streamed, tried: []*Member{members["a"]}}
	for _, want := range []string{"b", "drained", ""} {
		m, got := p.PickAnswering(&r, time.Second, at(0.1)), ""
		if m != nil {
			got = m.Name
			m.Release()
			r.tried = append(r.tried, m)
		}
		if got != want {
			t.Errorf("the request moves to %q, want %q", got, want)
		}
	}
}

func TestARequestMovesWhereTheLimitsHaveRoom(t *testing.T) {
	p, members, _ := poolOf(t, "a:1:1", "spent:2:1", "b:2:1", "far:3:1")
	p.Silence, p.Steers = 4, true
	silent(t, members["a"], "m", start)
	says(members["spent"], 5, 99, start)
	for _, name := range []string{"spent", "b", "far"} {
		its := members[name].health.pulses.Make("m", pulse.Streamed)
		its.Sent(at(0))
		its.Heard(at(0), at(0), 4)
	}
	r := asks{model: "m", cost: 100, kind: pulse.Streamed, tried: []*Member{members["a"]}}
	for _, want := range []string{"b", "spent", "far"} { // never the worse priority
		for range 20 {
			m := p.PickAnswering(&r, time.Second, at(0.1))
			if m == nil || m.Name != want {
				t.Fatalf("the request moves to %v, want %s", m, want)
			}
			m.Release()
		}
		r.tried = append(r.tried, members[want])
	}
}
