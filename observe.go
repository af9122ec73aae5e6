package openailb

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/summary"
	"github.com/openai-lb/caddy-openai-lb/internal/tracing"
	"github.com/openai-lb/caddy-openai-lb/internal/tunnel"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// outcome tells whose reply the client got, and what it was taken for. t is nil
// if that was an answer of our own that is not about one backend.
func (ex *exchange) outcome() (t *target, class string) {
	switch {
	case ex.ownClass != "":
		return ex.owner, ex.ownClass
	case len(ex.attempts) == 0:
		return nil, ""
	}
	a := ex.attempted()
	if ex.from != nil {
		a = ex.from
	}
	return a.target, string(a.class)
}

// clientClosedRequest is what Caddy logs as the status of a request whose
// client left.
const clientClosedRequest = 499

// refused lists the classes of answers to requests that needed a backend and
// found none, perhaps without an attempt.
var refused = []string{apierror.AllThrottled, apierror.OwnerThrottled, apierror.AllBusy, apierror.RetryLater}

// observe counts a request that is over, and tells the access log of it. err is
// the error with which reverse_proxy ended, if it did.
func (ex *exchange) observe(err error) {
	if ex.status == 0 {
		ex.unanswered(err)
	}
	t, class := ex.outcome()
	if t != nil {
		ex.observeTokens(t, verdict.Class(class))
	}
	for i := range ex.attempts {
		ex.endAttempt(&ex.attempts[i])
	}
	if server, ok := ex.request.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok && server.Logs != nil {
		if extra, ok := ex.request.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
			extra.Set(zap.Object("openai_lb", ex.summary()))
		}
	}
	m := ex.balancer.metrics
	if len(ex.attempts) > 0 || slices.Contains(refused, class) {
		m.Attempts(len(ex.attempts))
	}
	m.Affinity(affinity.Cache, string(ex.asked.affinity.Result))
	m.Affinity(ex.home.Result())
	whose := ex.balancer.ownMetrics
	if t != nil && !ex.ours {
		whose = t.metrics
	}
	whose.Answered(ex.caller.Label, ex.modelLabel(), class, ex.status, ex.duration, ex.firstByte)
}

// observeTokens counts the tokens of the reply, of which the last attempt is
// the one that the client got, if it has any.
func (ex *exchange) observeTokens(t *target, class verdict.Class) {
	known := ex.tokens.Known()
	if known {
		ex.attempted().span.Used(ex.tokens.Input, ex.tokens.Output)
	}
	switch {
	case known:
		t.metrics.Used(ex.caller.Label, ex.modelLabel(), ex.attempted().deployment, ex.tokens)
	case class == verdict.Served && ex.status == http.StatusOK && ex.asked.infers:
		t.metrics.UsedUnknown(ex.attempted().deployment)
	}
}

// observeThrottled records that the client gets a 429 because every backend that
// may get the request throttles.
func (ex *exchange) observeThrottled(now time.Time) {
	switch r := ex.whoRefuses(now); {
	case !r.all || r.throttled == nil:
	case r.object != "":
		ex.owner = r.throttled
		ex.owner.metrics.OwnerThrottled()
	default:
		ex.balancer.metrics.AllThrottled()
		ex.balancer.events.AllThrottled()
	}
}

// observeForwarded records that the client gets the reply of a backend.
func (ex *exchange) observeForwarded(class verdict.Class) {
	if !ex.balancer.forward || !class.Promise() {
		return
	}
	ex.observeThrottled(time.Now())
}

// unanswered says what became of a request that got no answer of a backend's or
// of ours.
func (ex *exchange) unanswered(err error) {
	class := apierror.Unsent
	var failure caddyhttp.HandlerError
	switch ex.status = http.StatusInternalServerError; {
	case ex.request.Context().Err() != nil:
		class, ex.status = string(verdict.ClientLeft), clientClosedRequest
	case errors.As(err, &failure) && failure.StatusCode != 0:
		ex.status = failure.StatusCode
	}
	if len(ex.attempts) == 0 {
		ex.ownClass = class
	} else if a := ex.attempted(); a.class == "" {
		a.class = verdict.Class(class)
	}
}

// observeAttempt records what a reply to the current attempt says, and counts
// the attempt if it is over. The reply of any other may still break off.
func (ex *exchange) observeAttempt(a *attempt, r *reply) {
	if r.class.Failover() || ex.balancer.plain {
		ex.endAttempt(a)
	}
	m := a.target.metrics
	if m == nil {
		return
	}
	if r.class == verdict.Throttled {
		m.Throttled(string(r.source))
	}
	if r.res != nil && !a.target.backend.passesThrough() { // the limits would be the caller's
		m.Saw(a.deployment, r.res.Header)
	}
}

// observeFailover counts that the request goes on to another backend, if it was
// at one before.
func (ex *exchange) observeFailover() {
	if len(ex.attempts) == 0 {
		return
	}
	if last := ex.attempted(); last.over {
		last.target.metrics.FailedOver(string(last.class))
	}
}

// endAttempt counts an attempt of which it is known what came of it, and ends
// its span.
func (ex *exchange) endAttempt(a *attempt) {
	if a.over || a.class == "" {
		return
	}
	a.over = true
	a.span.End(a.status, string(a.class), a.class == verdict.Served)
	a.target.metrics.Attempted(a.deployment, string(a.class))
}

// startSpan begins the span of the current attempt, if requests are traced.
func (ex *exchange) startSpan(ctx context.Context) {
	ex.attempted().span = tracing.Start(ctx, func() tracing.Attempt {
		b := ex.current.backend
		return tracing.Attempt{
			Method: tunnel.MethodOf(ex.request), Operation: openaiapi.ParsePath(ex.request.URL.EscapedPath()).Operation,
			Model: ex.model(), Stream: ex.asked.body.Stream,
			Pool: ex.balancer.Name, Backend: ex.current.Name, Azure: b.azure, Address: ex.current.upstream.Dial,
		}
	})
}

// modelLabel is the label in metrics of the model that the client named.
func (ex *exchange) modelLabel() string { return ex.balancer.models.Label(ex.asked.model) }

// deploymentLabel is the label in metrics of what the backend calls that model.
func (ex *exchange) deploymentLabel(t *target) string {
	return metrics.Deployment(t.Member, t.backend.nameOf(ex.asked.model))
}

// summary is what placeholders and the access log say of the request.
func (ex *exchange) summary() *summary.Summary {
	s := &summary.Summary{
		Pool: ex.balancer.Name, Caller: ex.caller.Name, Model: pool.ModelKey(ex.asked.model), FirstByte: ex.firstByte, Tokens: ex.tokens,
		Affinity: ex.home.Why(ex.asked.affinity), AffinityResult: ex.home.CameTo(ex.asked.affinity),
	}
	if ex.aborted {
		s.Aborted, s.Duration = true, ex.duration
		s.Tokens, s.Estimated = ex.usage.Estimate(ex.asked.promptCost)
	}
	t, class := ex.outcome()
	if s.Class = class; t != nil {
		s.Backend = t.Name
	}
	for _, a := range ex.attempts {
		s.Attempts = append(s.Attempts, summary.Attempt{Backend: a.target.Name, Class: string(a.class)})
	}
	return s
}
