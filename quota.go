package openailb

import (
	"net/http"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
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

// observeQuota records how much of the backend's quota is used, and what is left of it.
func (ex *exchange) observeQuota(t *target, r *attempt.Reply, now time.Time) {
	ex.readQuota(t, r, now)
	ex.returnQuota(r)
}

// returnQuota gives back what was deducted for an attempt that has ended, if the backend has not executed it.
func (ex *exchange) returnQuota(r *attempt.Reply) {
	if r.Unexecuted() {
		ex.attempted().mark.Return()
	}
}

// readQuota reads what the header of a reply says of the backend's quota. Only now it may be known that there is such
// a model, so the request asks for it once more.
func (ex *exchange) readQuota(t *target, r *attempt.Reply, now time.Time) {
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
	meter.See(quota.Reply{Header: r.Response.Header, Throttles: r.Class.Promise(), Served: r.Class == verdict.Served, Cost: ex.api.Cost, Mark: try.mark, Sent: try.started}, model, now)
}

// Steered implements pool.Request.
func (ex *exchange) Steered(m *pool.Member) {
	t := ex.balancer.targets[m.Index]
	t.metrics.Steered(ex.deploymentLabel(t))
}

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

// The values of ratelimit_headers: whose limits a reply names.
const (
	rateLimitsOfCaller  = "caller"
	rateLimitsOfPool    = "pool"
	rateLimitsOfBackend = "backend"
	rateLimitsOff       = "off"
)

var rateLimitsOf = []string{rateLimitsOfCaller, rateLimitsOfPool, rateLimitsOfBackend, rateLimitsOff}

// setRateLimits makes the header of a reply say what ratelimit_headers wants.
func (ex *exchange) setRateLimits(header http.Header) {
	switch ex.balancer.rateLimits {
	case rateLimitsOff:
		quota.RemoveFields(header)
	case rateLimitsOfBackend: // what came from it stays
	case rateLimitsOfPool:
		ex.balancer.Pool.Limits(ex, time.Now()).Set(header, ex.isAzure())
	default:
		if ex.admission.Limited() {
			ex.admission.Limits(time.Now()).Set(header, ex.isAzure())
		}
	}
}

// isAzure reports whether the client speaks Azure's dialect.
func (ex *exchange) isAzure() bool {
	return ex.api.Route.Dialect == openaiapi.AzureV1 || ex.api.Route.Dialect == openaiapi.AzureClassic
}
