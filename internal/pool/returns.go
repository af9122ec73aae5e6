package pool

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// returns reports the ends of cooldowns even if no request comes. It has one
// timer, which is set to the next end.
type returns struct {
	mu    sync.Mutex
	timer *time.Timer // nil if no cooldown is active
	at    time.Time
	// closed reports whether the pool was closed.
	closed atomic.Bool
}

// Close stops the pool's reports about ends of cooldowns. Another open pool
// with the same backends then reports them.
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

// watchReturns sets the timer for cooldowns that started before the pool.
func (p *Pool) watchReturns() {
	for _, m := range p.Members {
		m.health.mu.Lock()
		m.health.pools = append(m.health.pools, p)
		m.health.mu.Unlock()
	}
	now := time.Now()
	for _, m := range p.Members {
		for c := range m.health.cooldowns() {
			p.wakeAt(m.wakeTime(c), now)
		}
	}
}

// wakeTime returns when to report about a cooldown: at its end, or when a
// recheck of the unreachable member is due.
func (m *Member) wakeTime(c *cooldownEntry) time.Time {
	if c.Unreachable {
		return m.health.unreachable.dueAt()
	}
	return c.Until
}

// wakeAt makes the timer fire at end, unless it fires earlier.
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
		for c := range m.health.cooldowns() {
			switch at := m.wakeTime(c); {
			case now.Before(at):
				p.wakeAt(at, now)
			case c.Unreachable:
				m.tell(Event{Happening: RecheckDue, Cooldown: c.Cooldown})
				p.wakeAt(now.Add(firstPause), now) // a config that is unloaded may not finish its recheck
			case c.reporter == p || c.reporter.returns.closed.Load():
				m.tellEnd(c, false)
			}
		}
	}
}
