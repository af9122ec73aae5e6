package openailb

import (
	"cmp"
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// bill is the charge for a request to its caller and to the caller's tier.
type bill struct{ callers.Admission }

// settle replaces the estimate by the cost of the finished request, and records
// its usage. A background response that has reported no tokens yet is left
// open: the reply that reports them settles it.
func (b *bill) settle(lb *balancer, q *request, s *search, o *outcome) {
	if o.status == http.StatusSwitchingProtocols && q.socket != nil {
		return // its responses have bills of their own
	}
	now, cost, limited, leftID := q.started.Add(o.duration), b.cost(q, s, o), b.Open(), ""
	if q.Body.Background && cost.Prompt > 0 && !o.tokens.Known() {
		limit, _ := q.OutputLimit()
		cost.Output, leftID = max(limit, b.Output()), o.usage.ID()
		b.Leave(now, leftID)
	} else {
		b.Settle(now, cost)
	}
	if cost.Requests > 0 {
		lb.recordUsage(q, s, o, seam.Usage{Time: now, Cost: cost, LaterID: leftID})
	}
	if id := q.ResponseID(); id != "" && o.tokens.Known() {
		lb.usage.Settle(id, o.tokens, o.serviceTier)
		b.SettleLeft(now, id, limiter.Cost{Requests: 1, Prompt: o.tokens.Input, Output: o.tokens.Output})
	}
	if limited {
		s.wait.queues.Wake(now, q.caller.Name)
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
func (b *bill) cost(q *request, s *search, o *outcome) limiter.Cost {
	a := o.answeredBy(s)
	if a == nil {
		return limiter.Cost{}
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
		return limiter.Cost{}
	}
	return limiter.Cost{Requests: 1}
}

// prompt returns the estimated tokens of the prompt: the estimate of the limits
// if they needed one, else one from its length.
func (b *bill) prompt(q *request) int64 { return cmp.Or(b.Prompt(), q.PromptTokens(nil)) }

// tokensCost returns the cost of the reply, which is the tokens that it
// reports. Without a report, it is the estimate of the prompt, plus the fewest
// tokens that the reply's content can have. A reply that was cut costs at least
// the request's output estimate, because the backend may have produced more.
func (b *bill) tokensCost(q *request, o *outcome, class verdict.Class) limiter.Cost {
	if q.Kind.IsHandshake() {
		return limiter.Cost{Requests: 1}
	}
	tokens, estimated, prompt := o.tokens, false, b.prompt(q)
	if prompt == 0 && (!tokens.Known() || q.showsStored()) {
		return limiter.Cost{Requests: 1} // no model has answered
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
		tokens.Output = max(tokens.Output, b.Output())
	}
	return limiter.Cost{Requests: 1, Prompt: tokens.Input, Output: tokens.Output, Counted: !estimated && !cut,
		Model: q.Model}
}
