package openailb

import (
	"net/http"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/replyheader"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// answer is the response when no backend served the request: an answer that
// needed no backend, the last backend's reply that tells the client more than
// we could, or an error of our own.
func (ex *exchange) answer(req *http.Request) *http.Response {
	now := time.Now()
	wait := ex.balancer.Pool.Wait(ex, now)
	if ex.undecided() {
		ex.dropLast()
	}
	res := ex.own
	if res == nil {
		res, ex.last = ex.last, nil
	}
	if _, gone := ex.proxied.Body.(replay.Gone); ex.executed {
		// a handler that comes after the backends must not have it executed again
		ex.proxied.Body, ex.proxied.ContentLength = replay.Gone{}, -1
	} else if gone {
		ex.body.Restore(&ex.proxied)
	}
	ex.committed()
	ex.ours = res == nil || res == ex.own
	switch res {
	case nil:
		e := ex.whyNobody(now, wait)
		res, ex.ownClass = e.Answer(req)
		if e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable {
			hint.Set(res.Header, wait)
		}
		if e.Class == apierror.AllThrottled || e.Class == apierror.OwnerThrottled {
			ex.observeThrottled(now)
		}
	case ex.own:
		res.Request = req
	default:
		ex.from = &ex.attempts[ex.lastFrom]
		ex.observeForwarded(ex.from.class)
		if !ex.balancer.forward || res.StatusCode != http.StatusTooManyRequests {
			hint.Rewrite(res.Header, wait)
			if ex.from.class == verdict.Overloaded {
				hint.Set(res.Header, wait) // even if the backend does not say
			}
		}
		if !ex.balancer.plain {
			replyheader.RemoveProviders(res.Header)
			replyheader.RemoveProviders(res.Trailer)
		}
	}
	ex.forbidRetry(res)
	ex.status = res.StatusCode
	return res
}

// whyNobody is the error that says why no backend could serve.
func (ex *exchange) whyNobody(now time.Time, wait time.Duration) apierror.Error {
	if e, ok := ex.whyNobodyTakes(); ok {
		return e
	}
	r := ex.whoRefuses(now)
	var last verdict.Class
	for _, a := range ex.attempts {
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
	case last == verdict.Timeout:
		return apierror.TimedOut
	case last == verdict.Failed:
		return apierror.BrokenOff
	case last == "": // there is room again by now
		return apierror.Busy(wait, true, r.object)
	}
	return apierror.Unreachable
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
		case !t.backend.takes(&ex.asked):
		case !ex.home.Allows(t.backend.account):
			elsewhere = true
		case class.Promise() || t.Throttles(ex, now):
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
		r.object = ex.home.Stored()
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

// cameOf returns the outcome of the attempt at a backend, if it was tried.
func (ex *exchange) cameOf(t *target) (class verdict.Class, tried bool) {
	for i := range ex.attempts {
		if ex.attempts[i].target == t {
			return ex.attempts[i].class, true
		}
	}
	return "", false
}

// whyNobodyTakes is the error that says why the request can be sent to no
// backend. It reports false if it can be sent to one.
func (ex *exchange) whyNobodyTakes() (e apierror.Error, ok bool) {
	var models []string
	withKey := ex.asked
	withKey.anonymous = false
	lacksKey, elsewhere := false, false
	for _, t := range ex.balancer.targets {
		if !ex.home.Allows(t.backend.account) {
			elsewhere = elsewhere || t.backend.takes(&ex.asked)
			continue
		}
		if t.backend.takes(&ex.asked) {
			return apierror.Error{}, false
		}
		lacksKey = lacksKey || t.backend.takes(&withKey)
		for _, model := range t.backend.Model {
			if !slices.Contains(models, model.Name) {
				models = append(models, model.Name)
			}
		}
	}
	switch {
	case lacksKey:
		return apierror.MissingKey, true
	case ex.asked.opaque:
		return apierror.CompressedBody, true
	case ex.asked.cutOff:
		return apierror.ModelBeyondBuffer(ex.balancer.transport.RequestBuffers), true
	case ex.asked.unclear, ex.asked.model == "":
		return apierror.MissingModel(models), true
	}
	if object := ex.home.Stored(); elsewhere && object != "" {
		return apierror.UnknownModelThere(ex.asked.model, object, models), true
	}
	return apierror.UnknownModel(ex.asked.model, models), true
}
