package pool

import (
	"sync"
	"time"
)

// returns tells of benches whose time has passed, although no request comes. It
// has one timer, for the bench that ends next.
type returns struct {
	mu     sync.Mutex
	timer  *time.Timer // nil: no bench is in force
	at     time.Time
	closed bool
}

// Close ends the telling of benches whose time has passed. Another pool with
// the same backends tells of them.
func (p *Pool) Close() {
	p.returns.mu.Lock()
	defer p.returns.mu.Unlock()
	p.returns.closed = true
	if p.returns.timer != nil {
		p.returns.timer.Stop()
	}
}

// watchReturns sets the timer for benches that began before the pool did.
func (p *Pool) watchReturns() {
	now := time.Now()
	for _, m := range p.Members {
		for _, b := range m.health.benches() {
			p.wakeAt(b.Until, now)
		}
	}
}

// wakeAt sets the timer for a bench that ends then.
func (p *Pool) wakeAt(end, now time.Time) {
	r := &p.returns
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.timer != nil && !end.Before(r.at) {
		return
	}
	r.at = end
	if r.timer == nil {
		r.timer = time.AfterFunc(end.Sub(now), p.tellReturns)
	} else {
		r.timer.Reset(end.Sub(now))
	}
}

// tellReturns tells of the benches that are over.
func (p *Pool) tellReturns() {
	p.returns.mu.Lock()
	p.returns.timer = nil
	p.returns.mu.Unlock()
	now := time.Now()
	for _, m := range p.Members {
		for _, b := range m.health.benches() {
			switch {
			case now.Before(b.Until):
				p.wakeAt(b.Until, now)
			case b.Lost:
				m.tell(Event{Happening: Due, Bench: b.Bench})
				p.wakeAt(now.Add(firstPause), now) // a config that is unloaded may not finish its attempt
			case b.pool == p || b.pool.isClosed():
				m.tellEnd(b, false)
			}
		}
	}
}

func (p *Pool) isClosed() bool {
	p.returns.mu.Lock()
	defer p.returns.mu.Unlock()
	return p.returns.closed
}
