package limiter

import "time"

// A reset gives a caller its use back, at all replicas. It is known by its
// time, in microseconds since 1970, and the latest one counts. Each entry names
// the latest reset that its writer knew. So an entry from before a reset
// changes nothing after it, however late it is heard or read, and each entry
// from after it tells other replicas of the reset. As long as a window that was
// charged before counts, there is an entry: a reset counts as a charge of
// nothing.

//
// Whoever can write to the store can make up a reset. That cannot be told from
// one that was ordered at another replica, so each replica reports a reset that
// takes away what it knows itself to be used.

// furthest is how far ahead of ours a clock may be for its resets to be
// believed.
const furthest = 24 * time.Hour

// resetReports is the shortest time between two reports of resets of a caller,
// in nanoseconds.
const resetReports = int64(time.Minute)

// OnReset calls a function with the name of a caller when another replica has
// given it its use back.
func (cs *Callers) OnReset(heard func(name string)) { cs.reports.resets.Store(&heard) }

// Reset gives a caller its use back. It returns false if neither this replica
// nor another one that it hears has had a request of the caller's.
func (cs *Callers) Reset(now time.Time, name string) (known bool) {
	cs.mu.RLock()
	known = cs.byID[IDOf(name)] != nil
	cs.mu.RUnlock()
	if known {
		cs.Get(now, name).Reset(now)
	}
	return known
}

// Reset gives the caller its use back: its windows are empty, and its estimates
// begin anew. Requests that are in flight cost nothing.
func (c *Caller) Reset(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.renew(at, max(at/int64(time.Microsecond), c.reset+1))
	c.reports.hurry()
}

// counts applies the reset that an entry names, if it is a later one, and
// reports whether the entry counts.
func (c *Caller) counts(at int64, e Entry) bool {
	if !e.ID.Valid() || e.Used < 0 || e.Reset > (at+int64(furthest))/int64(time.Microsecond) {
		return false
	}
	c.renew(at, e.Reset)
	return e.Reset == c.reset
}

// hasOwn reports whether this replica has used anything that counts.
func (c *Caller) hasOwn() bool {
	for _, m := range c.all() {
		if m.own.used != [2]int64{} {
			return true
		}
	}
	return false
}

// resetReport returns the function that has to be called, without the lock,
// because a reset was heard. It is nil if the latest one was reported just
// before.
func (c *Caller) resetReport(at int64) func(name string) {
	heard := c.reports.resets.Load()
	if heard == nil || c.resetReported != 0 && at-c.resetReported < resetReports {
		return nil
	}
	c.resetReported = at
	return *heard
}

// renew applies a reset, unless a later one was applied.
func (c *Caller) renew(at, reset int64) {
	if reset <= c.reset {
		return
	}
	c.reset, c.usual, c.latest = reset, newUsual, latest{}
	for id := range c.counters {
		m := &c.counters[id]
		*m = counter{limit: m.limit, window: m.window, first: m.first, then: m.then, refused: m.refused, demoted: m.demoted}
	}
	c.divide(at)
	for _, m := range c.all() {
		m.wrote[1] = true
	}
	c.tell(at)
}
