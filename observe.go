package openailb

import (
	"cmp"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// outcome is what the client gets.
type outcome struct {
	// own is the balancer's own answer, after which no further backend is tried. Without a Class, it has that of the last
	// attempt. Without a Response, the client has left.
	own apierror.Answer
	// reply is that of a backend, if the client gets one as it comes.
	reply *attempt.Reply
	// status is that of the answer.
	status int
	// from is the attempt whose reply was kept and is the answer, if one was.
	from *try
	// owner is the backend of the only account that may get the request, if it
	// throttles.
	owner *target
	// usage reads the client's reply. tokens are what it found, once that is over.
	usage  *usage.Reader
	tokens usage.Tokens
	// serviceTier is the one that served the request, once its reply has named it.
	serviceTier string
	// duration is how long the request took, once it is over, and aborted reports
	// whether its reply was aborted then.
	duration time.Duration
	aborted  bool
	// ours reports whether the client got an answer of the balancer's own.
	ours bool
}

// end records that the request is over.
func (o *outcome) end(in *intent, aborted bool) {
	o.duration, o.aborted = time.Since(in.started), aborted
	o.usage.Close()
	o.tokens, o.serviceTier = o.usage.Tokens(), o.usage.ServiceTier()
}

// timeToFirstByte is how long after the request the first byte of a backend's reply went to the client. 0: it gets none.
func (o *outcome) timeToFirstByte(in *intent) time.Duration {
	if o.reply == nil {
		return 0
	}
	return o.reply.FirstByte().Sub(in.started)
}

// answered is the attempt whose reply the client got, or the last one. It is nil if there is none.
func (o *outcome) answered(t *tries) *try {
	if o.from != nil {
		return o.from
	}
	return t.last()
}

// whose returns whose reply the client got, and its class. from is nil
// if that was an answer of our own that is not about one backend.
func (o *outcome) whose(t *tries) (from *target, class string) {
	if o.own.Class != "" {
		return o.owner, o.own.Class
	}
	if a := o.answered(t); a != nil {
		return a.target, string(a.class)
	}
	return nil, ""
}

// clientClosedRequest is what Caddy logs as the status of a request whose
// client left.
const clientClosedRequest = 499

// unanswered records the outcome of a request that got neither a backend's answer
// nor the balancer's own. err is the error with which reverse_proxy ended, if it did.
func (o *outcome) unanswered(in *intent, t *tries, err error) {
	class := apierror.Unsent
	var failure caddyhttp.HandlerError
	switch o.status = http.StatusInternalServerError; {
	case in.request.Context().Err() != nil:
		class, o.status = string(verdict.ClientLeftWaiting), clientClosedRequest
	case errors.As(err, &failure) && failure.StatusCode != 0:
		o.status = failure.StatusCode
	}
	if a := t.last(); a == nil {
		o.own.Class = class
	} else if a.class == "" {
		a.class = verdict.Class(class)
	}
}

// refused lists the classes of answers to requests that needed a backend and
// found none, perhaps without an attempt.
var refused = []string{apierror.AllThrottled, apierror.OwnerThrottled, apierror.AllBusy, apierror.RetryLater}

// report counts a request that is over, and ends the attempts that learn left open.
func (b *balancer) report(in *intent, t *tries, o *outcome) {
	from, class := o.whose(t)
	if from != nil {
		b.countTokens(in, t, o, from, class)
		countServiceTier(in, o, from, class)
	}
	for i := range t.list {
		t.list[i].end()
	}
	m := b.metrics
	if len(t.list) > 0 || slices.Contains(refused, class) {
		m.Attempts(len(t.list))
	}
	if t.turn.result != "" {
		m.Waited(string(t.turn.result), t.turn.waited)
	}
	m.Affinity(affinity.Cache, string(t.ask.Affinity.Result))
	m.Affinity(in.placement.Result())
	whose := b.ownMetrics
	if from != nil && !o.ours {
		whose = from.metrics
	}
	whose.Answered(in.caller.Label, b.models.Label(in.Model), class, o.status, o.duration, o.timeToFirstByte(in))
}

// countTokens counts the tokens of the reply. If it reports any, it is that of the last attempt.
func (b *balancer) countTokens(in *intent, t *tries, o *outcome, from *target, class string) {
	switch a := t.last(); {
	case o.tokens.Known():
		a.span.Used(o.tokens.Input, o.tokens.Output)
		from.metrics.Used(in.caller.Label, b.models.Label(in.Model), a.deployment, cmp.Or(o.serviceTier, openaiapi.DefaultTier), o.tokens)
	case class == string(verdict.Served) && o.status == http.StatusOK && in.Kind.Infers():
		from.metrics.UsedUnknown(a.deployment)
	}
}

// countServiceTier counts the request if it was served, and a backend was asked for a service tier that costs something else.
func countServiceTier(in *intent, o *outcome, from *target, class string) {
	asked := askedTier(in, from)
	if (asked == openaiapi.Flex || asked == openaiapi.Priority) && class == string(verdict.Served) && o.status < 300 {
		from.metrics.ServiceTier(asked, o.serviceTier)
	}
}

// askedTier is the service tier that the backend was asked for, by its name in logs and metrics. Without a backend it is
// that of the client.
func askedTier(in *intent, from *target) string {
	if from == nil {
		return openaiapi.TierName(in.ServiceTier())
	}
	return openaiapi.TierName(from.backend.TierOf(&in.Request))
}

// countThrottled counts that the client gets a 429 because every backend that
// may get the request throttles.
func (b *balancer) countThrottled(o *outcome, r refusals) {
	switch {
	case !r.all || r.Throttled == nil:
	case r.object != "":
		o.owner = b.targets[r.Throttled.Index]
		o.owner.metrics.OwnerThrottled()
	default:
		b.metrics.AllThrottled()
		b.events.AllThrottled()
	}
}

// countReserved counts the backends that were passed over for a backend of their priority or a worse one,
// or for none, because only shares of other tiers are left of them.
func (b *balancer) countReserved(ask *pool.Ask, chosen *pool.Member, now time.Time) {
	if ask.Tier.Shares == nil {
		return
	}
	for _, t := range b.targets {
		if chosen != nil && t.Priority > chosen.Priority {
			return
		}
		if t.PassedOver(ask, now) {
			t.metrics.PassedOver(ask.Tier.Name)
		}
	}
}

// deploymentLabel is the label in metrics of what a backend calls the model that is asked for.
func deploymentLabel(in *intent, t *target) string {
	return metrics.Deployment(t.Member, t.backend.NameOf(in.Model))
}

// summary is what placeholders and the access log say of the request.
func (b *balancer) summary(in *intent, t *tries, o *outcome, tier int) *observe.Summary {
	s := &observe.Summary{
		Pool: b.Name, Caller: in.caller.Name, Model: pool.ModelKey(in.Model), FirstByte: o.timeToFirstByte(in), Tokens: o.tokens, Tier: tier, Limit: o.own.Limit,
		TierServed: o.serviceTier,
		Affinity:   in.placement.Why(t.ask.Affinity), AffinityResult: in.placement.CameTo(t.ask.Affinity), Waited: t.turn.waited,
	}
	if o.aborted {
		s.Aborted, s.Duration = true, o.duration
		s.Tokens, s.Estimated = o.usage.Estimate(in.PromptCost())
	}
	from, class := o.whose(t)
	if s.Class = class; from != nil {
		s.Backend = from.Name
	}
	s.TierRequested = askedTier(in, from)
	if s.TierRequested == "" && o.serviceTier == openaiapi.DefaultTier {
		s.TierServed = "" // as of nearly all requests
	}
	for i := range t.list {
		s.Attempts = append(s.Attempts, observe.Tried{Backend: t.list[i].target.Name, Class: string(t.list[i].class)})
	}
	return s
}

// addToLog adds a field to what the access log says of the request, if there is one.
func addToLog(r *http.Request, field func() zap.Field) {
	if server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok && server.Logs != nil {
		if extra, ok := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
			extra.Set(field())
		}
	}
}
