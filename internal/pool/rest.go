package pool

import (
	"sync/atomic"
	"time"
)

// rests are those of a backend that throttles and asks to be called again at
// once. Hardly any means that. So if it refuses the next request as well, it
// rests twice as long as before, until a request is served.
type rests struct{ last atomic.Pointer[rest] }

type rest struct {
	since, until time.Time
	length       time.Duration
}

// restMemory is how long after the end of a rest, plus the length of the rest,
// a refusal counts as the next one.
const restMemory = time.Second

// next returns how long the backend rests after the refusal of a request that
// was sent at started: shortest, or up to longest if it repeats that. The
// caller holds the lock.
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

// served ends the counting, if the request was sent after the last refusal.
func (r *rests) served(started time.Time) {
	if last := r.last.Load(); last != nil && started.After(last.since) {
		r.last.CompareAndSwap(last, nil)
	}
}
