package pool

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// returns reports cooldowns of which the time has passed, although no request
// comes. It has one timer, for the cooldown that ends next.
type returns struct {
	mu    sync.Mutex
	timer *time.Timer // nil if no cooldown is active
	at    time.Time
	// closed reports whether the pool reports nothing any more.
	closed atomic.Bool
}

// Close ends the reports of cooldowns whose time has passed. Another pool with
// the same backends reports them.
func (p *Pool) Close() {
	for _, m := range p.Members {
		m.health.mu.Lock()
		m.health.pools = slices.DeleteFunc(m.health.pools, func(other *Pool) bool { return other == p })
		m.health.mu.Unlock()
	}
	p.returns.mu.Lock()
	defer p.returns.mu.Unlock()
	p.returns.closed.Store(true)
	if p.returns.timer != nil {
		p.returns.timer.Stop()
	}
}

// watchReturns sets the timer for cooldowns that are older than the pool.
func (p *Pool) watchReturns() {
	for _, m := range p.Members {
		m.health.mu.Lock()
		m.health.pools = append(m.health.pools, p)
		m.health.mu.Unlock()
	}
	now := time.Now()
	for _, m := range p.Members {
		for b := range m.health.cooldowns() {
			p.wakeAt(m.wakeTime(b), now)
		}
	}
}

// wakeTime returns when there is something to report about a cooldown: its end,
// or that a recheck of the member is due.
func (m *Member) wakeTime(b *cooldownEntry) time.Time {
	if b.Unreachable {
		return m.health.unreachable.dueAt()
	}
	return b.Until
}

// wakeAt sets the timer for a cooldown that ends then.
func (p *Pool) wakeAt(end, now time.Time) {
	r := &p.returns
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed.Load() || r.timer != nil && !end.Before(r.at) {
		return
	}
	r.at = end
	if r.timer == nil {
		r.timer = time.AfterFunc(end.Sub(now), p.tellReturns)
	} else {
		r.timer.Reset(end.Sub(now))
	}
}

func (p *Pool) tellReturns() {
	p.returns.mu.Lock()
	p.returns.timer = nil
	p.returns.mu.Unlock()
	now := time.Now()
	for _, m := range p.Members {
		for b := range m.health.cooldowns() {
			switch at := m.wakeTime(b); {
			case now.Before(at):
				p.wakeAt(at, now)
			case b.Unreachable:
				m.tell(Event{Happening: RecheckDue, Cooldown: b.Cooldown})
				p.wakeAt(now.Add(firstPause), now) // a config that is unloaded may not finish its recheck
			case b.reporter == p || b.reporter.returns.closed.Load():
				m.tellEnd(b, false)
			}
		}
	}
}
