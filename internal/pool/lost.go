package pool

import (
	"sync/atomic"
	"time"
)

// lost is whether a backend cannot be reached at all. Its bench for that has no
// end in time: it lasts until the backend was reached. Until is when the next
// attempt to reach it is due.
type lost struct {
	is atomic.Bool
	// sought reports whether an attempt to reach it is under way.
	sought atomic.Bool
	// pause is the time between the last two attempts.
	pause atomic.Int64
}

const (
	// firstPause is how long after a backend was lost the first attempt to reach
	// it begins. Each pause is twice as long as the one before.
	firstPause   = time.Second
	longestPause = time.Minute
)

// lose records that the member cannot be reached, and returns when the next
// attempt to reach it is due.
func (l *lost) lose() time.Duration {
	if l.is.CompareAndSwap(false, true) {
		l.pause.Store(int64(firstPause))
	}
	return time.Duration(l.pause.Load())
}

// Lost reports whether the member cannot be reached.
func (m *Member) Lost() bool { return m.health.lost.is.Load() }

// StillLost records that an attempt to reach the member has failed.
func (m *Member) StillLost(r Refusal, now time.Time) {
	l := &m.health.lost
	if l.is.Load() {
		l.pause.Store(min(2*l.pause.Load(), int64(longestPause)))
		m.Bench(r, now)
	}
}

// Reached records that the member was reached, whatever it answered.
func (m *Member) Reached() {
	if !m.health.lost.is.Load() {
		return
	}
	m.health.lost.is.Store(false)
	s := &m.health.whole.failure
	if b := s.Load(); b != nil && b.Lost && s.CompareAndSwap(b, nil) {
		m.tellEnd(b, false)
	}
}

// Seek returns the members that are lost and that no attempt to reach was made for
// lately. The attempts are the caller's, which calls Sought after each.
func (p *Pool) Seek(now time.Time) (lost []*Member) {
	for _, m := range p.Members {
		l := &m.health.lost
		last := m.health.whole.failure.until(now).Add(-time.Duration(l.pause.Load()))
		if l.is.Load() && now.Sub(last) >= firstPause && m.Sought(true) {
			lost = append(lost, m)
		}
	}
	return lost
}

// Sought records whether an attempt to reach the member is under way, and reports
// whether that is new.
func (m *Member) Sought(now bool) bool { return m.health.lost.sought.CompareAndSwap(!now, now) }

// Usable reports whether any member may be used, whatever the model. If none
// may, wait is until the first may again, or 0 if nobody knows.
func (p *Pool) Usable(now time.Time) (usable bool, wait time.Duration) {
	for _, m := range p.Members {
		lost, back := m.health.lost.is.Load(), m.health.whole.returns(now).Sub(now)
		switch {
		case lost: // the next attempt to reach it may succeed
			back = max(firstPause, m.health.whole.throttle.until(now).Sub(now))
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
