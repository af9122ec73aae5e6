package limiter

import (
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// clock is the clock that windows follow.
type clock struct {
	// ahead is by how many nanoseconds it is ahead of the local clock.
	ahead int64
	// latest is the latest time that it has shown.
	latest int64
}

// standstill is how far the clock may go back without an effect. It is read
// before the lock is taken, so time may seem to go back a little.
const standstill = int64(2 * time.Second)

// roll moves all windows to now. It returns the time by the clock that windows
// follow.
func (c *Limiter) roll(now time.Time) (at int64) {
	at = now.UnixNano() + c.clock.ahead
	switch {
	case at >= c.clock.latest:
	case c.clock.latest-at <= standstill:
		at = c.clock.latest
	default:
		c.set(c.clock.latest, at)
	}
	c.clock.latest = at
	for id, m := range c.all() {
		m.roll(id, at, c.location, c.admitted+1)
	}
	return at
}

// follow makes the windows follow a clock that is ahead of the local one.
func (c *Limiter) follow(now time.Time, ahead time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	from := c.roll(now)
	c.clock.ahead = int64(ahead)
	to := now.UnixNano() + c.clock.ahead
	c.set(from, to)
	c.clock.latest = to
	c.roll(now)
}

// set sets the clock. No time passes by that, so the age of all use stays the
// same.
func (c *Limiter) set(from, to int64) {
	for id := range c.counters {
		c.counters[id].set(ratelimit.ID(id), from, to, c.location)
	}
	c.concurrent.shift(to - from)
	c.latest.at = min(c.latest.at, to)
	c.changes.Add(1) // what is used is that of other windows
}

func (m *counter) set(id ratelimit.ID, from, to int64, location *time.Location) {
	next := windowAt(id.Unit(), to, location)
	switch {
	case !m.holds(from): // it does not count
	case !m.calendar():
		m.shift(from, to, next)
	case next.index < m.index:
		m.unite(next)
	case next.index > m.index && to-from > standstill:
		m.carry(next)
	}
}

// carry moves the use of the current day or month to a later one. A clock that
// is set forward over midnight again and again must not start an empty day each
// time.
func (m *counter) carry(next window) {
	for i := range m.figures {
		m.figures[i].window += next.index - m.index
		m.figures[i].version = 0 // as in shift
	}
	m.window = next
}

// shift moves all use by the time by which the clock was set. It moves whole
// parts, and rounds up rather than down.
func (m *counter) shift(from, to int64, next window) {
	length, last := m.end-m.start, m.part(from)
	m.debt.from += to - from
	m.joined += to - from
	early := (to-next.start)*parts%length > (from-m.start)*parts%length
	for i := range m.figures {
		m.figures[i].window += next.index - m.index
		m.figures[i].version = 0 // some of the others had set their clocks already: what they say again counts
	}
	for i := range m.heldParts {
		m.heldParts[i].until += to - from
	}
	m.window = next
	by := m.part(to) - last
	if early {
		by++
	}
	for _, s := range m.sums() {
		s.shift(by, m.part(to))
	}
	m.forgetLast()
	m.charged = [2]bool{m.charged[0] || m.charged[1], m.charged[0] || m.charged[1]}
}

// shift moves the use by some parts, but not beyond the part last.
func (s *sums) shift(by, last int) {
	if s.parts == nil {
		return
	}
	from := *s
	*s = sums{parts: new([2][parts]int64)}
	for i := range 2 * parts {
		if to := min(i+by, last); to >= 0 {
			s.change(to, from.parts[i/parts][i%parts])
		}
	}
}

// unite adds the use since the end of an earlier day or month to that day or
// month, because it begins once more.
func (m *counter) unite(next window) {
	isBefore := next.index == m.index-1
	for _, s := range m.sums() {
		if !isBefore {
			s.used[0] = 0
		}
		s.used = [2]int64{0, add(s.used[0], s.used[1])}
	}
	m.charged = [2]bool{false, m.charged[1] || isBefore && m.charged[0]}
	for _, f := range slices.Clone(m.figures) {
		if f.window != m.index {
			continue
		}
		if i, known := m.figureOf(f.key, next.index); known {
			m.figures[i].used, m.figures[i].version = add(m.figures[i].used, f.used),
				max(m.figures[i].version, f.version)
		} else {
			m.figures = slices.Insert(m.figures, i,
				figure{replica: f.replica, key: f.key, version: f.version, window: next.index, used: f.used})
		}
	}
	if !isBefore {
		m.first[0] = m.first[1]
	}
	m.first[1] = m.first[0]
	m.window = next
	m.figures = slices.DeleteFunc(m.figures, func(f figure) bool { return f.window > next.index })
}
