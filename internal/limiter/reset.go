package limiter

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// A reset clears a caller's use at all replicas. It is identified by its time,
// in microseconds since 1970, and the latest reset counts. Each entry names the
// latest reset that its writer knew. So an entry from before a reset changes
// nothing after it, however late it is heard or read, and each entry from after
// the reset announces it to other replicas. While a window that was charged
// before the reset counts, there is such an entry, because a reset counts as a
// charge of nothing.

// Anyone who can write to the store can make up a reset. It cannot be
// distinguished from one that was ordered at another replica, so each replica
// reports a reset from outside that clears use of its own.

// furthest is how far ahead of the local clock the time of a reset may be.
// Later resets are ignored.
const furthest = 24 * time.Hour

// resetReports is the shortest time between two reports of a caller's resets,
// in nanoseconds.
const resetReports = int64(time.Minute)

// OnReset sets a function that is called with the name of a caller when another
// replica has reset this caller.
func (cs *Limiters) OnReset(heard func(name string)) { cs.reports.resets.Store(&heard) }

// Reset clears a caller's use. It returns false if neither this replica nor any
// that it hears has had a request from the caller.
func (cs *Limiters) Reset(now time.Time, name string) (known bool) {
	cs.mu.RLock()
	known = cs.byID[ratelimit.IDOf(name)] != nil
	cs.mu.RUnlock()
	if known {
		cs.Get(now, name).Reset(now)
	}
	return known
}

// Reset clears the caller's use and estimates, also of single models. Requests
// in flight cost nothing.
func (c *Limiter) Reset(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.renew(at, max(at/int64(time.Microsecond), c.reset+1))
	for _, m := range c.models {
		m.Reset(now)
	}
	c.reports.hurry()
}

// counts reports whether an entry counts. If the entry names a later reset than
// the latest one, counts applies that reset first.
func (c *Limiter) counts(at int64, e Entry) bool {
	if !e.ID.Valid() || e.Used < 0 || e.Reset > (at+int64(furthest))/int64(time.Microsecond) {
		return false
	}
	c.renew(at, e.Reset)
	return e.Reset == c.reset
}

// hasOwn reports whether this replica has any use that counts.
func (c *Limiter) hasOwn() bool {
	for _, m := range c.all() {
		if m.local.used != [2]int64{} {
			return true
		}
	}
	return false
}

// resetReport returns the function that reports a reset, which must be called
// without the lock. It returns nil if a reset was reported shortly before: an
// order resets the caller and each of its models.
func (c *Limiter) resetReport(at int64) func(name string) {
	heard, last := c.reports.resets.Load(), c.resetReported.Load()
	if heard == nil || last != 0 && at-last < resetReports || !c.resetReported.CompareAndSwap(last, at) {
		return nil
	}
	return *heard
}

// renew applies a reset, unless it is older than the latest one.
func (c *Limiter) renew(at, reset int64) {
	if reset <= c.reset {
		return
	}
	c.reset, c.usual, c.latest = reset, newUsual, latest{}
	for id := range c.counters {
		m := &c.counters[id]
		*m = counter{limit: m.limit, window: m.window, first: m.first, then: m.then, refused: m.refused,
			demoted: m.demoted}
	}
	c.divide(at)
	for _, m := range c.all() {
		m.charged[1] = true
	}
	c.tell(at)
}
