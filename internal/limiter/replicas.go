package limiter

import (
	"cmp"
	"hash/maphash"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Entry is the use of one replica in one window of a limit.
type Entry struct {
	ID     ratelimit.ID `json:"limit"`
	Window int64        `json:"window"`
	Used   int64        `json:"used"`
	// Reset is the caller's latest reset that the replica knew. It is 0 if
	// there was none.
	Reset int64 `json:"reset,omitempty"`
}

// Over reports whether the entry's window has ended and no longer counts, in
// any time zone.
func (e Entry) Over(now time.Time) bool {
	if e.ID.Unit().Calendar() {
		// the last zone is UTC-12
		return e.Window < windowAt(e.ID.Unit(), now.Add(-12*time.Hour).UnixNano(), time.UTC).index
	}
	return e.Window < windowAt(e.ID.Unit(), now.UnixNano(), time.UTC).index-1
}

// figure is the use of another replica in a window.
type figure struct {
	replica string
	// key is a hash of the replica's id.
	key uint64
	// version orders the reports of the replica for this window.
	version      uint64
	window, used int64
	// parts are the uses of each part of the window, if a previous process has
	// saved them. saved is the version that they belong to.
	parts []int64
	saved uint64
	// untold is how much of used the other replicas may not know.
	untold int64
}

// maxFigures is the maximum number of figures for a limit. A replica has at
// most three.
const maxFigures = 4096

// usage appends this replica's own use to entries.
func (c *Limiter) usage(entries []Entry) []Entry {
	for id, m := range c.all() {
		for w, isCharged := range m.charged {
			if isCharged {
				entries = append(entries, Entry{id, m.index - 1 + int64(w), m.local.used[w], c.reset})
			}
		}
	}
	return entries
}

// Heard records the use that another replica reports. version orders the
// reports of a replica: for each window, the entry with the greatest version
// counts. So late, repeated or reordered entries change nothing. An entry for a
// future window is ignored, unless the window is about to begin: it comes from
// a clock that is wrong, or that was wrong at that time.
func (c *Limiter) Heard(now time.Time, replica string, version uint64, entries []Entry) {
	c.mu.Lock()
	at, key := c.roll(now), maphash.String(seed, replica)
	before, hadOwn, isNew := c.reset, false, false
	for _, e := range entries {
		hadOwn = hadOwn || e.Reset > before && c.hasOwn()
		if c.counts(at, e) {
			m := &c.counters[e.ID]
			m.roll(e.ID, at, c.location, c.admitted+1)
			isNew = m.heard(at, replica, key, version, e) || isNew
		}
	}
	if isNew {
		c.release(key)
	}
	var reset func(name string)
	if hadOwn && c.reset != before {
		reset = c.resetReport(at)
	}
	crossed, name := c.crossed(at), c.name
	c.mu.Unlock()
	c.report(crossed)
	if reset != nil {
		reset(name)
	}
}

// heard records an entry, and reports whether it is later than those known.
func (m *counter) heard(now int64, replica string, key, version uint64, e Entry) (isNew bool) {
	if e.Window < m.index-1 || e.Window > m.index+1 || e.Window > m.index && !m.calendar() && m.end-now > standstill {
		return false
	}
	i, known := m.figureOf(key, e.Window)
	switch {
	case !known && len(m.figures) < maxFigures:
		m.figures = slices.Insert(m.figures, i, figure{replica: replica, key: key, window: e.Window})
	case !known || m.figures[i].version >= version:
		return false
	}
	if m.others.parts == nil && !m.calendar() {
		m.others.divide(m.part(now)) // without a limit, too: a caller's are not known before its first request here
	}
	used := min(e.Used, 1<<61)
	changed := used != m.figures[i].used
	m.figures[i].version, m.figures[i].used = version, used
	if m.figures[i].untold > 0 {
		m.figures[i].untold = 0 // another replica has said this
		m.addUpUntold()
	}
	if changed {
		m.addUp(now)
	}
	return true
}

// figureOf returns the index of the figure of a replica and a window, or the
// index at which it would be inserted. It uses a binary search by a hash,
// because a hundred replicas cause a million lookups per second. A linear
// search, or comparing names, took half of that time.
func (m *counter) figureOf(key uint64, window int64) (i int, known bool) {
	return slices.BinarySearchFunc(m.figures, key, func(f figure, key uint64) int {
		if f.key == key {
			return cmp.Compare(f.window, window)
		}
		return cmp.Compare(f.key, key)
	})
}

// sumOthers drops the figures of windows that are over, and adds up the rest.
func (m *counter) sumOthers(now int64) {
	m.heldParts = slices.DeleteFunc(m.heldParts, func(h heldPart) bool { return now >= h.until })
	if m.figures != nil {
		m.figures = slices.DeleteFunc(m.figures,
			func(f figure) bool { return f.window < m.index-1 || f.window > m.index+1 })
		m.addUp(now)
	}
}

// addUp adds up the figures. An increase since the last report counts as if it
// was used now or, in the previous window, at the window's end.
func (m *counter) addUp(now int64) {
	var used [2]int64
	for i := range m.figures {
		if w := m.figures[i].window - m.index + 1; w <= 1 {
			used[w] = add(used[w], m.figures[i].used)
		}
	}
	if m.last != nil && used[0] != m.others.used[0] {
		m.last[0][parts-1] = 0
	}
	if used[1] != m.others.used[1] {
		m.touch(now)
		if now-m.joined >= settled {
			m.owe(now, used[1]-m.others.used[1])
		}
	}
	m.others.change(parts-1, used[0]-m.others.used[0])
	m.others.change(m.part(now), used[1]-m.others.used[1])
}

// OtherUse is the use of another replica for a caller.
type OtherUse struct {
	Caller ratelimit.CallerID
	// Version is the greatest version of the entries. One version suffices,
	// because the use in a window that is over hardly changes.
	Version uint64
	Entries []Entry
	// Timelines say when it was used, if a previous process has saved that.
	Timelines []Timeline
}

// Others returns the known use of the other replicas in windows of a minute or
// longer, by replica.
func (cs *Limiters) Others(now time.Time) map[string][]OtherUse {
	cs.mu.RLock()
	defer cs.mu.RUnlock()
	others := make(map[string][]OtherUse)
	for id, c := range cs.byID {
		for replica, use := range c.others(now) {
			use.Caller = id
			others[replica] = append(others[replica], use)
		}
	}
	return others
}

func (c *Limiter) others(now time.Time) map[string]OtherUse {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	others := make(map[string]OtherUse)
	for i := range c.counters {
		id := ratelimit.ID(i)
		for _, f := range c.counters[id].figures {
			e := Entry{id, f.window, f.used, c.reset} // figures from before a reset are not kept
			if id.Unit() < ratelimit.Minute || e.Over(time.Unix(0, at)) {
				continue
			}
			use := others[f.replica]
			use.Version, use.Entries = max(use.Version, f.version), append(use.Entries, e)
			others[f.replica] = use
		}
		for replica, use := range others {
			if timeline, ok := c.counters[id].savedTimeline(id, replica); ok {
				use.Timelines = append(use.Timelines, timeline)
				others[replica] = use
			}
		}
	}
	return others
}

// savedTimeline returns the timeline of a replica's use, if a previous process
// has saved it.
func (m *counter) savedTimeline(id ratelimit.ID, replica string) (timeline Timeline, ok bool) {
	var both [2 * parts]int64
	last := -1
	for _, f := range m.figures {
		w := int(f.window - m.index + 1)
		if f.replica != replica || f.parts == nil || w < 0 || w > 1 {
			continue
		}
		for i, used := range f.parts {
			both[w*parts+i] = used
			if used > 0 {
				last = max(last, w*parts+i)
			}
		}
	}
	if last < 0 {
		return Timeline{}, false
	}
	return Timeline{ID: id, Last: (m.index-1)*parts + int64(last),
		Used: slices.Clone(both[max(0, last-parts) : last+1])}, true
}

// Share sets how replicas share the limits. When this replica hears the others
// again after a pause, it does not know when they used what it had not heard
// of. It counts the latest of this use as used now, but no more than they could
// have used in one window while they did not hear this replica. The rest counts
// as older than that window.
func (c *Limiter) Share(now time.Time, s Sharing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.arrived(at)
	switch {
	case s == Sharing{}:
		c.concurrent = concurrent{peak: c.admittedInFlight()}
	case s.Apart && !c.sharing.Apart:
		c.concurrent.apart = at
	}
	for _, m := range c.all() {
		switch {
		case s.Apart:
			m.joined = never
		case c.sharing.Apart, s.Replicas > c.sharing.Replicas:
			m.joined = at
		}
		switch {
		case s.Apart && !c.sharing.Apart:
			m.lost.copy(&m.others)
			m.measure(at)
		case c.sharing.Apart && !s.Apart && m.others.parts != nil:
			m.forgetLast()
			m.others.bound(&m.lost, m.mostOfOthers(c.sharing))
		}
	}
	c.sharing = s
	c.addUpInFlight(at)
}

// Timeline says when a replica used a sliding limit: Used is its use in each of
// the latest parts of the windows, oldest first, over at most one window. Last
// is the number of the last part. The part that begins with 1970 has the number
// 0.
type Timeline struct {
	ID   ratelimit.ID `json:"limit"`
	Last int64        `json:"last"`
	Used []int64      `json:"used"`
	// Version is the version of the replica's previous report.
	Version uint64 `json:"-"`
}

// Timelines returns the timelines of this replica's use of the limits by the
// minute and by the hour.
func (c *Limiter) Timelines(now time.Time) (timelines []Timeline) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	for id, m := range c.all() {
		if m.local.parts == nil || id.Unit() == ratelimit.Second {
			continue
		}
		last := m.part(at)
		first := max(0, last-parts)
		for first <= last && m.local.in(first) == 0 {
			first++
		}
		if first > last {
			continue
		}
		timeline := Timeline{ID: id, Last: (m.index-1)*parts + int64(last)}
		for part := first; part <= last; part++ {
			timeline.Used = append(timeline.Used, m.local.in(part))
		}
		timelines = append(timelines, timeline)
	}
	return timelines
}

