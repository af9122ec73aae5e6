package pool

import (
	"sync/atomic"
	"time"
)

// lost is the bench of a backend that cannot be reached at all. It has no end in
// time: it lasts until the backend is reached. Other benches of the backend go on
// beside it.
type lost struct {
	slot
	// sought reports whether an attempt to reach it is in progress.
	sought atomic.Bool
	// pause is the time between the last attempt and the next one, which is due then.
	pause time.Duration
	due   atomic.Int64 // in nanoseconds since the process began
}

const (
	// firstPause is how long after a backend was lost the first attempt to reach
	// it begins. Each pause is twice as long as the one before.
	firstPause   = time.Second
	longestPause = time.Minute
)

// lose records that the member cannot be reached, and returns when the next
// attempt to reach it is due. The caller holds the lock.
func (l *lost) lose(now time.Time) time.Time {
	if l.Load() == nil {
		l.pause = firstPause
	}
	due := now.Add(l.pause)
	l.due.Store(int64(due.Sub(began)))
	return due
}

// dueAt is when the next attempt to reach the member is due.
func (l *lost) dueAt() time.Time { return began.Add(time.Duration(l.due.Load())) }

// Lost reports whether the member cannot be reached.
func (m *Member) Lost() bool { return m.health.lost.Load() != nil }

// StillLost records that an attempt to reach the member has failed.
func (m *Member) StillLost(r Refusal, now time.Time) {
	h := m.health
	h.mu.Lock()
	h.lost.pause = min(2*h.lost.pause, longestPause)
	h.mu.Unlock()
	if m.Lost() {
		m.Bench(r, now)
	}
}

// Reached records that the member was reached, whatever it answered.
func (m *Member) Reached() {
	if !m.Lost() {
		return
	}
	m.health.mu.Lock()
	b := m.health.lost.Swap(nil)
	m.health.mu.Unlock()
	m.tellEnd(b, false)
}

// Seek returns the lost members without a recent attempt to reach them. The caller
// makes the attempts, and calls Sought after each.
func (p *Pool) Seek(now time.Time) (lost []*Member) {
	for _, m := range p.Members {
		if !m.Lost() {
			continue
		}
		h := m.health
		h.mu.Lock()
		last := h.lost.dueAt().Add(-h.lost.pause)
		h.mu.Unlock()
		if now.Sub(last) >= firstPause && m.Sought(true) {
			lost = append(lost, m)
		}
	}
	return lost
}

// Sought records whether an attempt to reach the member is in progress, and
// reports whether that is new.
func (m *Member) Sought(now bool) bool { return m.health.lost.sought.CompareAndSwap(!now, now) }

// Usable reports whether any member may be used, whatever the model. If not,
// wait is the time until the first one may be used again, or 0 if that is
// unknown.
func (p *Pool) Usable(now time.Time) (usable bool, wait time.Duration) {
	for _, m := range p.Members {
		back := m.health.whole.returns(now).Sub(now)
		switch {
		case m.Lost(): // the next attempt to reach it may succeed
			back = max(firstPause, back)
		case back <= 0 && m.healthy():
			return true, 0
		}
		// a member that fails active health checks does not say when it returns
		if back > 0 && (wait == 0 || back < wait) {
			wait = back
		}
	}
	return false, wait
}
