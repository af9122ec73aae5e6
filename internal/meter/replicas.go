package meter

import (
	"slices"
	"time"
)

// Entry is what one replica has used in one window of a limit.
type Entry struct {
	ID     ID    `json:"limit"`
	Window int64 `json:"window"`
	Used   int64 `json:"used"`
}

// Over reports whether the entry's window does not count any more, wherever days begin.
func (e Entry) Over(now time.Time) bool {
	if e.ID.Unit().Calendar() {
		return e.Window < windowAt(e.ID.Unit(), now.Add(-12*time.Hour).UnixNano(), time.UTC).index // the last zone is UTC-12
	}
	return e.Window < windowAt(e.ID.Unit(), now.UnixNano(), time.UTC).index-1
}

// figure is what another replica has used in a window.
type figure struct {
	replica string
	// version orders what the replica says of this window.
	version      uint64
	window, used int64
}

// maxFigures is how many figures are kept for a limit. A replica has three at most.
const maxFigures = 4096

// Usage appends this replica's own use to entries: of each limit the current window, and the one before,
// which a request that ends late can still change. hurry reports whether a limit is more than half
// used, so that other replicas should know soon.
func (c *Caller) Usage(now time.Time, entries []Entry) (_ []Entry, hurry bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	for id := range c.all() {
		m := &c.meters[id]
		if m.wrote.previous {
			entries = append(entries, Entry{id, m.index - 1, m.own.previous})
		}
		if m.wrote.current {
			entries = append(entries, Entry{id, m.index, m.own.current})
		}
		hurry = hurry || m.limit.Amount > 0 && m.use(at, c.apart()) > m.limit.Amount/2
	}
	return entries, hurry
}

// Heard records what another replica has used. version orders what that replica says: of each window,
// the entry with the greatest version counts. So entries that are late, repeated or out of order change
// nothing. A window further ahead than the next one is another clock's mistake, and does not count.
func (c *Caller) Heard(now time.Time, replica string, version uint64, entries []Entry) {
	c.mu.Lock()
	at := c.roll(now)
	for _, e := range entries {
		if e.ID.Valid() && e.Used >= 0 {
			m := &c.meters[e.ID]
			m.roll(e.ID, at, c.location)
			m.heard(replica, version, e)
		}
	}
	crossed := c.crossed(at)
	c.mu.Unlock()
	c.report(crossed)
}

func (m *meter) heard(replica string, version uint64, e Entry) {
	if e.Window < m.index-1 || e.Window > m.index+1 {
		return
	}
	i := slices.IndexFunc(m.figures, func(f figure) bool { return f.replica == replica && f.window == e.Window })
	switch {
	case i < 0 && len(m.figures) < maxFigures:
		i = len(m.figures)
		m.figures = append(m.figures, figure{replica: replica, window: e.Window})
	case i < 0 || m.figures[i].version >= version:
		return
	}
	m.figures[i].version, m.figures[i].used = version, min(e.Used, 1<<61)
	m.sumOthers()
}

// sumOthers adds up the other replicas' figures, and drops those of windows that are over.
func (m *meter) sumOthers() {
	m.others = sums{}
	if m.figures == nil {
		return
	}
	m.figures = slices.DeleteFunc(m.figures, func(f figure) bool { return f.window < m.index-1 || f.window > m.index+1 })
	for i := range m.figures {
		switch f := &m.figures[i]; f.window {
		case m.index:
			m.others.current = add(m.others.current, f.used)
		case m.index - 1:
			m.others.previous = add(m.others.previous, f.used)
		}
	}
}

// Share makes this replica use only its share of each limit, while it hears no others. replicas is how many
// share a limit, this one included. 0: the replicas hear each other, or there is only this one. The share
// of a day or a month is that of what is left when this begins.
func (c *Caller) Share(now time.Time, replicas int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.roll(now)
	if !c.apart() && replicas > 0 {
		for id := range c.all() {
			if m := &c.meters[id]; m.calendar() {
				m.lost.own = m.own.current
				m.lost.all, _ = m.counts(false)
			}
		}
	}
	c.replicas = max(0, replicas)
	if !c.apart() {
		for id := range c.meters {
			c.meters[id].lost.own, c.meters[id].lost.all = 0, 0
		}
	}
}

func (c *Caller) apart() bool { return c.replicas > 0 }

// Save appends what this replica has used in windows of an hour or longer.
func (c *Caller) Save(now time.Time, entries []Entry) []Entry {
	from := len(entries)
	entries, _ = c.Usage(now, entries)
	kept := slices.DeleteFunc(entries[from:], func(e Entry) bool { return e.ID.Unit() < Hour })
	return entries[:from+len(kept)]
}

// Restore adds what Save returned before a restart.
func (c *Caller) Restore(now time.Time, entries []Entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	for _, e := range entries {
		if !e.ID.Valid() || e.Used < 0 {
			continue
		}
		m := &c.meters[e.ID]
		m.roll(e.ID, at, c.location)
		switch used := min(e.Used, 1<<61); e.Window {
		case m.index:
			m.charge(used)
		case m.index - 1:
			m.own.previous, m.wrote.previous = add(m.own.previous, used), true
		}
	}
}
