package pool

import "time"

// cooldownSet has the cooldowns of one model, or of a whole backend.
type cooldownSet struct {
	throttle slot
	failure  slot
	rests    rests
}

func (b *cooldownSet) slot(throttle bool) *slot {
	if throttle {
		return &b.throttle
	}
	return &b.failure
}

func (b *cooldownSet) returns(now time.Time) time.Time {
	return later(b.throttle.until(now), b.failure.until(now))
}

// end ends the cooldowns, which may be nil. The caller holds the lock.
func (b *cooldownSet) end() (throttle, failure *cooldownEntry) {
	return b.throttle.Swap(nil), b.failure.Swap(nil)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