// Spread places the use of the other replicas in time, after this replica has
// heard it for the first time. A report has only the sum of a window. A
// [Timeline], here by replica, or what a previous process has saved, says when
// it was used. Without either, the use of the current window is spread evenly
// up to now, and that of the previous window over its second half.
func (c *Limiter) Spread(now time.Time, timelines map[string][]Timeline) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	for id := range c.counters {
		m := &c.counters[id]
		m.others.parts = nil
		m.divide(at)
		if m.others.parts == nil {
			continue
		}
		m.forgetLast()
		m.debt = debt{} // it is not known how what was loaded was used
		placed, used := sums{parts: new([2][parts]int64)}, m.others.used
		for _, f := range m.figures {
			all := timelines[f.replica]
			i := slices.IndexFunc(all, func(c Timeline) bool { return c.ID == ratelimit.ID(id) })
			switch w := int(f.window - m.index + 1); {
			case w < 0 || w > 1:
			case i >= 0 && all[i].Version >= f.saved:
				m.placeTimeline(&placed, f, w, all[i], m.part(at))
			case f.parts != nil:
				placeSaved(&placed, f, w, m.part(at))
			}
		}
		m.others = sums{used: [2]int64{used[0] - placed.used[0], used[1] - placed.used[1]}}
		m.others.divide(m.part(at))
		for i := range 2 * parts {
			m.others.change(i, placed.in(i))
		}
	}
}

