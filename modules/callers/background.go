package callers

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// Leave implements seam.Admission.
func (c *Callers) Leave(now time.Time, r *limiter.Reservation, id string) {
	if !r.Open() {
		return
	}
	if later := r.Leave(now); id != "" {
		c.kept.background.Add(id, later)
	}
	c.kept.saver.Changed()
}

// Awaits implements seam.Admission.
func (c *Callers) Awaits(id string) bool { return id != "" && c.kept.background.Has(id) }

// SettleLeft implements seam.Admission.
func (c *Callers) SettleLeft(now time.Time, id string, cost limiter.Cost) {
	if left, ok := c.kept.background.Take(id); ok {
		left.Settle(now, cost)
		c.kept.saver.Changed()
	}
}
