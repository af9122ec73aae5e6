package limiter

import (
	"slices"
	"strings"
	"time"
)

// A replica that has vanished, without saying that it stops, may still serve
// requests: perhaps only its connection is lost. If the others let its use
// slide out of the windows meanwhile, they would use what it goes on using,
// too.
//
// So they hold its part back. Until a minute after it was last heard, its use
// counts as at least that of the moment at which it was missed, but as no more
// than an equal part of the limit, which is the most that it may use by itself.
// A report of its own ends that. Days and months need no such rule, because
// nothing slides out of them.

// Vanished is a replica that is not heard any more.
type Vanished struct {
	// Writer is how its id begins.
	Writer string
	// Until is for how long its part of the limits is held back.
	Until time.Time
}

// held is what is held back of a limit for a replica.
type held struct {
	// key stands for the replica, as in figure.
	key uint64
	// least is the least that counts as its use before a time.
	least, until int64
}

// Hold holds back the parts of replicas that have vanished just now. replicas
// is how many share the limits, with these.
func (cs *Callers) Hold(now time.Time, vanished []Vanished, replicas int) {
	cs.mu.RLock()
	defer cs.mu.RUnlock()
	for _, c := range cs.byID {
		c.hold(now, vanished, replicas)
	}
}

func (c *Caller) hold(now time.Time, vanished []Vanished, replicas int) {
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
				m.held = append(m.held, held{f.key, least, at + int64(vanished[i].Until.Sub(now))})
			}
		}
	}
}

// release ends what is held back for a replica, because that said what it used.
func (c *Caller) release(key uint64) {
	for _, m := range c.all() {
		m.release(key)
	}
}

func (m *counter) release(key uint64) {
	m.held = slices.DeleteFunc(m.held, func(h held) bool { return h.key == key })
}

// heldBack returns how much counts as used by replicas that have vanished, in
// addition to what they are known to have used.
func (m *counter) heldBack(now int64) (back int64) {
	for _, h := range m.held {
		if now < h.until {
			back = add(back, max(0, h.least-m.usedBy(h.key, now)))
		}
	}
	return back
}

// heldFor returns for how long something is held back.
func (m *counter) heldFor(now int64) (left int64) {
	for _, h := range m.held {
		left = max(left, h.until-now)
	}
	return left
}

// usedBy returns how much another replica has used in the window that ends now.
// It is known when all others together have used what is left of the window
// before, so that counts as used at the same times.
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
