package callers

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// Leave ends the request of a response that goes on in the background. It is
// charged with all output that it may have, until a reply to any request says
// what it has used. id may be empty.
func (a *Admission) Leave(now time.Time, id string) {
	if !a.Open() {
		return
	}
	if later := a.reservation.Leave(now); id != "" {
		a.kept.background.Add(id, later)
	}
	a.kept.saver.Changed()
}

// Awaits reports whether a response with this id has been left in the
// background, and not been settled.
func (a *Admission) Awaits(id string) bool {
	return id != "" && a.kept != nil && a.kept.background.Has(id)
}

// SettleLeft replaces the charge of a response that was left in the background
// by what it has cost. Any caller's request may have found that out.
func (a *Admission) SettleLeft(now time.Time, id string, cost limiter.Cost) {
	if a.kept == nil {
		return
	}
	if left, ok := a.kept.background.Take(id); ok {
		left.Settle(now, cost)
		a.kept.saver.Changed()
	}
}