// placeTimeline distributes a replica's use in one of the two windows by its
// timeline, and puts the rest before or after the timeline. It places nothing
// after the part now.
func (m *counter) placeTimeline(placed *sums, f figure, w int, timeline Timeline, now int) {
	last := timeline.Last - (m.index-1)*parts // as parts are numbered here
	first, end, left := w*parts, (w+1)*parts-1, f.used
	if last < int64(first) || last >= 2*parts || len(timeline.Used) > parts+1 {
		return
	}
	for i, used := range timeline.Used {
		if part := int(last) + 1 - len(timeline.Used) + i; first <= part && part <= end {
			used = min(left, max(0, used))
			placed.change(min(part, now), used)
			left -= used
		}
	}
	rest := first
	if int(last) <= end {
		rest = min(int(last)+1, end)
	}
	placed.change(min(rest, now), left)
}

// placeSaved distributes a replica's use in one of the two windows by the parts
// that a previous process has saved. Later use counts as used now or, in the
// previous window, at the window's end.
func placeSaved(placed *sums, f figure, w, now int) {
	end, left := min((w+1)*parts-1, now), f.used
	for i, used := range f.parts {
		used = min(left, used)
		placed.change(min(w*parts+i, end), used)
		left -= used
	}
	placed.change(end, left)
}
