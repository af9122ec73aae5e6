package openailb

import (
	"cmp"
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/ledger"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// bill is what a request is charged to its caller, and its tier.
type bill struct{ callers.Admission }

// settle replaces the estimate by what the request has cost, for the ledger, too. The request is over.
func (b *bill) settle(lb *balancer, in *intent, t *tries, o *outcome) {
	if o.status == http.StatusSwitchingProtocols && in.socket.IsAccepted() {
		return // its responses have bills of their own
	}
	now, cost, limited, leftID := in.started.Add(o.duration), b.cost(in, t, o), b.Open(), ""
	if in.Body.Background && cost.Prompt > 0 && !o.tokens.Known() {
		limit, _ := in.OutputLimit()
		cost.Output, leftID = max(limit, b.Output()), o.usage.ID()
		b.Leave(now, leftID)
	} else {
		b.Settle(now, cost)
	}
	if cost.Requests > 0 {
		lb.ledger.Add(now, lb.row(in, t, o, cost), ledger.UseOf(cost, o.tokens), leftID)
	}
	if id := in.ResponseID(); id != "" && o.tokens.Known() {
		lb.ledger.SettleLeft(id, o.tokens, o.serviceTier)
		b.SettleLeft(now, id, meter.Cost{Requests: 1, Prompt: o.tokens.Input, Output: o.tokens.Output})
	}
	if limited {
		t.turn.lists.Wake(now, in.caller.Name)
	}
}

// row returns the row of the ledger for a request. Only a model that has answered may have any name.
func (b *balancer) row(in *intent, t *tries, o *outcome, cost meter.Cost) ledger.Key {
	model := pool.ModelKey(in.Model)
	if cost.Prompt == 0 || o.reply == nil {
		model = b.models.Label(in.Model)
	}
	return ledger.Key{Caller: in.caller.Name, Model: model, Backend: o.answered(t).target.Name, ServiceTier: o.serviceTier}
}

// cost returns what the request has cost its caller. What the balancer refuses costs nothing, and neither does a
// failure of the backends. An error of the client's own costs a request, and so does a failure because of the request.
func (b *bill) cost(in *intent, t *tries, o *outcome) meter.Cost {
	a := o.answered(t)
	if a == nil {
		return meter.Cost{}
	}
	failed := o.status >= 500 || o.status == http.StatusTooManyRequests
	switch a.class {
	case verdict.Served, verdict.BrokenStream, verdict.ClientLeft, verdict.ClientLeftWaiting:
		if !failed && (o.status < 400 || a.class != verdict.Served) {
			return b.tokensCost(in, o, a.class)
		}
	case verdict.ClientError:
		failed = false
	default:
		failed = true
	}
	if failed && !t.failedByItself() {
		return meter.Cost{}
	}
	return meter.Cost{Requests: 1}
}

// tokensCost returns what the reply has cost: the tokens that it reports. Without a report, these are the estimate of the
// prompt and what the content has at least. A reply that was cut would have more: it costs the request's estimate at
// least.
func (b *bill) tokensCost(in *intent, o *outcome, class verdict.Class) meter.Cost {
	if in.Kind.IsHandshake() {
		return meter.Cost{Requests: 1}
	}
	tokens, estimated, prompt := o.tokens, false, cmp.Or(b.Prompt(), in.PromptTokens(nil)) // without limits by its length
	if prompt == 0 && (!tokens.Known() || in.showsStored()) {
		return meter.Cost{Requests: 1} // no model has answered
	}
	cut := o.aborted || class == verdict.BrokenStream
	if cut || !tokens.Known() {
		tokens, estimated = o.usage.Estimate(prompt)
	}
	if !tokens.Known() {
		tokens.Input, estimated = prompt, true
	}
	if limit, ok := in.OutputLimit(); estimated && ok && limit == 0 {
		tokens.Output = 0 // some repeat what they were asked
	} else if estimated && cut {
		tokens.Output = max(tokens.Output, b.Output())
	}
	return meter.Cost{Requests: 1, Prompt: tokens.Input, Output: tokens.Output, Counted: !estimated && !cut, Model: in.Model}
}
