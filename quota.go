package openailb

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// hasQuota reports whether the request counts for the backend's limits, as far as they are known: those of
// inference. With the caller's own credential, the limits would be the caller's.
func (ex *exchange) hasQuota(t *target) bool {
	return ex.api.Kind.Infers() && !t.backend.Credentials.Passthrough
}

// knowsQuota reports whether anything depends on what is left of the backends' limits.
func (b *balancer) knowsQuota() bool { return b.Pool.Steers || b.rateLimits == rateLimitsOfPool }

// deduct deducts the request from what is left of the backend's limits.
func (ex *exchange) deduct(t *target) quota.Mark {
	if !ex.balancer.knowsQuota() || !ex.hasQuota(t) {
		return quota.Mark{}
	}
	return t.Deduct(ex.benchModel(t.backend), ex.api.Cost)
}

// observeQuota records how much of the backend's quota is used, and what is left of it. Only now it may be
// known that there is such a model, so the request asks for it once more.
func (ex *exchange) observeQuota(t *target, r *attempt.Reply, now time.Time) {
	if r.Response == nil || !ex.hasQuota(t) || ex.balancer.tiers == nil && !ex.balancer.knowsQuota() {
		return
	}
	model := ex.benchModel(t.backend)
	meter := t.Quota(model)
	if meter == nil {
		return
	}
	try := ex.attempted()
	if ex.balancer.tiers != nil {
		meter.Ask(ex.admission.Tier(), try.started)
	}
	meter.See(quota.Reply{Header: r.Response.Header, Throttles: r.Class.Promise(), Mark: try.mark, Sent: try.started}, model, now)
}

// Steered implements pool.Request.
func (ex *exchange) Steered(m *pool.Member) {
	t := ex.balancer.targets[m.Index]
	t.metrics.Steered(ex.deploymentLabel(t))
}
