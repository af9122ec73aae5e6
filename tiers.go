package openailb

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Tier implements pool.Request. Ceilings do not apply to a request for an object that one account stores,
// because no other backend can serve it, nor to operations other than inference, which have separate limits.
// While a reload goes on, callers may still have, or have already, the tiers of the other config.
func (ex *exchange) Tier() quota.Tier {
	n := ex.admission.Tier()
	if n == 0 || n >= len(ex.balancer.tiers) || !ex.api.Kind.Infers() || !ex.api.placement.Anywhere() {
		return quota.Tier{Number: n}
	}
	return ex.balancer.tiers[n]
}

// ask has worse tiers leave room for requests such as this one, if there are any.
func (ex *exchange) ask(now time.Time) {
	if len(ex.tries.attempts) == 0 && ex.admission.Tier() < len(ex.balancer.tiers)-1 {
		ex.balancer.Pool.Ask(ex, now)
	}
}

// observeCeiling counts the backends that were passed over for a backend of their priority or a worse one,
// or for none, because they are used above the ceiling of the request's tier.
func (ex *exchange) observeCeiling(chosen *pool.Member, now time.Time) {
	if len(ex.tries.attempts) > 0 || ex.Tier().Ceiling == 0 {
		return
	}
	for _, t := range ex.balancer.targets {
		if chosen != nil && t.Priority > chosen.Priority {
			return
		}
		if t.PassedOver(ex, now) {
			t.metrics.PassedOver(ex.Tier().Name)
		}
	}
}
