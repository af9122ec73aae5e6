package limiter

import (
	"slices"
	"strings"
	"time"
)

// A replica that has vanished without announcing its end may still serve
// requests: perhaps only its connection is lost. If the other replicas let its
// use slide out of the windows, they would admit requests for capacity that it
// goes on using.
//
// So they hold its part back. Until a minute after the replica was last heard,
// its use counts as at least the use at the moment when it was missed. It
// counts as no more than an equal part of the limit, which is the most that the
// replica may use on its own. A report from the replica ends that. Days and
// months do not need this rule, because no use slides out of them.

// Vanished is a replica that is no longer heard.
type Vanished struct {
	// Writer is a prefix of the replica's id.
	Writer string
	// Until is the time until which its part of the limits is held back.
	Until time.Time
}

// heldPart is the part of a limit that is held back for a replica.
type heldPart struct {
	// key identifies the replica, as in figure.
	key uint64
	// least is the minimum that counts as the replica's use before the time
	// until.
	least, until int64
}

// Hold holds back the parts of replicas that have just vanished. replicas is
// the number of replicas that share the limits, including the vanished ones.
func (cs *Limiters) Hold(now time.Time, vanished []Vanished, replicas int) {
	cs.mu.RLock()
	defer cs.mu.RUnlock()
	for _, c := range cs.byID {
		c.hold(now, vanished, replicas)
	}
}

func (c *Limiter) hold(now time.Time, vanished []Vanished, replicas int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	for _, m := range c.all() {
		if m.limit.Amount == 0 || m.calendar() {
			continue
		}
		for _, f := range m.figures {
			i := slices.IndexFunc(vanished, func(v Vanished) bool { return strings.HasPrefix(f.replica, v.Writer) })
			if i < 0 {
				continue
			}
			m.release(f.key) // a figure of it in another window was before
			if least := min(m.usedBy(f.key, at), m.limit.Amount/int64(replicas)); least > 0 {
				m.heldParts = append(m.heldParts, heldPart{f.key, least, at + int64(vanished[i].Until.Sub(now))})
			}
		}
	}
}

// release ends holding back for a replica, because it has reported its use.
func (c *Limiter) release(key uint64) {
	for _, m := range c.all() {
		m.release(key)
	}
}

func (m *counter) release(key uint64) {
	m.heldParts = slices.DeleteFunc(m.heldParts, func(h heldPart) bool { return h.key == key })
}

// heldBack returns how much counts as used by vanished replicas in addition to
// their known use.
func (m *counter) heldBack(now int64) (back int64) {
	for _, h := range m.heldParts {
		if now < h.until {
			back = add(back, max(0, h.least-m.usedBy(h.key, now)))
		}
	}
	return back
}

// heldFor returns the time until nothing is held back.
func (m *counter) heldFor(now int64) (left int64) {
	for _, h := range m.heldParts {
		left = max(left, h.until-now)
	}
	return left
}

// usedBy returns how much another replica has used in the window that ends now.
// The times of its use in the previous window are not known: they are assumed
// to be distributed like those of all other replicas together.
func (m *counter) usedBy(key uint64, now int64) (used int64) {
	if i, known := m.figureOf(key, m.index); known {
		used = m.figures[i].used
	}
	if i, known := m.figureOf(key, m.index-1); known && m.others.used[0] > 0 {
		oldest, later := m.others.from(m.oldest(now))
		all := m.others.used[0]
		counted := min(all, add(m.covered(now, oldest, m.limit.Amount), later))
		used = add(used, shareOf([]int64{counted}, m.figures[i].used, all)[0])
	}
	return used
}
