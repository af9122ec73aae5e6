package limiter

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Callers by tokens of an identity provider come and go. A caller is forgotten
// when it was not seen for a day, has nothing in flight, and nothing counts in
// any of its windows, here or elsewhere. As the tokens of a month always count,
// these are as many callers as have used something in a month, or came in a
// day.
//
// There are at most maxCallers. Of more, those are forgotten that were not seen
// for the longest time and have nothing in flight, although what they have used
// counts. Evicted says how many.
//
// Only a new caller makes others be forgotten, at most once an hour: without
// new ones, memory does not grow.
const (
	unseen = 24 * time.Hour
	sweeps = time.Hour
	// evictedShare is which part of maxCallers is evicted at a time, so that
	// few new callers have others sorted.
	evictedShare = 16
)

// see records that the caller was asked for. The time is exact to a minute, so
// that few requests write it.
func (c *Caller) see(now time.Time) {
	if at := now.UnixNano(); at-c.seen.Load() > int64(time.Minute) {
		c.seen.Store(at)
	}
}

// Number returns the caller's place in the order of first requests, from 1.
func (c *Caller) Number() int { return c.number }

// Forgotten reports whether the caller was forgotten. It does not come back:
// another one has its name then.
func (c *Caller) Forgotten() bool { return c.forgotten.Load() }

// forget forgets callers. The lock of cs is held, so that no request gets one
// of them meanwhile.
func (cs *Callers) forget(now time.Time) {
	if since := now.Sub(cs.swept); since >= 0 && since < sweeps {
		return
	}
	cs.swept = now
	for _, c := range cs.byID {
		if now.UnixNano()-c.seen.Load() > int64(unseen) && c.idle(now) {
			cs.remove(c)
		}
	}
	cs.inOrder = slices.DeleteFunc(cs.inOrder, (*Caller).Forgotten)
}

// evict makes room for a caller, if there are too many: those go first that
// only other replicas have named, and then those that were not seen for the
// longest time. The lock of cs is held.
func (cs *Callers) evict() {
	if len(cs.byID) < cs.most {
		return
	}
	evicted := 0
	defer func() { cs.inOrder = slices.DeleteFunc(cs.inOrder, (*Caller).Forgotten) }()
	all := slices.SortedFunc(maps.Values(cs.byID), func(a, b *Caller) int {
		return cmp.Or(min(a.number, 1)-min(b.number, 1), cmp.Compare(a.seen.Load(), b.seen.Load()))
	})
	for _, c := range all {
		if evicted == cs.most/evictedShare {
			return
		}
		c.mu.Lock()
		isBusy := c.inFlight > 0
		c.mu.Unlock()
		if !isBusy {
			cs.remove(c)
			evicted++
			cs.evicted.Add(1)
		}
	}
}

// Evicted returns how many callers were forgotten because there were too many.
func (cs *Callers) Evicted() int64 { return cs.evicted.Load() }

func (cs *Callers) remove(c *Caller) {
	c.forgotten.Store(true)
	delete(cs.byID, c.id)
	if cs.byName[c.name] == c {
		delete(cs.byName, c.name)
	}
}

// idle reports whether nothing of the caller counts. A reset counts as a
// charge.
func (c *Caller) idle(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.roll(now)
	for _, m := range c.all() {
		if m.wrote[1] || m.others.used[1] > 0 || !m.calendar() && (m.wrote[0] || m.others.used[0] > 0) {
			return false
		}
	}
	return c.inFlight == 0
}
