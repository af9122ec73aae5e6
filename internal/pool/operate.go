package pool

import (
	"slices"
	"time"
)

// Drained reports whether the member is used only when no other is left: its
// weight is 0, or an operator took it out of use.
func (m *Member) Drained() bool { return m.Weight == 0 || m.TakenOut() }

// Drain takes the member out of use, and others of its name, until Resume. That
// outlives the pool.
func (m *Member) Drain() { m.setDrained(true, false) }

// Resume puts a member back into use that Drain took out. A weight of 0 stays.
func (m *Member) Resume() { m.setDrained(false, false) }

// TakenOut reports whether an operator took the member out of use.
func (m *Member) TakenOut() bool { return m.shared.drained.Load() }

// setDrained tells of an order that was given here also if it changes nothing: for
// another replica, it may.
func (m *Member) setDrained(drained, elsewhere bool) {
	if !m.shared.drained.CompareAndSwap(!drained, drained) && elsewhere {
		return
	}
	happening := Resumed
	if drained {
		happening = Drained
	}
	m.tell(Event{Happening: happening, Elsewhere: elsewhere})
}

// Reset ends all benches of the member, and forgets the failures that count
// towards one.
func (m *Member) Reset() {
	m.health.mu.Lock()
	over := m.health.endAll()
	m.health.mu.Unlock()
	for _, b := range over {
		m.tellDisproved(b, false)
	}
}

// State is what operators see of a member.
type State struct {
	Member   *Member
	Drained  bool
	InFlight int64
	// Healthy tells that the member passes active health checks.
	Healthy bool
	// Benches are those in force.
	Benches []Bench
	// Probing tells that the time of a bench has passed, and that it is not
	// known yet whether the member is back: after a failure until a request was
	// served, after a throttle while its probe may still be refused. A member
	// that is lost is probed until it was reached.
	Probing bool
	// Last is the latest refusal for which the member was benched, and for how
	// long it was meant. It is nil if there was none.
	Last *Bench
}

// Snapshot tells the state of every member, in the order of their priorities.
func (p *Pool) Snapshot(now time.Time) []State {
	states := make([]State, len(p.Members))
	for i, m := range p.Members {
		states[i] = State{Member: m, Drained: m.Drained(), InFlight: m.InFlight(), Healthy: m.healthy(), Probing: m.Lost(), Last: m.health.last.Load()}
		for _, b := range m.health.benches() {
			if b.inForce(now) {
				bench := b.Bench
				if b.Lost { // an attempt to reach it may be under way
					bench.Until = later(b.Until, now.Add(firstPause))
				}
				bench.InDoubt = b.doubt.Load() == inDoubt
				states[i].Benches = append(states[i].Benches, bench)
			} else if !b.Throttle || b.probe.pending(b, now) {
				states[i].Probing = true
			}
		}
	}
	return states
}

// Benched reports whether a bench is in force.
func (h *Health) Benched(now time.Time) bool {
	return slices.ContainsFunc(h.benches(), func(b *bench) bool { return b.inForce(now) })
}

// all returns the benches of the whole backend, and those of each model.
func (h *Health) all() []*benches {
	all := []*benches{&h.whole}
	if models := h.models.Load(); models != nil {
		for _, b := range *models {
			all = append(all, b)
		}
	}
	return all
}

// benches returns those that there are, in force or due.
func (h *Health) benches() (there []*bench) {
	if b := h.lost.Load(); b != nil {
		there = append(there, b)
	}
	for _, benches := range h.all() {
		for _, s := range []*slot{&benches.throttle, &benches.failure} {
			if b := s.Load(); b != nil {
				there = append(there, b)
			}
		}
	}
	return there
}
