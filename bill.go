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

// bill is what a request is charged to its caller, and its tier.
type bill struct{ callers.Admission }

// settle replaces the estimate by what the request has cost, and records that.
// The request is over.
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

// recordUsage records what a request has used. Only a model that has answered
// may have any name. A response in a WebSocket has no reply of its own, but
// reports its tokens.
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

// cost returns what the request has cost its caller. What the balancer refuses
// costs nothing, and neither does a failure of the backends. An error of the
// client's own costs a request, and so does a failure because of the request.
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

// prompt returns the estimate of the prompt's tokens, by its length if no limit
// needed a better one.
func (b *bill) prompt(q *request) int64 { return cmp.Or(b.Prompt(), q.PromptTokens(nil)) }

// tokensCost returns what the reply has cost: the tokens that it reports.
// Without a report, these are the estimate of the prompt and what the content
// has at least. A reply that was cut would have more: it costs the request's
// estimate at least.
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
	return limiter.Cost{Requests: 1, Prompt: tokens.Input, Output: tokens.Output, Counted: !estimated && !cut, Model: q.Model}
}
