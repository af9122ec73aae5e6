package callers

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Leave implements seam.Limits.
func (u keptUse) Leave(now time.Time, r ratelimit.Reservation, id string) {
	if !r.Open() {
		return
	}
	if later := chargeOf(r).Leave(now); id != "" {
		u.kept.background.Add(id, later)
	}
	u.kept.saver.Changed()
}

// Awaits implements seam.Limits.
func (u keptUse) Awaits(id string) bool { return id != "" && u.kept.background.Has(id) }

// SettleLeft implements seam.Limits.
func (u keptUse) SettleLeft(now time.Time, id string, cost ratelimit.Cost) {
	if left, ok := u.kept.background.Take(id); ok {
		left.Settle(now, cost)
		u.kept.saver.Changed()
	}
}
