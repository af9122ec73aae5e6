package limiter

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Callers that are identified by tokens of an identity provider come and go. A
// caller is forgotten if it was not seen for a day, has nothing in flight, and
// has no use in any current window, here or at other replicas. Its tokens are
// counted by the month, so the memory holds all callers of the last day and
// those that used tokens in this month.
//
// There are at most maxCallers. Beyond that, the callers without requests in
// flight that were not seen for the longest time are forgotten, although their
// use still counts. Evicted counts them.
//
// Callers are forgotten only when a new caller arrives, and idle ones at most
// once an hour: without new callers, memory does not grow.
const (
	unseen = 24 * time.Hour
	sweeps = time.Hour
	// evictedShare is the divisor for the fraction of maxCallers that is
	// evicted together, so that callers are rarely sorted.
	evictedShare = 16
)

// see records that the caller was requested. The time is exact to a minute, so
// that few requests write it.
func (c *Limiter) see(now time.Time) {
	if at := now.UnixNano(); at-c.seen.Load() > int64(time.Minute) {
		c.seen.Store(at)
	}
}

// Number returns the caller's place in the order of first requests, from 1.
func (c *Limiter) Number() int { return c.number }

// Forgotten reports whether the caller was forgotten. A forgotten caller is not
// used again: its next request gets another Limiter with the same name.
func (c *Limiter) Forgotten() bool { return c.forgotten.Load() }

// forget removes idle callers. cs.mu must be held, so that no request gets one
// of them in the meantime.
func (cs *Limiters) forget(now time.Time) {
	if since := now.Sub(cs.swept); since >= 0 && since < sweeps {
		return
	}
	cs.swept = now
	for _, c := range cs.byID {
		if !c.isModel && now.UnixNano()-c.seen.Load() > int64(unseen) && c.idle(now) {
			cs.remove(c)
		}
	}
	cs.inOrder = slices.DeleteFunc(cs.inOrder, (*Limiter).Forgotten)
}

// evict makes room for a caller if there are too many: first it removes callers
// that only other replicas have reported, then those that were not seen for the
// longest time. cs.mu must be held.
func (cs *Limiters) evict() {
	if len(cs.byID) < cs.most {
		return
	}
	evicted := 0
	defer func() { cs.inOrder = slices.DeleteFunc(cs.inOrder, (*Limiter).Forgotten) }()
	all := slices.SortedFunc(maps.Values(cs.byID), func(a, b *Limiter) int {
		return cmp.Or(min(a.number, 1)-min(b.number, 1), cmp.Compare(a.seen.Load(), b.seen.Load()))
	})
	for _, c := range all {
		if evicted == cs.most/evictedShare {
			return
		}
		c.mu.Lock()
		stays := c.inFlight > 0 || c.isModel
		c.mu.Unlock()
		if !stays {
			cs.remove(c)
			evicted++
			cs.evicted.Add(1)
		}
	}
}

// Evicted returns how many callers were forgotten because there were too many.
func (cs *Limiters) Evicted() int64 { return cs.evicted.Load() }

func (cs *Limiters) remove(c *Limiter) {
	for _, m := range c.models {
		cs.remove(m)
	}
	c.forgotten.Store(true)
	delete(cs.byID, c.id)
	if cs.byName[c.name] == c {
		delete(cs.byName, c.name)
	}
}

// idle reports whether the caller has no use that counts. A reset counts as a
// charge. All use of its models is use of the caller, too.
func (c *Limiter) idle(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.roll(now)
	for _, m := range c.all() {
		if m.charged[1] || m.others.used[1] > 0 || !m.calendar() && (m.charged[0] || m.others.used[0] > 0) {
			return false
		}
	}
	return c.inFlight == 0
}
