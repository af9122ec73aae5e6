package pool

import "time"

// benchSet has the benches of one model, or of a whole backend.
type benchSet struct {
	throttle slot
	failure  slot
	rests    rests
}

func (b *benchSet) slot(throttle bool) *slot {
	if throttle {
		return &b.throttle
	}
	return &b.failure
}

func (b *benchSet) returns(now time.Time) time.Time {
	return later(b.throttle.until(now), b.failure.until(now))
}

// end ends the benches, which may be nil. The caller holds the lock.
func (b *benchSet) end() (throttle, failure *benchEntry) {
	return b.throttle.Swap(nil), b.failure.Swap(nil)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
