package openailb

import (
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// newQuotas sets up the quotas of backends: their options requests and tokens.
func (h *Handler) newQuotas(ctx caddy.Context) error {
	quotas := make(map[string][]ratelimit.Limit)
	for _, b := range h.Backends {
		if b.Quotas != nil {
			quotas[b.HealthKey] = b.Quotas
		}
	}
	if len(quotas) == 0 {
		return nil
	}
	limits, err := seam.Callers().OpenQuotas(ctx,
		seam.QuotaConfig{Pool: h.Pool, Quotas: quotas, Location: h.shared.Location, Logger: h.logger})
	if err != nil {
		return err
	}
	b := h.balancer
	b.quotas = limits
	b.Quota = func(m *pool.Member, now time.Time) (uses []ratelimit.Use) {
		if c := b.limiterOf(b.targets[m.Index], now); c != nil {
			uses = c.Snapshot(now).Limits
		}
		return uses
	}
	h.replication.Share("quotas of "+h.Pool, limits)
	return observe.On(ctx, observe.Started, limits.Start)
}

// limiterOf returns the limiter of a backend's quotas, or nil if the backend
// has none.
func (b *balancer) limiterOf(to *target, now time.Time) ratelimit.Limiter {
	if to.backend.Quotas == nil {
		return nil
	}
	return b.quotas.Caller(now, to.backend.HealthKey)
}

// quotaSearch is what a search knows of the quotas of backends.
//
// A backend whose quota refuses the request gets it as little as one that
// throttles. The chosen backend is charged before its attempt. If another
// request has used the quota up in the meantime, the search chooses again. If
// only this replica's part of the quota is used up, another backend serves; if
// none is left, the search waits once for the other replicas.
type quotaSearch struct {
	estimate ratelimit.Estimate
	// members says which backends' quotas keep the request away, for the pool.
	members pool.Quotas
	// refusals are those of the quotas, by the indexes of the backends.
	refusals []*ratelimit.Refusal
	// claims reports whether the search waits for the other replicas, and
	// claimed are the indexes of the backends for which it has.
	claims  bool
	claimed []int
	// charge is that of the backend that was chosen last. It is nil if the
	// backend has no quotas.
	charge *charge
}

// charge is the charge of an attempt to the quotas of its backend. The nil
// charge is that of a backend without quotas.
type charge struct {
	ratelimit.Reservation
	balancer *balancer
}

// settle replaces the estimate with the cost, once. The requests that wait for
// backends try again, because the cost may be less.
func (c *charge) settle(cost ratelimit.Cost) {
	if c != nil && c.Open() {
		now := time.Now()
		c.balancer.quotas.Settle(now, c.Reservation, cost)
		c.balancer.waiting.Wake(now, "")
	}
}

// unserved is the cost of an attempt that failed, although the backend may have
// executed the request: one request and its prompt.
func (c *charge) unserved() ratelimit.Cost {
	if c == nil {
		return ratelimit.Cost{}
	}
	prompt, _ := c.Estimated()
	return ratelimit.Cost{Requests: 1, Prompt: prompt}
}

// beginQuotas prepares the search for the quotas of backends, which limit
// inference.
func (s *search) beginQuotas() {
	if s.quotas == nil && s.balancer.quotas != nil && s.request.Kind.Infers() {
		n := len(s.balancer.targets)
		s.quotas = &quotaSearch{estimate: s.request.estimate(), members: pool.Quotas{Over: make([]pool.Over, n)},
			refusals: make([]*ratelimit.Refusal, n)}
		s.board.Quotas = &s.quotas.members
	}
}

// readQuotas finds out which quotas keep the request away from their backends.
func (s *search) readQuotas(now time.Time) {
	q := s.quotas
	if q == nil {
		return
	}
	for i, to := range s.balancer.targets {
		at, c := &s.board.At[i], s.balancer.limiterOf(to, now)
		q.members.Over[i], q.refusals[i] = pool.Over{}, nil
		if c == nil || !at.Takes || at.Bar == pool.Spent {
			continue
		}
		refusal := c.Check(now, q.estimate)
		if refusal == nil || q.claims && refusal.MayClaim() && !slices.Contains(q.claimed, i) {
			continue
		}
		if q.refusals[i] = refusal; refusal.Reason == ratelimit.TooLarge {
			at.Bar = pool.Unfit
		} else {
			atOnce, perSecond := s.balancer.granted(refusal, refusal.Requested)
			q.members.Over[i] = pool.Over{Until: returnOf(refusal, now), IsGuess: refusal.Reason == ratelimit.InFlight,
				AtOnce: atOnce, PerSecond: perSecond}
		}
	}
}

// chargeQuotas charges the quotas of the backend that was chosen. It reports
// false if they have no room.
func (s *search) chargeQuotas(to *pool.Member, now time.Time) bool {
	q := s.quotas
	if q == nil {
		return true
	}
	q.charge = nil
	c := s.balancer.limiterOf(s.balancer.targets[to.Index], now)
	if c == nil {
		return true
	}
	r, refusal := c.Try(now, q.estimate)
	if refusal != nil && q.claims && refusal.MayClaim() {
		q.claimed = append(q.claimed, to.Index)
		r, refusal = c.Await(q.estimate)
	}
	if refusal != nil {
		return false
	}
	q.charge = &charge{r, s.balancer}
	return true
}

// charge returns the charge of the latest attempt to the quotas of its backend.
func (s *search) charge() *charge {
	if s.quotas == nil {
		return nil
	}
	return s.quotas.charge
}

// claimQuotas makes the search wait for the other replicas, if they may leave a
// backend's quota to the request. It reports whether that is new.
func (s *search) claimQuotas() bool {
	q := s.quotas
	if q == nil || q.claims {
		return false
	}
	q.claims = slices.ContainsFunc(q.refusals, func(r *ratelimit.Refusal) bool { return r != nil && r.MayClaim() })
	return q.claims
}

// countOver counts the backends that the request passed over because of their
// quotas: those up to the priority of the chosen backend, or of any priority if
// none was chosen.
func (s *search) countOver(chosen *pool.Member, now time.Time) {
	if s.quotas == nil {
		return
	}
	for i, refusal := range s.quotas.refusals {
		to := s.balancer.targets[i]
		if refusal == nil || chosen != nil && to.Priority > chosen.Priority {
			continue
		}
		s.balancer.limiterOf(to, now).Refused(now, refusal)
		s.balancer.reportOver(to, s.request, refusal)
	}
}

// reportOver counts and logs a request, or a response in a WebSocket, that a
// backend does not get because of its quota.
func (b *balancer) reportOver(to *target, q *request, refusal *ratelimit.Refusal) {
	to.metrics.OverQuota()
	if c := b.logger.Check(zap.DebugLevel, "backend over its quota"); c != nil {
		c.Write(zap.String("backend", to.Name), q.callerField(), zap.Stringer("quota", refusal.Limit),
			zap.Int64("used", refusal.Used), zap.Int64("requested", refusal.Requested),
			zap.Duration("wait", refusal.Wait))
	}
}

// tooLarge returns the refusal of a quota that is smaller than the prompt. It
// returns nil if there is none.
func (s *search) tooLarge() *ratelimit.Refusal {
	if s.quotas == nil {
		return nil
	}
	for _, refusal := range s.quotas.refusals {
		if refusal != nil && refusal.Reason == ratelimit.TooLarge {
			return refusal
		}
	}
	return nil
}

// overQuota returns the answer to a message of a WebSocket, if the quotas of
// its backend refuse it.
func (b *balancer) overQuota(r *http.Request, refusal *ratelimit.Refusal) (answer apierror.Answer) {
	if refusal == nil {
		return answer
	}
	if refusal.Reason == ratelimit.TooLarge {
		return tooLargeFor(refusal).Answer(r)
	}
	answer = apierror.RateLimited(refusal.Wait, false, "").Answer(r)
	verdict.SetHint(answer.Header, refusal.Wait)
	return answer
}

func tooLargeFor(r *ratelimit.Refusal) apierror.Error {
	return apierror.TooLargeForQuotas(r.Limit.Unit.String(), r.Limit.Amount, r.Requested)
}
