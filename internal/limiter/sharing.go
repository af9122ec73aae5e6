package limiter

import (
	"math"
	"sync/atomic"
	"time"
)

// Sharing describes how replicas share the limits.
type Sharing struct {
	// Replicas is the number of replicas, including this one. 0 counts as 1.
	Replicas int
	// Apart reports whether this replica does not hear the other ones.
	Apart bool
	// ByUse reports whether a replica that is apart may use the fraction of the
	// limit that it used before, if that is more than an equal part. Then N
	// replicas together may use up to 2 - 1/N times a limit. If ByUse is false,
	// a replica that is apart may use only an equal part, so that all replicas
	// together never exceed a limit.
	ByUse bool
	// Delay is the time after a report of this replica until all use of the
	// other replicas before that report is known here.
	Delay time.Duration
}

// reports is the state of reporting to other replicas, for all callers of a
// pool.
type reports struct {
	// writer is the id of this replica.
	writer string
	// heard is the version of this replica's latest report that came back from
	// the store. The other replicas have received that report, and what they
	// sent before it has arrived here.
	heard atomic.Uint64
	// urgent receives a value when a caller has used an eighth of this
	// replica's part since the last report.
	urgent atomic.Pointer[chan<- struct{}]
	// running is nil until it is known which replicas run.
	running atomic.Pointer[running]
	// resets is called with the name of a caller that another replica has
	// reset.
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

// OnUrgent sets a channel that receives a value when the use should be reported
// immediately. The channel should have a buffer.
func (cs *Limiters) OnUrgent(urgent chan<- struct{}) { cs.reports.urgent.Store(&urgent) }

// Confirm records that the report of a version, and all before it, came back
// from the store. It must not be called while reports of other replicas may be
// missing.
func (cs *Limiters) Confirm(version uint64) {
	if version > cs.reports.heard.Load() {
		cs.reports.heard.Store(version)
	}
}

// latest is the latest report that is not yet confirmed. It contains the
// requests up to number. Its version is 0 if there is no such report.
type latest struct {
	version, number uint64
	at              int64
}

// Told records that the other replicas know all that Restore has added.
func (cs *Limiters) Told() {
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

// Restored reports whether Restore has added use that the other replicas may
// not know.
func (cs *Limiters) Restored() bool { return cs.restored.Load() }

// Changes returns a counter of changes of the use. hurry reports whether a
// limit is more than half used, so that other replicas should know changes
// soon.
func (c *Limiter) Changes() (changes uint64, hurry bool) {
	changes = c.changes.Load()
	return changes, changes != 0 && c.hurry.Load()
}

// Report appends this replica's own use to entries, for a report with this
// version that is sent now. For each limit, it appends the current window and
// the previous one, which a request that ends late can still change.
func (c *Limiter) Report(now time.Time, version uint64, entries []Entry) []Entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.arrived(at)
	if c.latest.version == 0 {
		c.latest = latest{version, c.admitted, at}
		for _, m := range c.all() {
			m.sent.copy(&m.local)
		}
		c.concurrent.sent = -1
	}
	return c.usage(entries)
}

// Unreported records that the latest report may not have been sent.
func (c *Limiter) Unreported() {
	c.mu.Lock()
	c.latest = latest{}
	c.mu.Unlock()
}

// confirm records that the other replicas know the latest report, if it has
// arrived. If there was further use since, confirm requests another report,
// because one that was sent in the meantime was not waited for.
func (c *Limiter) confirm(at int64) {
	if c.arrived(at) {
		c.changes.Add(1)
		if c.claims {
			c.reports.hurry()
		}
	}
}

// arrived records that the other replicas know the latest report, if it has
// arrived. more reports whether there was further use since that report.
func (c *Limiter) arrived(at int64) (more bool) {
	l := c.latest
	if l.version == 0 || c.reports.heard.Load() < l.version || at-l.at < int64(c.sharing.Delay) {
		return false
	}
	c.latest, c.known = latest{}, l.number
	more = c.concurrent.confirmed()
	for _, m := range c.all() {
		m.told.copy(&m.sent)
		more = more || m.local.used != m.sent.used
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

// unheard returns how much this replica and its previous processes have used
// that the other replicas do not know.
func (m *counter) unheard(now int64, sharing Sharing) int64 {
	used := m.local.used[1] - m.told.used[1] + m.untold.used[1]
	if m.local.parts != nil {
		oldest, later := m.local.from(m.oldest(now))
		toldOldest, toldLater := m.told.from(m.oldest(now))
		untoldOldest, untoldLater := m.untold.from(m.oldest(now))
		oldest, later = oldest-toldOldest+untoldOldest, later-toldLater+untoldLater
		used += m.covered(now, oldest, m.portion(m.limit.Amount, sharing)) + later
	}
	return max(0, used)
}

// portion returns this replica's portion of an unused amount: an equal part for
// each replica or, while this replica does not hear the others, the fraction
// that it used before (see measure).
func (m *counter) portion(amount int64, sharing Sharing) int64 {
	equal := amount / int64(max(1, sharing.Replicas))
	if !sharing.Apart || !sharing.ByUse {
		return equal
	}
	return max(equal, int64(float64(amount)*m.usualPart))
}

// whole returns the smallest amount of which this replica gets the portion.
func (m *counter) whole(portion int64, sharing Sharing) int64 {
	equal := multiply(portion, sharing.Replicas)
	if !sharing.Apart || !sharing.ByUse || m.usualPart == 0 {
		return equal
	}
	return int64(min(float64(equal), math.Ceil(float64(portion)/m.usualPart)))
}

// measure records this replica's fraction of the use of all replicas when it
// stops hearing the others. So a region with almost all users can still serve
// them, even if it has only one of many replicas. All replicas measure the same
// figures, so their fractions add up to one limit. Replicas that used less get
// an equal part instead, so N replicas together get at most 2 - 1/N of the
// limit.
func (m *counter) measure(now int64) {
	m.usualPart = 0
	local := m.spentOf(&m.told, now)
	if all := add(local, m.spentOf(&m.others, now)); all > 0 {
		m.usualPart = float64(local) / float64(all)
	}
}

// spentOf returns how much of the use in s is in the window that ends now.
func (m *counter) spentOf(s *sums, now int64) int64 {
	if s.parts == nil {
		return s.used[1]
	}
	oldest, later := s.from(m.oldest(now))
	return add(s.used[1], add(m.covered(now, oldest, m.limit.Amount), later))
}

// mostOfOthers returns how much of a limit the other replicas can have used in
// a window while they were not heard: equal parts, but for one of them its
// usual part, if that is larger.
func (m *counter) mostOfOthers(sharing Sharing) int64 {
	equal := m.limit.Amount / int64(max(1, sharing.Replicas))
	if !sharing.ByUse {
		return m.limit.Amount - equal
	}
	return max(equal, m.limit.Amount-m.portion(m.limit.Amount, sharing)) + equal*int64(max(0, sharing.Replicas-2))
}

// share returns how much of the limit may be used in total: the use that the
// other replicas know, and this replica's portion of the rest.
func (m *counter) share(used, unheard int64, sharing Sharing) int64 {
	known := max(0, used-unheard)
	return known + m.portion(max(0, m.limit.Amount-known), sharing)
}

// partOf returns this replica's portion of what is left of the limit, by the
// use that the other replicas know.
func (m *counter) partOf(used, at int64, sharing Sharing) int64 {
	unheard := m.unheard(at, sharing)
	return m.share(used, unheard, sharing) - max(0, used-unheard)
}

// allowed returns how much may be used in total before this replica must
// refuse.
func (c *Limiter) allowed(m *counter, at, used int64) int64 {
	if c.sharing.Replicas <= 1 {
		return m.limit.Amount
	}
	return m.share(used, m.unheard(at, c.sharing), c.sharing)
}

// shown returns how much of a limit this replica may use: all of it, or its
// share while it does not hear the others.
func (c *Limiter) shown(m *counter, at, used int64) int64 {
	if !c.sharing.Apart {
		return m.limit.Amount
	}
	return c.allowed(m, at, used)
}

// urgentPart is the divisor for the fraction of a replica's part that should be
// reported soon, because use that was not reported is lost if the replica is
// killed.
const urgentPart = 8

// tell records that the use has changed, and requests an immediate report if
// other replicas should know.
func (c *Limiter) tell(at int64) {
	c.changes.Add(1)
	if c.sharing.Replicas <= 1 {
		return
	}
	hurry := c.tellInFlight(at)
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
