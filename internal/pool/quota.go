package pool

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Quota returns the meter of a model at the member. It is nil for a model that the member does not
// know: clients can make up models.
func (m *Member) Quota(model string) *quota.Meter {
	q := m.health.quotas.Of(ModelKey(model))
	if q == nil && m.Knows(model) {
		return m.health.quotas.Make(ModelKey(model))
	}
	return q
}

// Ask records that a request asks for its model, so that worse tiers leave room for such requests.
func (p *Pool) Ask(r Request, now time.Time) {
	for _, m := range p.Members {
		if model, ok := r.ModelAt(m); ok {
			if q := m.Quota(model); q != nil {
				q.Ask(r.Tier().Number, now)
			}
		}
	}
}

// PassedOver reports whether the member is used above the ceiling of the request's tier.
func (m *Member) PassedOver(r Request, now time.Time) bool {
	model, ok := r.ModelAt(m)
	return ok && m.isAbove(r, model, now)
}

// isAbove reports whether the model at the member is used above the ceiling of the request's tier.
func (m *Member) isAbove(r Request, model string, now time.Time) bool {
	t := r.Tier()
	if t.Ceiling == 0 {
		return false
	}
	q := m.health.quotas.Of(ModelKey(model))
	return q != nil && q.Above(t, now)
}

// quotaWait returns how long the request waits because of the ceiling of its tier.
func (m *Member) quotaWait(r Request, model string, now time.Time) time.Duration {
	if q := m.health.quotas.Of(ModelKey(model)); q != nil {
		return q.Wait(r.Tier(), now)
	}
	return 0
}
