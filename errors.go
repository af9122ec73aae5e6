package openailb

import (
	"net/http"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// answer is the response when no backend served the request: an answer that
// needed no backend, the last backend's reply that says more to the client than
// we could, or an error of our own.
func (ex *exchange) answer(req *http.Request) *http.Response {
	now := time.Now()
	wait := ex.balancer.Pool.Wait(ex, now)
	if ex.undecided() {
		ex.dropBest()
	}
	best := ex.tries.best
	if ex.own.Response == nil {
		ex.tries.best = bestReply{} // it is not dropped
	}
	if _, gone := ex.proxied.Body.(replay.Gone); ex.tries.executed {
		// a handler that comes after the backends must not have it executed again
		ex.proxied.Body, ex.proxied.ContentLength = replay.Gone{}, -1
	} else if gone {
		ex.api.received.Restore(&ex.proxied)
	}
	ex.committed()
	res := best.Response
	switch {
	case ex.own.Response != nil:
		res = ex.own.Response
		res.Request = req
	case res != nil:
		ex.answerWith(best, wait)
	default:
		e := ex.whyNone(now, wait)
		ex.own = e.Answer(req)
		res = ex.own.Response
		if e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable {
			verdict.SetHint(res.Header, wait)
		}
		if e.Class == apierror.AllThrottled || e.Class == apierror.OwnerThrottled {
			ex.observeThrottled(now)
		}
	}
	if ex.own.Response == nil || res.StatusCode == http.StatusTooManyRequests {
		ex.setRateLimits(res.Header)
	}
	ex.forbidRetry(res)
	ex.record.status, ex.record.ours = res.StatusCode, ex.own.Response != nil
	return res
}

// answerWith makes the best reply that a backend had the answer.
func (ex *exchange) answerWith(best bestReply, wait time.Duration) {
	from := &ex.tries.attempts[best.attempt]
	ex.record.from = from
	ex.observeForwarded(from.class)
	if !ex.balancer.forward || best.StatusCode != http.StatusTooManyRequests {
		verdict.RewriteHints(best.Header, wait)
		if from.class == verdict.Overloaded {
			verdict.SetHint(best.Header, wait) // even if the backend does not say
		}
	}
	ex.balancer.front.Final(best.Header)
	ex.balancer.front.Trailer(best.Trailer)
	attempt.TrailersLast(best.Response)
	attempt.ResetIfCut(ex.request, best.Response)
}

// undecided reports whether the best reply says that an account does not have
// what the request names, while another account may have it, which could not be
// asked now.
func (ex *exchange) undecided() bool {
	if !ex.tries.best.missing {
		return false
	}
	_, none := ex.whyNoneTakes()
	return !none
}

// whyNone is the error that says why no backend could serve.
func (ex *exchange) whyNone(now time.Time, wait time.Duration) apierror.Error {
	if e, ok := ex.whyNoneTakes(); ok {
		return e
	}
	r := ex.whoRefuses(now)
	var last verdict.Class
	for _, a := range ex.tries.attempts {
		if a.class.Failover() {
			last = a.class
		}
	}
	switch {
	case r.throttled != nil:
		return apierror.RateLimited(wait, r.all, r.object)
	case r.busy:
		return apierror.Busy(wait, r.all, r.object)
	case last == verdict.Credential, last == verdict.NotPermitted:
		return apierror.CredentialsRejected
	case last == verdict.NoCredential:
		return apierror.NoCredential(wait)
	case last == verdict.Timeout, last == verdict.Silent:
		return apierror.TimedOut
	case last == verdict.Unreachable:
		return apierror.Unreachable
	case last == "": // there is room again by now
		return apierror.Busy(wait, true, r.object)
	}
	return apierror.BrokenOff
}

// whyNoneTakes is the error that says why the request can be sent to no
// backend. It reports false if it can be sent to one.
func (ex *exchange) whyNoneTakes() (e apierror.Error, ok bool) {
	var models []string
	lacksKey, elsewhere := false, false
	for _, t := range ex.balancer.targets {
		if !ex.api.placement.Allows(t.backend.AccountKey) {
			elsewhere = elsewhere || t.backend.Takes(&ex.api.Request, ex.api.anonymous)
			continue
		}
		if t.backend.Takes(&ex.api.Request, ex.api.anonymous) {
			return apierror.Error{}, false
		}
		lacksKey = lacksKey || t.backend.Understands(&ex.api.Request)
		for _, model := range t.backend.Model {
			if !slices.Contains(models, model.Name) {
				models = append(models, model.Name)
			}
		}
	}
	switch {
	case lacksKey:
		return apierror.MissingKey, true
	case ex.api.Clarity == openaiapi.Opaque:
		return apierror.CompressedBody, true
	case ex.api.CutOff():
		return apierror.ModelBeyondBuffer(ex.balancer.sender.RequestBuffers), true
	case ex.api.Clarity == openaiapi.Unclear, ex.api.Model == "":
		return apierror.MissingModel(models), true
	}
	if object := ex.api.placement.Stored(); elsewhere && object != "" {
		return apierror.UnknownModelThere(ex.api.Model, object, models), true
	}
	return apierror.UnknownModel(ex.api.Model, models), true
}

// refusals are why backends that take the request refuse it.
type refusals struct {
	// throttled is the first one that throttles, or nil, and busy reports whether
	// one has no room.
	throttled *target
	busy      bool
	// all reports whether all refuse it for the same reason. With an object, these
	// are all of the one account that stores it. Others could take the request.
	all    bool
	object string
}

// whoRefuses returns why the backends refuse the request.
func (ex *exchange) whoRefuses(now time.Time) (r refusals) {
	others, elsewhere := false, false
	for _, t := range ex.balancer.targets {
		switch class, tried := ex.cameOf(t); {
		case !t.backend.Takes(&ex.api.Request, ex.api.anonymous):
		case !ex.api.placement.Allows(t.backend.AccountKey):
			elsewhere = true
		case class.Promise() || t.Throttles(ex, now) || ex.isBehind(t.Member):
			if r.throttled == nil {
				r.throttled = t
			}
		case !tried && t.Full():
			r.busy = true
		default:
			others = true
		}
	}
	if elsewhere {
		r.object = ex.api.placement.Stored()
		others = others || r.object == "" // accounts that lack the object were asked
	}
	r.all = !others && (r.throttled != nil) != r.busy
	return r
}

// allThrottle reports whether every backend that may get the request throttles.
func (ex *exchange) allThrottle(now time.Time) bool {
	r := ex.whoRefuses(now)
	return r.throttled != nil && r.all
}

// cameOf returns the outcome of the last attempt at a backend, if it was tried.
func (ex *exchange) cameOf(t *target) (class verdict.Class, tried bool) {
	for i := len(ex.tries.attempts) - 1; i >= 0; i-- {
		if ex.tries.attempts[i].target == t {
			return ex.tries.attempts[i].class, true
		}
	}
	return "", false
}
