package usagesync

import (
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// leastInterval is the shortest time between two urgent reports. It grows by
// perReplica with each replica, because all replicas hear each report.
const leastInterval, perReplica = 50 * time.Millisecond, 4 * time.Millisecond

// Contact says which replicas this one hears.
type Contact struct {
	// Replicas is the number of replicas that are heard, including this one.
	Replicas int
	// Whole reports whether all running replicas are heard.
	Whole bool
	// Cut reports whether replicas of this region are heard, but those of
	// another region are not.
	Cut bool
	// Running lists prefixes of the ids under which the replicas that are heard
	// report use.
	Running []string
	// Missing is the number of further replicas that were heard lately and have
	// not announced their end. Vanished lists them, once for each of their
	// pools.
	Missing  int
	Vanished []limiter.Vanished
}

// connection is the state of the connection to other replicas, as far as it
// affects limits.
type connection struct {
	// replicas is the number of replicas when this one was last connected.
	replicas int
	// lost is when the connection was lost, and back when it was restored. Both
	// are zero while this replica is connected.
	lost, back time.Time
	// apart reports whether this replica may use only its share. cut reports
	// whether it heard its own region when that began.
	apart, cut bool
	// vanished are the replicas whose parts of the limits are held back.
	vanished []limiter.Vanished
}

// miss returns the replicas that have vanished since the previous call.
func (c *connection) miss(contact Contact) (missed []limiter.Vanished) {
	for _, v := range contact.Vanished {
		if !slices.Contains(c.vanished, v) {
			missed = append(missed, v)
		}
	}
	c.vanished = contact.Vanished
	return missed
}

// interval returns the shortest time between two urgent reports. Replicas that
// report together must use the same interval, although one may count a replica
// more or less than another. So a long interval is rounded up to a multiple of
// leastInterval.
func (c *connection) interval() time.Duration {
	i := max(leastInterval, time.Duration(c.replicas)*perReplica)
	if together(i) {
		i = (i + leastInterval - 1).Truncate(leastInterval)
	}
	return i
}

// together reports whether replicas send their urgent reports at the same
// moments: when the store's clock shows a multiple of the interval. With many
// replicas, each of them hears each report. If a store gets many reports at the
// same time, it delivers them together, which takes a fraction of the processor
// time at the store and at the replicas.
func together(interval time.Duration) bool { return interval > 2*leastInterval }

// sharing returns how the limits are shared. Its Delay is two intervals:
// another replica's report may wait for one interval before it is sent, and may
// take as long as a report of this replica to arrive.
func (c *connection) sharing() limiter.Sharing {
	return limiter.Sharing{Replicas: c.replicas, Apart: c.apart, ByUse: c.cut, Delay: 2 * c.interval()}
}

// wait returns how long an urgent report must wait. It need not wait if the
// last one was sent at least an interval ago.
func (t *Syncer) wait(last time.Time, interval time.Duration) time.Duration {
	now := time.Now()
	left := interval - now.Sub(last)
	if left > 0 && together(interval) {
		return t.untilMoment(now, interval)
	}
	return left
}

// untilMoment returns the time until the next moment at which all replicas
// report.
func (t *Syncer) untilMoment(now time.Time, interval time.Duration) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return UntilMoment(now.Add(t.read), interval)
}

// UntilMoment returns the time until a clock that shows at shows a multiple of
// every.
func UntilMoment(at time.Time, every time.Duration) time.Duration {
	return at.Truncate(every).Add(every).Sub(at)
}
