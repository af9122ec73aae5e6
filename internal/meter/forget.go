package meter

import (
	"slices"
	"time"
)

// Callers by tokens of an identity provider come and go. A caller is forgotten when it was not seen for a day, has nothing in
// flight, and nothing counts in any of its windows, here or elsewhere. As the tokens of a month always count, there are at most
// as many callers as have used something in a month, or came in a day.
//
// Only a new caller makes others be forgotten, at most once an hour: without new ones, memory does not grow.
const (
	unseen = 24 * time.Hour
	sweeps = time.Hour
)

// see records that the caller was asked for. The time is exact to a minute, so that few requests write it.
func (c *Caller) see(now time.Time) {
	if at := now.UnixNano(); at-c.seen.Load() > int64(time.Minute) {
		c.seen.Store(at)
	}
}

// Number returns the caller's place in the order of first requests, from 1.
func (c *Caller) Number() int { return c.number }

// Forgotten reports whether the caller was forgotten. It does not come back: another one has its name then.
func (c *Caller) Forgotten() bool { return c.forgotten.Load() }

// forget forgets callers. The lock of cs is held, so that no request gets one of them meanwhile.
func (cs *Callers) forget(now time.Time) {
	if since := now.Sub(cs.swept); since >= 0 && since < sweeps {
		return
	}
	cs.swept = now
	for id, c := range cs.byID {
		if now.UnixNano()-c.seen.Load() > int64(unseen) && c.idle(now) {
			c.forgotten.Store(true)
			delete(cs.byID, id)
			if cs.byName[c.name] == c {
				delete(cs.byName, c.name)
			}
		}
	}
	cs.inOrder = slices.DeleteFunc(cs.inOrder, (*Caller).Forgotten)
}

// idle reports whether nothing of the caller counts. A reset counts as a charge.
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
