package openailb

import (
	"cmp"
	"math"
	"net/http"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// bill is the charge for a request to its caller and to the caller's tier. The
// zero bill is that of a request that nothing limits.
type bill struct {
	// Reservation is the charge, once the request is admitted.
	ratelimit.Reservation
	// caller is the limiter of the request's caller, and grant what the caller
	// may use. They are nil until a limit is checked.
	caller ratelimit.Limiter
	grant  *seam.Grant
}

// billOf returns a bill for the caller of a request, who has limits.
func (d *reader) billOf(q *request, now time.Time) bill {
	return bill{caller: d.admission.Caller(now, q.caller.Name), grant: q.grant}
}

// refused counts the refusal of the request by a limit.
func (b *bill) refused(refusal *ratelimit.Refusal) { b.caller.Refused(time.Now(), refusal) }

// reserved counts a request that was refused because the rest of the backends'
// limits is reserved for other tiers.
func (b *bill) reserved() {
	if b.caller != nil {
		b.caller.RefusedBy(time.Now(), ratelimit.ByReserve)
	}
}

// upload counts a request as in flight while its body is received. If the
// caller has too many requests, it returns the refusal. Otherwise the caller's
// Uploaded must be called later.
func (b *bill) upload() *ratelimit.Refusal {
	refusal := b.caller.Upload()
	if refusal != nil {
		b.refused(refusal)
	}
	return refusal
}

// countsTokens reports whether a limit needs the tokens of the reply.
func (b *bill) countsTokens() bool { return b.grant != nil && b.grant.LimitsTokens }

// follow charges the output of a stream while it passes, as far as it exceeds
// the estimates of the caller's limits and of the backend's quotas.
func (b *bill) follow(r *usage.Reader, c *charge) {
	least := int64(math.MaxInt64)
	if b.countsTokens() && b.Open() {
		_, least = b.Estimated()
		r.Follow(b, least)
	}
	if c != nil {
		_, output := c.Estimated()
		r.Follow(bothSpend{b, c}, min(least, output))
	}
}

// Spend implements usage.Spender.
func (b *bill) Spend(output int64) { b.Reservation.Spend(time.Now(), output) }

// bothSpend charges the output of a stream to the caller's limits and to the
// backend's quotas.
type bothSpend struct {
	*bill
	charge *charge
}

// Spend implements usage.Spender.
func (b bothSpend) Spend(output int64) {
	if b.countsTokens() {
		b.bill.Spend(output)
	}
	b.charge.Spend(time.Now(), output)
}

// rateLimits returns, for each kind, the caller's limit of a request for the
// model with the smallest fraction left. ok is false if the caller has none.
func (b *bill) rateLimits(now time.Time, model string) (l quota.Limits, ok bool) {
	if b.grant == nil || !b.grant.Limited {
		return l, false
	}
	for kind, use := range b.caller.Tightest(now, model) {
		l[kind] = quota.Fields{Limit: use.Allowed, Remaining: use.Left(), Reset: use.Reset, Known: use.Limit.Amount > 0}
	}
	return l, true
}

// settle replaces the estimate by the cost of the finished request, and records
// its usage. A background response that has reported no tokens yet is left
// open: the reply that reports them settles it.
func (b *bill) settle(lb *balancer, q *request, s *search, o *outcome) {
	if o.status == http.StatusSwitchingProtocols && q.socket != nil {
		return // its responses have bills of their own
	}
	// The time is read again: to the limits, a time that was calculated from
	// one before the wall clock was set would be a clock that is set back.
	now, cost, limited, leftID := time.Now(), b.cost(q, s, o), b.Open(), ""
	goesOn := q.Body.Background && cost.Prompt > 0 && !o.tokens.Known()
	if goesOn {
		limit, _ := q.OutputLimit()
		_, output := b.Estimated()
		cost.Output, leftID = max(limit, output), o.usage.ID()
	}
	if cost.Requests > 0 {
		lb.recordUsage(q, s, o, seam.Usage{Time: now, Cost: cost, LaterID: leftID})
	}
	switch {
	case lb.admission == nil:
	case goesOn:
		lb.admission.Leave(now, b.Reservation, leftID)
	default:
		lb.admission.Settle(now, b.Reservation, cost)
	}
	if c := s.charge(); c != nil && c.Open() {
		quotaBill := bill{Reservation: c.Reservation}
		if cost = quotaBill.cost(q, s, o); cost == (ratelimit.Cost{}) {
			cost = c.unserved()
		}
		if goesOn {
			lb.quotas.Leave(now, c.Reservation, leftID)
		} else {
			c.settle(cost)
		}
	}
	if id := q.ResponseID(); id != "" && o.tokens.Known() {
		lb.usage.Settle(id, o.tokens, o.serviceTier)
		cost = ratelimit.Cost{Requests: 1, Prompt: o.tokens.Input, Output: o.tokens.Output}
		for _, limits := range [...]seam.Limits{lb.admission, lb.quotas} {
			if limits != nil {
				limits.SettleLeft(now, id, cost)
			}
		}
		s.wait.queues.Wake(now, "")
	}
	if limited {
		s.wait.queues.Wake(now, q.caller.Name, b.grant.LimitedModels...)
	}
}

// recordUsage records the usage of a request. The model's name is recorded as
// sent only if a model has answered, because clients can make up any name;
// otherwise a label is recorded. A response in a WebSocket has no reply of its
// own, but reports its tokens.
func (b *balancer) recordUsage(q *request, s *search, o *outcome, u seam.Usage) {
	if b.usage == nil {
		return
	}
	u.Model = pool.ModelKey(q.Model)
	if u.Cost.Prompt == 0 || o.reply == nil && !o.tokens.Known() {
		u.Model = b.models.Label(q.Model)
	}
	u.Caller, u.Backend, u.ServiceTier, u.Reported = q.caller.Name, o.answeredBy(s).target.Name, o.serviceTier, o.tokens
	b.usage.Record(u)
}

// cost returns the cost of the request to its caller. The balancer's own
// refusals and failures of backends cost nothing. A client error costs one
// request, and so does a failure that the request itself caused.
func (b *bill) cost(q *request, s *search, o *outcome) ratelimit.Cost {
	a := o.answeredBy(s)
	if a == nil {
		return ratelimit.Cost{}
	}
	failed := o.status >= 500 || o.status == http.StatusTooManyRequests
	class := a.outcome()
	if a.end.Broken != nil {
		class = verdict.BrokenStream // whoever's fault that is: the backend has served what there is of it
	}
	switch class {
	case verdict.Served, verdict.BrokenStream, verdict.ClientLeft, verdict.ClientLeftWaiting:
		if !failed && (o.status < 400 || class != verdict.Served) {
			return b.tokensCost(q, o, class)
		}
	case verdict.ClientError:
		failed = false
	default:
		failed = true
	}
	if failed && !s.attempts.failedByItself() {
		return ratelimit.Cost{}
	}
	return ratelimit.Cost{Requests: 1}
}

// prompt returns the estimated tokens of the prompt: the estimate of the limits
// if they needed one, else one from its length.
func (b *bill) prompt(q *request) int64 {
	prompt, _ := b.Estimated()
	return cmp.Or(prompt, q.PromptTokens(nil))
}

// tokensCost returns the cost of the reply, which is the tokens that it
// reports. Without a report, it is the estimate of the prompt, plus the fewest
// tokens that the reply's content can have. A reply that was cut costs at least
// the request's output estimate, because the backend may have produced more.
func (b *bill) tokensCost(q *request, o *outcome, class verdict.Class) ratelimit.Cost {
	if q.Kind.IsHandshake() {
		return ratelimit.Cost{Requests: 1}
	}
	tokens, estimated, prompt := o.tokens, false, b.prompt(q)
	if prompt == 0 && (!tokens.Known() || q.showsStored()) {
		return ratelimit.Cost{Requests: 1} // no model has answered
	}
	cut := o.aborted || class == verdict.BrokenStream
	if cut || !tokens.Known() {
		tokens, estimated = o.usage.Estimate(prompt)
	}
	if !tokens.Known() {
		tokens.Input, estimated = prompt, true
	}
	if limit, ok := q.OutputLimit(); estimated && ok && limit == 0 {
		tokens.Output = 0 // some repeat what they were asked
	} else if estimated && cut {
		_, output := b.Estimated()
		tokens.Output = max(tokens.Output, output)
	}
	return ratelimit.Cost{Requests: 1, Prompt: tokens.Input, Output: tokens.Output, Counted: !estimated && !cut,
		Model: q.Model}
}
