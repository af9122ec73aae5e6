package benches

import (
	"cmp"
	"slices"
	"time"
)

// Set has the benches of one model, or of a whole backend.
type Set struct {
	Throttle Slot
	Failure  Slot
	Rests    Rests
	// failures are those that count towards a bench.
	failures []time.Time
}

// Slot returns the slot for throttles, or for failures.
func (b *Set) Slot(throttle bool) *Slot {
	if throttle {
		return &b.Throttle
	}
	return &b.Failure
}

// IsEmpty reports whether there is no bench at all, not even one that ended.
func (b *Set) IsEmpty() bool { return b.Throttle.Load() == nil && b.Failure.Load() == nil }

// Standing returns what the benches mean for a request of this cost.
func (b *Set) Standing(cost int64, now time.Time) Standing {
	return max(b.Throttle.Standing(cost, now, Throttled), b.Failure.Standing(cost, now, Suspected))
}

// Returns returns when the benches end.
func (b *Set) Returns(now time.Time) time.Time {
	return Later(b.Throttle.Until(now), b.Failure.Until(now))
}

// CompareEnds compares when the throttles end, and then when the failures do.
func (b *Set) CompareEnds(other *Set, now time.Time) int {
	return cmp.Or(b.Throttle.Until(now).Compare(other.Throttle.Until(now)),
		b.Failure.Until(now).Compare(other.Failure.Until(now)))
}

// End ends the benches, which may be nil, and forgets the failures that count
// towards one. The caller holds the lock.
func (b *Set) End() (throttle, failure *Entry) {
	b.failures = nil
	return b.Throttle.Swap(nil), b.Failure.Swap(nil)
}

// CountFailure counts a failure and reports whether the limit is reached within
// the duration. The caller holds the lock.
func (b *Set) CountFailure(now time.Time, limit int, duration time.Duration) bool {
	recent := slices.DeleteFunc(b.failures, func(at time.Time) bool { return now.Sub(at) >= duration })
	if len(recent)+1 < limit {
		b.failures = append(recent, now)
		return false
	}
	b.failures = nil
	return true
}

// Later returns the later of two times.
func Later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
