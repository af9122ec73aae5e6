package pool

import (
	"sync/atomic"
	"time"
)

// rests doubles the cooldowns of a backend that throttles and asks to be called
// again immediately. Backends hardly ever mean that. Each refusal of the next
// request doubles the length of the cooldown, until a request is served.
type rests struct{ last atomic.Pointer[rest] }

type rest struct {
	since, until time.Time
	length       time.Duration
}

// restMemory plus the length of the last rest is how long after that rest's end
// a refusal still doubles it.
const restMemory = time.Second

// next returns the length of the rest after the refusal of a request that was
// sent at started. The first rest is shortest, and repeated ones double up to
// longest. The caller holds the lock.
func (r *rests) next(shortest, longest time.Duration, started, now time.Time) time.Duration {
	length := shortest
	if last := r.last.Load(); last != nil {
		switch {
		case now.Before(last.until):
			return last.until.Sub(now) // a request of the same burst
		case started.Before(last.since):
			return length // one that was under way
		case now.Before(last.until.Add(last.length + restMemory)):
			length = max(length, min(2*last.length, longest))
		}
	}
	r.last.Store(&rest{now, now.Add(length), length})
	return length
}

// served ends the doubling if the served request was sent after the last
// refusal.
func (r *rests) served(started time.Time) {
	if last := r.last.Load(); last != nil && started.After(last.since) {
		r.last.CompareAndSwap(last, nil)
	}
}
