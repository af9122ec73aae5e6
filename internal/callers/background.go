package callers

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// Leave ends the request of a response that goes on in the background. The
// request is charged with its maximum output, until a reply to any request
// reports the real use. id may be empty.
func (a *Admission) Leave(now time.Time, id string) {
	if !a.Open() {
		return
	}
	if later := a.reservation.Leave(now); id != "" {
		a.kept.background.Add(id, later)
	}
	a.kept.saver.Changed()
}

// Awaits reports whether a response with this id was left in the background and
// is not settled yet.
func (a *Admission) Awaits(id string) bool {
	return id != "" && a.kept != nil && a.kept.background.Has(id)
}

// SettleLeft replaces the charge of a response that was left in the background
// with its real cost. A request of any caller may have returned that cost.
func (a *Admission) SettleLeft(now time.Time, id string, cost limiter.Cost) {
	if a.kept == nil {
		return
	}
	if left, ok := a.kept.background.Take(id); ok {
		left.Settle(now, cost)
		a.kept.saver.Changed()
	}
}
