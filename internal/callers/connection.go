package callers

import (
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// leastInterval is the shortest time between two urgent reports, and perReplica
// how much of it there is for each replica: all of them hear each report.
const leastInterval, perReplica = 50 * time.Millisecond, 4 * time.Millisecond

// Contact says which of the replicas this one hears.
type Contact struct {
	// Replicas is how many are heard, this one included.
	Replicas int
	// Whole reports whether all that run are heard.
	Whole bool
	// Cut reports whether replicas of this region are heard and those of
	// another one are not.
	Cut bool
	// Missing is how many more were heard lately, and have not said that they
	// stop. Vanished has them once for each of their pools.
	Missing  int
	Vanished []limiter.Vanished
}

// connection is what limits have to do with being connected.
type connection struct {
	// replicas is how many there were when this one was last connected.
	replicas int
	// lost is when the connection ended, and back when there was one again.
	// They are zero otherwise.
	lost, back time.Time
	// apart reports whether this replica has only its share, and cut whether
	// it heard its own region when that began.
	apart, cut bool
	// vanished are those whose parts of the limits were held back.
	vanished []limiter.Vanished
}

// miss returns the replicas that have vanished since it was called before.
func (c *connection) miss(contact Contact) (missed []limiter.Vanished) {
	for _, v := range contact.Vanished {
		if !slices.Contains(c.vanished, v) {
			missed = append(missed, v)
		}
	}
	c.vanished = contact.Vanished
	return missed
}

// interval returns how long an urgent report waits after the one before. If
// replicas report together, all of them need the same one, although they may
// count one replica more or less.
func (c *connection) interval() time.Duration {
	i := max(leastInterval, time.Duration(c.replicas)*perReplica)
	if together(i) {
		i = (i + leastInterval - 1).Truncate(leastInterval)
	}
	return i
}

// together reports whether all replicas that have something to report at each
// interval do so at the same moments: when the store's clock shows a multiple
// of the interval. Each of many replicas hears each report, and a store that
// gets many at a time delivers them at a time, which takes it, and those that
// hear them, a fraction of the processor.
func together(interval time.Duration) bool { return interval > 2*leastInterval }

// sharing is how the limits are shared. A report of another replica may wait as
// long as one of this replica before it is sent, and then takes as long.
func (c *connection) sharing() limiter.Sharing {
	return limiter.Sharing{Replicas: c.replicas, Apart: c.apart, ByUse: c.cut, Delay: 2 * c.interval()}
}

// wait returns how long an urgent report waits. After an interval without one,
// it does not.
func (t *Tally) wait(last time.Time, interval time.Duration) time.Duration {
	now := time.Now()
	left := interval - now.Sub(last)
	if left > 0 && together(interval) {
		return t.untilMoment(now, interval)
	}
	return left
}

// untilMoment returns how long it takes until all replicas report.
func (t *Tally) untilMoment(now time.Time, interval time.Duration) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return UntilMoment(now.Add(t.read), interval)
}

// UntilMoment returns how long it takes until a clock shows a multiple of a
// duration.
func UntilMoment(at time.Time, every time.Duration) time.Duration {
	return at.Truncate(every).Add(every).Sub(at)
}
