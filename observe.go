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
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// outcome returns whose reply the client got, and its class. t is nil
// if that was an answer of our own that is not about one backend.
func (ex *exchange) outcome() (t *target, class string) {
	switch {
	case ex.own.Class != "":
		return ex.record.owner, ex.own.Class
	case len(ex.tries.attempts) == 0:
		return nil, ""
	}
	a := ex.attempted()
	if ex.record.from != nil {
		a = ex.record.from
	}
	return a.target, string(a.class)
}

// clientClosedRequest is what Caddy logs as the status of a request whose
// client left.
const clientClosedRequest = 499

// refused lists the classes of answers to requests that needed a backend and
// found none, perhaps without an attempt.
var refused = []string{apierror.AllThrottled, apierror.OwnerThrottled, apierror.AllBusy, apierror.RetryLater}

// observe counts a request that is over, and describes it in the access log. err is
// the error with which reverse_proxy ended, if it did.
func (ex *exchange) observe(err error) {
	if ex.record.status == 0 {
		ex.unanswered(err)
	}
	t, class := ex.outcome()
	if t != nil {
		ex.observeTokens(t, verdict.Class(class))
	}
	for i := range ex.tries.attempts {
		ex.endAttempt(&ex.tries.attempts[i])
	}
	if server, ok := ex.request.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok && server.Logs != nil {
		if extra, ok := ex.request.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
			extra.Set(zap.Object("openai_lb", ex.summary()))
		}
	}
	m := ex.balancer.metrics
	if len(ex.tries.attempts) > 0 || slices.Contains(refused, class) {
		m.Attempts(len(ex.tries.attempts))
	}
	if t := ex.tries.turn; t != nil && t.result != "" {
		m.Waited(string(t.result), t.waited)
	}
	m.Affinity(affinity.Cache, string(ex.api.affinity.Result))
	m.Affinity(ex.api.placement.Result())
	whose := ex.balancer.ownMetrics
	if t != nil && !ex.record.ours {
		whose = t.metrics
	}
	whose.Answered(ex.api.caller.Label, ex.modelLabel(), class, ex.record.status, ex.record.duration, ex.record.firstByte)
}

// observeTokens counts the tokens of the reply, of which the last attempt is
// the one that the client got, if it has any.
func (ex *exchange) observeTokens(t *target, class verdict.Class) {
	known := ex.record.tokens.Known()
	if known {
		ex.attempted().span.Used(ex.record.tokens.Input, ex.record.tokens.Output)
	}
	switch {
	case known:
		t.metrics.Used(ex.api.caller.Label, ex.modelLabel(), ex.attempted().deployment, ex.record.tokens)
	case class == verdict.Served && ex.record.status == http.StatusOK && ex.api.Kind.Infers():
		t.metrics.UsedUnknown(ex.attempted().deployment)
	}
}

// observeThrottled records that the client gets a 429 because every backend that
// may get the request throttles.
func (ex *exchange) observeThrottled(now time.Time) {
	switch r := ex.whoRefuses(now); {
	case !r.all || r.throttled == nil:
	case r.object != "":
		ex.record.owner = r.throttled
		ex.record.owner.metrics.OwnerThrottled()
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
	switch ex.record.status = http.StatusInternalServerError; {
	case ex.request.Context().Err() != nil:
		class, ex.record.status = string(verdict.ClientLeftWaiting), clientClosedRequest
	case errors.As(err, &failure) && failure.StatusCode != 0:
		ex.record.status = failure.StatusCode
	}
	if len(ex.tries.attempts) == 0 {
		ex.own.Class = class
	} else if a := ex.attempted(); a.class == "" {
		a.class = verdict.Class(class)
	}
}

// observeAttempt records what a reply to the current attempt says, and counts
// the attempt if it is over. The reply of any other may still break off.
func (ex *exchange) observeAttempt(a *try, r *attempt.Reply) {
	if r.Class.Failover() || !ex.balancer.front.finishes() {
		ex.endAttempt(a)
	}
	m := a.target.metrics
	if m == nil {
		return
	}
	if r.Class == verdict.Throttled {
		m.Throttled(string(r.Source))
	}
	if r.Response != nil && !a.target.backend.Credentials.Passthrough { // the limits would be the caller's
		m.Saw(a.deployment, r.Response.Header)
	}
}

// endAttemptAs ends the last attempt with this class.
func (ex *exchange) endAttemptAs(class verdict.Class) {
	a := ex.attempted()
	a.class = class
	ex.endAttempt(a)
}

// endAttempt counts an attempt of which it is known what came of it, and ends
// its span.
func (ex *exchange) endAttempt(a *try) {
	if a.over || a.class == "" {
		return
	}
	a.over = true
	a.span.End(a.status, string(a.class), a.class == verdict.Served)
	a.target.metrics.Attempted(a.deployment, string(a.class))
}

// startSpan begins the span of the current attempt, if requests are traced.
func (ex *exchange) startSpan(ctx context.Context) {
	ex.attempted().span = observe.StartSpan(ctx, func() observe.Attempt {
		b := ex.tries.current.backend
		return observe.Attempt{
			Method: openaiapi.MethodOf(ex.request), Operation: ex.api.Route.Operation,
			Model: ex.model(), Stream: ex.api.Body.Stream,
			Pool: ex.balancer.Name, Backend: ex.tries.current.Name, Azure: b.Azure, Address: ex.tries.current.upstream.Dial,
		}
	})
}

// modelLabel is the label in metrics of the model that the client named.
func (ex *exchange) modelLabel() string { return ex.balancer.models.Label(ex.api.Model) }

// summary is what placeholders and the access log say of the request.
func (ex *exchange) summary() *observe.Summary {
	s := &observe.Summary{
		Pool: ex.balancer.Name, Caller: ex.api.caller.Name, Model: pool.ModelKey(ex.api.Model), FirstByte: ex.record.firstByte, Tokens: ex.record.tokens, Tier: ex.admission.Tier(), Limit: ex.own.Limit,
		Affinity: ex.api.placement.Why(ex.api.affinity), AffinityResult: ex.api.placement.CameTo(ex.api.affinity),
	}
	if t := ex.tries.turn; t != nil {
		s.Waited = t.waited
	}
	if ex.record.aborted {
		s.Aborted, s.Duration = true, ex.record.duration
		s.Tokens, s.Estimated = ex.record.usage.Estimate(ex.api.PromptCost())
	}
	t, class := ex.outcome()
	if s.Class = class; t != nil {
		s.Backend = t.Name
	}
	for _, a := range ex.tries.attempts {
		s.Attempts = append(s.Attempts, observe.Tried{Backend: a.target.Name, Class: string(a.class)})
	}
	return s
}
