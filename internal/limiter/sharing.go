package limiter

import (
	"math"
	"sync/atomic"
	"time"
)

// Sharing is how replicas share the limits.
type Sharing struct {
	// Replicas is how many there are, this one included. 0 or 1: there is only
	// this one.
	Replicas int
	// Apart reports whether this one does not hear the others.
	Apart bool
	// ByUse reports whether a replica that is apart may use the part that it
	// used before, if that is more than an equal one. Otherwise it may use an
	// equal one only, so that all together never exceed a limit.
	ByUse bool
	// Delay is how long a report of this one has been heard when all that the
	// others used before it is known, too.
	Delay time.Duration
}

// reports are those of the callers of a pool.
type reports struct {
	// writer is this replica's id.
	writer string
	// heard is the version of the latest one that came back from the store: so
	// the others have got it, and what they sent before it has come here.
	heard atomic.Uint64
	// urgent is given when a caller has used an eighth of its part since its
	// last report.
	urgent atomic.Pointer[chan<- struct{}]
	// resets gets the names of callers to which another replica has given their
	// use back.
	resets atomic.Pointer[func(name string)]
}

func (r *reports) hurry() {
	urgent := r.urgent.Load()
	if urgent == nil {
		return
	}
	select {
	case *urgent <- struct{}{}:
	default:
	}
}

// OnUrgent has a channel get something when others should know at once what is
// used. It should have a buffer.
func (cs *Callers) OnUrgent(urgent chan<- struct{}) { cs.reports.urgent.Store(&urgent) }

// Confirm records that the report of a version came back, with all before it.
// It must not be called while reports of others may be missing.
func (cs *Callers) Confirm(version uint64) {
	if version > cs.reports.heard.Load() {
		cs.reports.heard.Store(version)
	}
}

// latest is a report that is not known to have arrived. Version 0: there is
// none. It has the requests up to a number.
type latest struct {
	version, number uint64
	at              int64
}

// Told records that the others know all that Restore has added.
func (cs *Callers) Told() {
	if !cs.restored.Swap(false) {
		return
	}
	cs.mu.RLock()
	defer cs.mu.RUnlock()
	for _, c := range cs.byID {
		c.mu.Lock()
		for i := range c.counters {
			m := &c.counters[i]
			for f := range m.figures {
				m.figures[f].untold = 0
			}
			m.untold = sums{}
		}
		c.mu.Unlock()
	}
}

// Restored reports whether Restore has added something that the others may not
// know.
func (cs *Callers) Restored() bool { return cs.restored.Load() }

// Changes returns a number that is another one when what is used has changed,
// and whether a limit is more than half used, so that other replicas should
// know soon.
func (c *Caller) Changes() (changes uint64, hurry bool) {
	changes = c.changes.Load()
	return changes, changes != 0 && c.hurry.Load()
}

// Report appends this replica's own use to entries, for a report of this
// version that is sent now: of each limit the current window, and the one
// before, which a request that ends late can still change.
func (c *Caller) Report(now time.Time, version uint64, entries []Entry) []Entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.arrived(at)
	if c.latest.version == 0 {
		c.latest = latest{version, c.admitted, at}
		for _, m := range c.all() {
			m.sent.copy(&m.own)
		}
	}
	return c.usage(entries)
}

// Unreported records that reports may not have been sent.
func (c *Caller) Unreported() {
	c.mu.Lock()
	c.latest = latest{}
	c.mu.Unlock()
}

// confirm records that the others know the latest report, if they do. What was
// used since is said once more: a later report may have said it, but was not
// waited for.
func (c *Caller) confirm(at int64) {
	if c.arrived(at) {
		c.changes.Add(1)
		if c.claims {
			c.reports.hurry()
		}
	}
}

// arrived is confirm without saying anything again. more reports whether more
// was used since that report.
func (c *Caller) arrived(at int64) (more bool) {
	l := c.latest
	if l.version == 0 || c.reports.heard.Load() < l.version || at-l.at < int64(c.sharing.Delay) {
		return false
	}
	c.latest, c.known = latest{}, l.number
	for _, m := range c.all() {
		m.told.copy(&m.sent)
		more = more || m.own.used != m.sent.used
	}
	return more
}

func (s *sums) copy(from *sums) {
	s.used = from.used
	switch {
	case from.parts == nil:
		s.parts = nil
	case s.parts == nil:
		parts := *from.parts
		s.parts = &parts
	default:
		*s.parts = *from.parts
	}
}

