package openailb

import (
	"net/http"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// answer is the response to a request that no backend serves.
type answer struct {
	// Answer has the response. The response is nil if the client has left. The
	// class is empty if it is that of the attempt in from.
	apierror.Answer
	// from is the attempt whose reply is the answer. It is nil if the answer is
	// the balancer's own.
	from *attemptRecord
	// owner is the throttling backend that is ready first in the one account
	// that may get the request. It is nil if the answer has another cause.
	owner *target
}

// answer returns the response to a request that no backend serves. This is, in
// this order, an answer that needed no backend, a backend's reply that says
// more than the balancer could, or the balancer's own error.
func (b *balancer) answer(t *transaction, ownAnswer apierror.Answer) answer {
	s, now := &t.search, time.Now()
	a := answer{Answer: ownAnswer}
	if ownAnswer == (apierror.Answer{}) && !s.left {
		a = b.answerAfter(t, now)
	}
	if a.Response == nil {
		return a
	}
	s.decided()
	if a.from != nil || a.StatusCode == http.StatusTooManyRequests {
		b.setRateLimits(t, a.Header, now)
	}
	s.forbidRetry(a.Header)
	return a
}

// answerAfter returns the answer when no backend is left.
func (b *balancer) answerAfter(t *transaction, now time.Time) answer {
	s := &t.search
	if s.best.missing {
		if s.update(now); b.Pool.Why(&s.board, now).Takes {
			s.best.drop() // another account may have what the request names, which could not be asked now
		}
	}
	if s.best.Response != nil {
		switch s.attempts[s.best.attempt].class {
		case verdict.NotHere, verdict.Loop:
			if s.update(now); b.Pool.Why(&s.board, now).Throttled != nil {
				s.best.drop() // a backend that may serve it asks for a pause
			}
		}
	}
	if slices.ContainsFunc(s.attempts, func(a attemptRecord) bool { return a.lacksSocket }) {
		if s.update(now); b.Pool.Why(&s.board, now).Throttled == nil {
			s.best.drop() // over HTTP, the backend may serve it
			return answer{Answer: apierror.NoWebSocket.Answer(t.request.asked)}
		}
	}
	from := s.best.attempt
	if res := s.best.take(); res != nil {
		s.update(now)
		b.forward(t.request.incoming, res, s.attempts[from].class, b.Pool.Wait(&s.board, now))
		return answer{Answer: apierror.Answer{Response: res}, from: &s.attempts[from]}
	}
	return b.unserved(t, now)
}

// forward prepares a kept reply for the client. wait is the time until a
// backend accepts the request.
func (b *balancer) forward(r *http.Request, res *http.Response, class verdict.Class, wait time.Duration) {
	removeHopByHop(res.Header)
	if class != verdict.NotHere {
		verdict.RewriteHints(res.Header, wait)
	}
	if class == verdict.Overloaded {
		verdict.SetHint(res.Header, wait) // even if the backend does not say
	}
	attempt.Finish(r, res, b.fields)
}

// unserved returns the balancer's own error, which says why no backend could
// serve the request.
func (b *balancer) unserved(t *transaction, now time.Time) (a answer) {
	q, s := &t.request, &t.search
	r := s.explain(now)
	wait := b.Pool.Wait(&s.board, now)
	e := r.errorFor(q, s, wait)
	if e.Class == apierror.AllThrottled && s.isUnusual() {
		// the backends have nothing left of this service tier, and serve other
		// requests
		e.Class = string(verdict.NotHere)
	}
	a.Answer = e.Answer(q.asked)
	switch {
	case e.Class == string(verdict.TooLarge): // it would be too large again
	case e.Status == http.StatusTooManyRequests, e.Status == http.StatusServiceUnavailable:
		verdict.SetHint(a.Header, wait)
	}
	if e.Class == apierror.AllThrottled || e.Class == apierror.OwnerThrottled {
		a.owner = b.countThrottled(r)
		if slices.ContainsFunc(b.targets, func(to *target) bool { return to.PassedOver(&s.board, now) }) {
			t.bill.reserved()
		}
	}
	return a
}

// refusals are the reasons why the backends that take the request refuse it
// now.
type refusals struct {
	pool.Why
	// all reports whether all backends refuse it for the same reason. If the
	// request names a stored object, object is its id, and only the backends of
	// the account that stores it count: backends of other accounts could take
	// the request.
	all    bool
	object string
}

// errorFor returns the error that says why no backend could serve the request.
func (r refusals) errorFor(q *request, s *search, wait time.Duration) apierror.Error {
	if !r.Takes && !s.attempts.anyIs(verdict.NotHere) { // otherwise one took it, and its reply was cut
		return r.whyNoneTakes(q, s)
	}
	var last verdict.Class
	for i := range s.attempts {
		if class := s.attempts[i].class; class.Failover() {
			last = class
		}
	}
	if refusal := s.tooLarge(); refusal != nil && last == "" && r.Throttled == nil && !r.Busy {
		return tooLargeFor(refusal)
	}
	return apierror.Unserved(r.Why, r.all, r.object, last, wait)
}

// whyNoneTakes returns the error that says why the request can be sent to no
// backend.
func (r refusals) whyNoneTakes(q *request, s *search) apierror.Error {
	models, lacksKey := []string(nil), false
	for _, t := range s.balancer.targets {
		if !q.entitled.May[t.Index] || !s.placement.Allows(t.backend.AccountKey) {
			continue
		}
		lacksKey = lacksKey || t.backend.Understands(&q.Request)
		for _, model := range t.backend.Model {
			if !slices.Contains(models, model.Name) {
				models = append(models, model.Name)
			}
		}
	}
	object := s.placement.Stored()
	switch {
	case lacksKey:
		return apierror.MissingKey
	case q.Clarity == openaiapi.Opaque:
		return apierror.CompressedBody
	case q.CutOff():
		return apierror.ModelBeyondBuffer(s.balancer.sender.RequestBuffers)
	case q.Clarity == openaiapi.Unclear, q.Model == "":
		return apierror.MissingModel(models)
	case r.Elsewhere && object != "":
		return apierror.UnknownModelThere(q.Model, object, models)
	}
	return apierror.UnknownModel(q.Model, models)
}

// The values of ratelimit_headers, which say whose limits a reply names.
const (
	rateLimitsOfCaller = "caller"
	rateLimitsOfPool   = "pool"
	rateLimitsOff      = "off"
)

var rateLimitsOf = []string{rateLimitsOfCaller, rateLimitsOfPool, rateLimitsOff}

// setRateLimits sets or removes the rate limit fields of a reply's header, as
// the option ratelimit_headers says.
func (b *balancer) setRateLimits(t *transaction, header http.Header, now time.Time) {
	switch b.rateLimits {
	case rateLimitsOff:
		quota.RemoveFields(header)
	case rateLimitsOfPool:
		t.search.update(now)
		b.Pool.Limits(&t.search.board, now).Set(header, t.request.isAzure())
	default:
		if limits, ok := t.bill.rateLimits(now, t.request.Model); ok {
			limits.Set(header, t.request.isAzure())
		}
	}
}
