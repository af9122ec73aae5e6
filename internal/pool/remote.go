package pool

import (
	"time"
)

// Reports of other replicas are applied as if the events had happened here.
// Listeners get them as remote events, so that no replica reports an event
// back.

// Hear records a cooldown that another replica reports and that lasts for wait
// from now on.
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

// HearDoubt records that another replica put a cooldown in doubt.
func (m *Member) HearDoubt(c Cooldown) {
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	if known := m.find(c); known != nil {
		known.doubt.CompareAndSwap(noDoubt, inDoubt)
	}
}

// HearDisproved records that another replica disproved a cooldown. If the
// cooldown was extended here in the meantime, it stays.
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
		known.probe.CompareAndSwap(0, known.trialAt(now))
	}
}

// HearDrained records that an operator drained or resumed the member at another
// replica.
func (m *Member) HearDrained(drained bool, o Order) {
	happening := Resumed
	if drained {
		happening = Drained
	}
	m.execute(happening, o, true)
}

// find returns the local cooldown with the same ID, or nil.
func (m *Member) find(c Cooldown) *cooldownEntry {
	if known := m.health.known(c).slot(c.Throttle).Load(); known != nil && known.ID == c.ID {
		return known
	}
	return nil
}

// known returns the set of cooldowns to which c belongs, for reading. It is
// empty if there are none.
func (h *Health) known(c Cooldown) *cooldownSet {
	if c.Whole {
		return &h.whole
	}
	scope := c.Scope()
	scope.Model = ModelKey(scope.Model)
	if known := h.models.find(scope); known != nil {
		return known
	}
	return new(cooldownSet)
}

// hasRoom reports whether a cooldown of the scope can be stored. It may replace
// an active cooldown only if its model is known and the model of that cooldown
// is not. Otherwise two cooldowns that are reported again and again would keep
// replacing each other.
func (m *Member) hasRoom(scope Scope, now time.Time) bool {
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	scope.Model = ModelKey(scope.Model)
	_, replaced := m.health.models.place(m, scope, now)
	return replaced == nil || replaced.returns(now).IsZero() || m.Knows(scope.Model) && !m.Knows(replaced.scope.Model)
}
