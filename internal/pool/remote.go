package pool

import (
	"time"
)

// What other replicas report is applied as if it had happened here, but
// listeners get it as a remote event, so that no replica reports it back.

// Hear records a cooldown of another replica, which lasts for wait from now on.
func (m *Member) Hear(c Cooldown, wait time.Duration, now time.Time) {
	if m.find(c) != nil || wait <= 0 {
		return // it was heard before
	}
	if !c.Whole && !m.hasRoom(c.Scope(), now) {
		return
	}
	length := c.Until.Sub(c.Since)
	c.Heard, c.Until = true, now.Add(wait)
	c.Since = c.Until.Add(-max(length, wait))
	if !c.Whole {
		c.Model = ModelKey(c.Model)
	}
	m.put(c, now, true)
}

// HearDoubt records that a cooldown is in doubt.
func (m *Member) HearDoubt(c Cooldown) {
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	if known := m.find(c); known != nil {
		known.doubt.CompareAndSwap(noDoubt, inDoubt)
	}
}

// HearDisproved records that a cooldown was disproved. A cooldown that has
// grown here in the meantime stays.
func (m *Member) HearDisproved(c Cooldown) {
	m.health.mu.Lock()
	known := m.find(c)
	if known == nil || !m.health.known(c).slot(c.Throttle).CompareAndSwap(known, nil) {
		known = nil
	}
	m.health.mu.Unlock()
	m.tellDisproved(known, true, time.Now())
}

// HearProbe records that another replica sends the probe of a cooldown.
func (m *Member) HearProbe(c Cooldown, now time.Time) {
	if known := m.find(c); known != nil {
		known.probe.claim(known, now)
	}
}

// HearDrained records that an operator took the member out of use, or put it
// back.
func (m *Member) HearDrained(drained bool, o Order) {
	happening := Resumed
	if drained {
		happening = Drained
	}
	m.execute(happening, o, true)
}

// find returns the cooldown here that has the same ID, or nil.
func (m *Member) find(c Cooldown) *cooldownEntry {
	if known := m.health.known(c).slot(c.Throttle).Load(); known != nil && known.ID == c.ID {
		return known
	}
	return nil
}

// known returns the set to which c belongs, not to be written to.
func (h *Health) known(c Cooldown) *cooldownSet {
	if c.Whole {
		return &h.whole
	}
	return h.of(c.Scope())
}

// hasRoom reports whether a model is remembered, or can be: an active cooldown
// is forgotten only for one of a model that is worth more. Otherwise two
// cooldowns that are heard again and again would take the place of each other.
func (m *Member) hasRoom(its Scope, now time.Time) bool {
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	its.Model = ModelKey(its.Model)
	_, leaves := m.health.models.place(m, its, now)
	return leaves == nil || leaves.returns(now).IsZero() || m.Knows(its.Model) && !m.Knows(leaves.scope.Model)
}
