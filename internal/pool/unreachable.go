package pool

import (
	"sync/atomic"
	"time"
)

// unreachable is the cooldown of a backend that cannot be reached at all. It
// lasts until the backend is reached. Other cooldowns of the backend continue
// in the meantime.
type unreachable struct {
	slot
	// checking reports whether a recheck is in progress.
	checking atomic.Bool
	// pause is the time between the last recheck and the next one. due is the
	// time of the next one.
	pause time.Duration
	due   atomic.Int64 // in nanoseconds since the process began
}

const (
	// firstPause is the time from when a backend becomes unreachable to the
	// first recheck. Each further pause is twice as long.
	firstPause   = time.Second
	longestPause = time.Minute
)

// began is when the process started. Times are stored as distances from it,
// which do not change if the wall clock is set.
var began = time.Now()

// failed records that the member could not be reached, and returns when the
// next recheck is due. The caller holds the lock.
func (u *unreachable) failed(now time.Time) time.Time {
	if u.Load() == nil {
		u.pause = firstPause
	}
	due := now.Add(u.pause)
	u.due.Store(int64(due.Sub(began)))
	return due
}

func (u *unreachable) dueAt() time.Time { return began.Add(time.Duration(u.due.Load())) }

// Unreachable reports whether the member cannot be reached.
func (m *Member) Unreachable() bool { return m.health.unreachable.Load() != nil }

// StillUnreachable records that a recheck has failed, and doubles the pause.
func (m *Member) StillUnreachable(r Refusal, now time.Time) {
	h := m.health
	h.mu.Lock()
	h.unreachable.pause = min(2*h.unreachable.pause, longestPause)
	h.mu.Unlock()
	if m.Unreachable() {
		m.CoolDown(r, now)
	}
}

// Reached records that the member sent a reply, of any status.
func (m *Member) Reached() {
	if !m.Unreachable() {
		return
	}
	m.health.mu.Lock()
	b := m.health.unreachable.Swap(nil)
	m.health.mu.Unlock()
	m.tellEnd(b, false)
}

// Rechecks returns the unreachable members that had no recheck for at least a
// second, and records that a recheck of each is in progress. The caller
// rechecks them without StartRecheck, and calls EndRecheck for each.
func (p *Pool) Rechecks(now time.Time) (due []*Member) {
	for _, m := range p.Members {
		if !m.Unreachable() {
			continue
		}
		h := m.health
		h.mu.Lock()
		last := h.unreachable.dueAt().Add(-h.unreachable.pause)
		h.mu.Unlock()
		if now.Sub(last) >= firstPause && h.unreachable.checking.CompareAndSwap(false, true) {
			due = append(due, m)
		}
	}
	return due
}

// StartRecheck records that a recheck of the member is in progress. It returns
// false if one was in progress already, or if no recheck is due. If it returns
// true, EndRecheck must follow.
func (m *Member) StartRecheck(now time.Time) bool {
	if !m.health.unreachable.checking.CompareAndSwap(false, true) {
		return false
	}
	if !m.Unreachable() || now.Before(m.health.unreachable.dueAt()) {
		m.EndRecheck()
		return false
	}
	return true
}

// EndRecheck records that the recheck of the member is over, which StartRecheck
// or Rechecks has started.
func (m *Member) EndRecheck() { m.health.unreachable.checking.Store(false) }

// Usable reports whether any member may be used for at least some model. If
// not, wait is the time until the first one may be used again, or 0 if that is
// not known.
func (p *Pool) Usable(now time.Time) (usable bool, wait time.Duration) {
	for _, m := range p.Members {
		back := m.health.whole.returns(now).Sub(now)
		switch {
		case m.Unreachable(): // the next recheck may succeed
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
