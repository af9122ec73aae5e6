package pool

import "time"

// cooldownSet holds the cooldowns of one scope, or of a whole backend.
type cooldownSet struct {
	throttle slot
	failure  slot
	rests    rests
}

func (c *cooldownSet) slot(throttle bool) *slot {
	if throttle {
		return &c.throttle
	}
	return &c.failure
}

func (c *cooldownSet) returns(now time.Time) time.Time {
	return later(c.throttle.until(now), c.failure.until(now))
}

// end removes the cooldowns and returns them. Each may be nil. The caller holds
// the lock.
func (c *cooldownSet) end() (throttle, failure *cooldownEntry) {
	return c.throttle.Swap(nil), c.failure.Swap(nil)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
