package pool

import (
	"sync/atomic"
	"time"
)

// lost is what is known of whether a backend can be reached at all. Its bench
// for that ends in time, but nobody knows then whether it is back: it stays lost
// until it was reached.
type lost struct {
	is atomic.Bool
	// sought tells that somebody tries to reach it.
	sought atomic.Bool
}

// Reached tells that the member was reached, whatever it answered.
func (m *Member) Reached() {
	if m.health.lost.is.Load() {
		m.health.lost.is.Store(false)
	}
}

// Seek returns the members that are lost and whose bench for that is over. They
// are the caller's to try to reach. It calls Sought when it has done so.
func (p *Pool) Seek(now time.Time) (lost []*Member) {
	for _, m := range p.Members {
		h := m.health
		if h.lost.is.Load() && !now.Before(h.whole.returns(now)) && h.lost.sought.CompareAndSwap(false, true) {
			lost = append(lost, m)
		}
	}
	return lost
}

// Sought allows Seek to return the member again.
func (m *Member) Sought() { m.health.lost.sought.Store(false) }

// soon is when a lost member may be back whose bench is over.
const soon = time.Second

// Usable reports whether any member may be used, whatever the model. If none
// may, wait is until the first may again, or 0 if nobody knows.
func (p *Pool) Usable(now time.Time) (usable bool, wait time.Duration) {
	for _, m := range p.Members {
		lost, back := m.health.lost.is.Load(), m.health.whole.returns(now).Sub(now)
		switch {
		case back <= 0 && !lost && m.healthy():
			return true, 0
		case back <= 0 && lost:
			back = soon
		}
		// a member that fails active health checks does not say when it returns
		if back > 0 && (wait == 0 || back < wait) {
			wait = back
		}
	}
	return false, wait
}
