package openailb

import (
	"cmp"
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

// outcome is the result of a request. commit sets usage, respond sets the reply
// or the answer and the status, and end sets the rest.
type outcome struct {
	// reply is the backend's reply if the client gets one while it arrives. It
	// is nil if the client gets answer.
	reply  *attempt.Reply
	answer answer
	// status is the status of the reply or the answer. It is 0 until there is
	// one.
	status int
	// usage reads the client's reply. tokens are the tokens that it found, once
	// the reply is over.
	usage  *usage.Reader
	tokens usage.Tokens
	// serviceTier is the service tier that served the request, once its reply
	// has named it.
	serviceTier string
	// duration is how long the request took. aborted reports whether its reply
	// was aborted. Both are set when the request is over.
	duration time.Duration
	aborted  bool
}

// end records the duration, the tokens and the service tier of a request that
// is over.
func (o *outcome) end(q *request, aborted bool) {
	o.duration, o.aborted = time.Since(q.started), aborted
	o.usage.Close()
	o.tokens, o.serviceTier = o.usage.Tokens(), o.usage.ServiceTier()
	if o.status != 0 {
		return
	}
	// A handler around this one, or a policy, has panicked.
	o.status, o.answer.Class = http.StatusInternalServerError, apierror.Unsent
	if q.incoming.Context().Err() != nil {
		o.status, o.answer.Class = clientClosedRequest, string(verdict.ClientLeftWaiting)
	}
}

// isOwn reports whether the client got the balancer's own answer.
func (o *outcome) isOwn() bool {
	return o.reply == nil && o.answer.from == nil && o.answer.Response != nil
}

// timeToFirstByte returns the time from the request to the first byte of a
// backend's reply. It returns 0 if the client gets no such reply.
func (o *outcome) timeToFirstByte(q *request) time.Duration {
	if o.reply == nil {
		return 0
	}
	return o.reply.FirstByte().Sub(q.started)
}

// answeredBy returns the attempt whose reply the client got, or else the last
// one. It returns nil without attempts.
func (o *outcome) answeredBy(s *search) *attemptRecord {
	if o.answer.from != nil {
		return o.answer.from
	}
	return s.attempts.last()
}

// source returns the backend whose reply the client got, and the reply's class.
// The backend is nil for an answer of the balancer's own that is not about one
// backend.
func (o *outcome) source(s *search) (from *target, class string) {
	if o.answer.Class != "" {
		return o.answer.owner, o.answer.Class
	}
	if a := o.answeredBy(s); a != nil {
		return a.target, string(a.outcome())
	}
	return nil, ""
}

// clientClosedRequest is the status that Caddy logs if the client left.
const clientClosedRequest = 499

// refused lists the classes of answers to requests that needed a backend and
// found none. Such a request may have made no attempt.
var refused = []string{apierror.AllThrottled, apierror.OwnerThrottled, apierror.AllBusy, apierror.RetryLater}

// report counts a finished request and its attempts in the metrics.
func (b *balancer) report(q *request, s *search, o *outcome) {
	from, class := o.source(s)
	if from != nil {
		b.countTokens(q, s, o, from, class)
		countServiceTier(q, o, from, class)
	}
	for i := range s.attempts {
		s.attempts[i].count()
	}
	if len(s.attempts) > 0 || slices.Contains(refused, class) {
		b.metrics.Attempts(len(s.attempts))
	}
	if s.wait.result != "" {
		b.metrics.Waited(string(s.wait.result), s.wait.duration)
	}
	b.metrics.Affinity(affinity.Cache, string(s.board.Affinity.Result))
	b.metrics.Affinity(s.placement.Result())
	counts := b.ownMetrics
	if from != nil && !o.isOwn() {
		counts = from.metrics
	}
	counts.Answered(q.caller.Label, b.models.Label(q.Model), class, o.status, o.duration, o.timeToFirstByte(q))
}

// countTokens counts the tokens of the reply. If the reply reports tokens, it
// is the reply to the last attempt.
func (b *balancer) countTokens(q *request, s *search, o *outcome, from *target, class string) {
	switch a := s.attempts.last(); {
	case o.tokens.Known():
		a.span.Used(o.tokens.Input, o.tokens.Output)
		from.metrics.Used(q.caller.Label, b.models.Label(q.Model), a.deployment,
			cmp.Or(o.serviceTier, openaiapi.DefaultTier), o.tokens)
	case class == string(verdict.Served) && o.status == http.StatusOK && q.Kind.Infers():
		from.metrics.UsedUnknown(a.deployment)
	}
}

// pricedTiers are the service tiers whose price differs from the usual one.
var pricedTiers = []string{openaiapi.Flex, openaiapi.Fast, openaiapi.Priority, openaiapi.Ultrafast}

// countServiceTier counts a served request for which a backend was asked for
// one of pricedTiers.
func countServiceTier(q *request, o *outcome, from *target, class string) {
	asked := askedTier(q, from)
	if slices.Contains(pricedTiers, asked) && class == string(verdict.Served) && o.status < 300 {
		from.metrics.ServiceTier(asked, o.serviceTier)
	}
}

// askedTier returns the service tier that the backend was asked for, as named
// in logs and metrics. Without a backend, it is the tier that the client asked
// for.
func askedTier(q *request, from *target) string {
	if from == nil {
		return openaiapi.TierName(q.ServiceTier())
	}
	return openaiapi.TierName(from.backend.TierOf(&q.Request))
}

// countThrottled counts a 429 that the client gets because every backend that
// may get the request throttles. If these backends belong to one account that
// stores an object, it returns the backend that is ready first, else nil.
func (b *balancer) countThrottled(r refusals) (owner *target) {
	switch {
	case !r.all || r.Throttled == nil:
	case r.object != "":
		owner = b.targets[r.Throttled.Index]
		owner.metrics.OwnerThrottled()
	default:
		b.metrics.AllThrottled()
		b.events.AllThrottled()
	}
	return owner
}

// countReserved counts the backends that the request skipped because only the
// shares of other tiers or callers are left there. These are the skipped
// backends up to the priority of the chosen backend, or of any priority if none
// was chosen.
func (b *balancer) countReserved(ask *pool.Ask, chosen *pool.Member, now time.Time) {
	if ask.Tier.Shares == nil && ask.Demand == nil {
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

// deploymentLabel returns the metrics label of the backend's name for the
// requested model.
func (t *target) deploymentLabel(q *request) string {
	return metrics.Deployment(t.Member, t.backend.NameOf(q.Model))
}

// summary returns the request's fields for placeholders and the access log.
func (b *balancer) summary(t *transaction) *observe.Summary {
	q, found, o := &t.request, &t.search, &t.outcome
	s := &observe.Summary{
		Pool: b.Name, Caller: q.caller.Name, Model: pool.ModelKey(q.Model), FirstByte: o.timeToFirstByte(q),
		Tokens: o.tokens,
		Tier:   t.bill.Tier(), TierServed: o.serviceTier, Waited: t.wait.duration,
		Affinity: t.placement.Why(found.board.Affinity), AffinityResult: t.placement.CameTo(found.board.Affinity),
	}
	if l := o.answer.Limit; l != nil {
		s.Limit, s.LimitAllowed, s.LimitUsed, s.LimitRequested = l.Name, l.Allowed, l.Used, l.Requested
	}
	if o.aborted {
		s.Aborted, s.Duration = true, o.duration
		s.Tokens, s.Estimated = o.usage.Estimate(t.bill.prompt(q))
	}
	from, class := o.source(found)
	if s.Class = class; from != nil {
		s.Backend = from.Name
	}
	s.TierRequested = askedTier(q, from)
	if s.TierRequested == "" && o.serviceTier == openaiapi.DefaultTier {
		s.TierServed = "" // the default, which nearly all requests get, is not logged
	}
	for i := range found.attempts {
		a := &found.attempts[i]
		s.Attempts = append(s.Attempts, observe.Tried{Backend: a.target.Name, Class: string(a.outcome())})
	}
	return s
}

// addToLog adds a field to the request's access log entry, if the server writes
// access logs.
func addToLog(r *http.Request, field func() zap.Field) {
	if server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok && server.Logs != nil {
		if extra, ok := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
			extra.Set(field())
		}
	}
}