// unheard returns how much this replica, or a process before it, has used that
// the others do not know.
func (m *counter) unheard(now int64, sharing Sharing) int64 {
	used := m.own.used[1] - m.told.used[1] + m.untold.used[1]
	if m.own.parts != nil {
		oldest, later := m.own.from(m.oldest(now))
		toldOldest, toldLater := m.told.from(m.oldest(now))
		untoldOldest, untoldLater := m.untold.from(m.oldest(now))
		oldest, later = oldest-toldOldest+untoldOldest, later-toldLater+untoldLater
		used += m.covered(now, oldest, m.portion(m.limit.Amount, sharing)) + later
	}
	return max(0, used)
}

// portion returns how much of an amount that nobody has used belongs to this
// replica: one of as many equal parts as there are replicas. While it does not
// hear the others, it may be the part that it used before (see measure).
func (m *counter) portion(amount int64, sharing Sharing) int64 {
	equal := amount / int64(max(1, sharing.Replicas))
	if !sharing.Apart || !sharing.ByUse {
		return equal
	}
	return max(equal, int64(float64(amount)*m.usualPart))
}

// whole returns the smallest amount of which this replica's portion is so
// much.
func (m *counter) whole(portion int64, sharing Sharing) int64 {
	equal := multiply(portion, sharing.Replicas)
	if !sharing.Apart || !sharing.ByUse || m.usualPart == 0 {
		return equal
	}
	return int64(min(float64(equal), math.Ceil(float64(portion)/m.usualPart)))
}

// measure records which part of the use of all replicas was this one's, now
// that it does not hear the others any more. So a region that had almost all
// users can still serve them, also if it has only one of many replicas. Each of
// the others measures the same figures, so these parts are a whole limit
// together. With those that get an equal part instead because they used less,
// N replicas get at most 2 - 1/N of it.
func (m *counter) measure(now int64) {
	m.usualPart = 0
	own := m.spentOf(&m.told, now)
	if all := add(own, m.spentOf(&m.others, now)); all > 0 {
		m.usualPart = float64(own) / float64(all)
	}
}

// spentOf returns how much of some use is in the window that ends now.
func (m *counter) spentOf(s *sums, now int64) int64 {
	if s.parts == nil {
		return s.used[1]
	}
	oldest, later := s.from(m.oldest(now))
	return add(s.used[1], add(m.covered(now, oldest, m.limit.Amount), later))
}

// mostOfOthers returns how much of a limit the others can have used in a
// window while they were not heard: equal parts, but one of them its usual
// part if that is larger.
func (m *counter) mostOfOthers(sharing Sharing) int64 {
	equal := m.limit.Amount / int64(max(1, sharing.Replicas))
	if !sharing.ByUse {
		return m.limit.Amount - equal
	}
	return max(equal, m.limit.Amount-m.portion(m.limit.Amount, sharing)) + equal*int64(max(0, sharing.Replicas-2))
}

// share returns how much may be used, as far as this replica knows: what the
// others know to be used, and this one's part of the rest.
func (m *counter) share(used, unheard int64, sharing Sharing) int64 {
	known := max(0, used-unheard)
	return known + m.portion(max(0, m.limit.Amount-known), sharing)
}

// partOf returns this replica's part of what is left, as far as the others
// know.
func (m *counter) partOf(used, at int64, sharing Sharing) int64 {
	unheard := m.unheard(at, sharing)
	return m.share(used, unheard, sharing) - max(0, used-unheard)
}

// allowed returns how much this replica may use now of what is used.
func (c *Caller) allowed(m *counter, at, used int64) int64 {
	if c.sharing.Replicas <= 1 {
		return m.limit.Amount
	}
	return m.share(used, m.unheard(at, c.sharing), c.sharing)
}

// shown returns how much of a limit this replica may use: all of it, or its
// share while it does not hear the others.
func (c *Caller) shown(m *counter, at, used int64) int64 {
	if !c.sharing.Apart {
		return m.limit.Amount
	}
	return c.allowed(m, at, used)
}

// urgentPart is which part of what a replica may use should be known soon: the
// rest is lost if it is killed.
const urgentPart = 8

// tell records that the use of limits has changed, and hurries the next report
// if others should know.
func (c *Caller) tell(at int64) {
	c.changes.Add(1)
	if c.sharing.Replicas <= 1 {
		return
	}
	hurry := false
	for _, m := range c.all() {
		if m.limit.Amount == 0 {
			continue
		}
		used, unheard := m.use(at), m.unheard(at, c.sharing)
		hurry = hurry || used > m.limit.Amount/2
		if unheard > m.partOf(used, at, c.sharing)/urgentPart {
			c.reports.hurry()
		}
	}
	c.hurry.Store(hurry)
}
