package openailb

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// refuse makes the answer an error of the client's.
func (ex *exchange) refuse(r *attempt.Reply, refusal apierror.Error) {
	a := ex.tries.last()
	a.mark.Return() // no backend got all of it
	r.Discard()
	if r.Upload().Stalled() {
		// net/http's server sends no answer while the body is being read
		_ = http.NewResponseController(ex.writer).SetReadDeadline(time.Now()) // not all writers have one
	}
	ex.outcome.own = refusal.Answer(ex.intent.request)
	a.class = verdict.ClientError
	a.end()
}

// setAside reports whether the request may be sent to another backend. It keeps the reply, for a client that gets no
// better one, or discards it.
func (ex *exchange) setAside(r *attempt.Reply) bool {
	in, t := &ex.intent, &ex.tries
	sendable := r.Upload().Abandon()
	switch {
	case t.executed && !r.Presentable():
		r.Discard()
		ex.outcome.own.Response = apierror.Executed(r.Class).Response(in.request)
	case !sendable && errors.Is(r.Err, attempt.ErrUnprocessed):
		r.Discard()
		ex.outcome.own.Response = apierror.NotProcessed.Response(in.request)
	// an upload that is ended takes the rest of a long error with it
	case r.SaysMore() && (r.Whole || !sendable || in.received.Whole()):
		t.keep(r.Response, false)
	default: // also a 429: our own answer says when the first backend returns
		r.Discard()
	}
	if r.Class.ContextLength(r.Status) {
		t.tooShort = append(t.tooShort, t.current.backend.NameOf(in.Model))
	}
	return sendable && !t.executed
}

// setAsideMissing reports whether the request goes on to another account, because the current one does not have what it
// names, and it is not known which one does. Then it keeps the reply, or discards it.
func (ex *exchange) setAsideMissing(r *attempt.Reply) bool {
	in, t := &ex.intent, &ex.tries
	if r.Class.Failover() || !r.Missing || !in.placement.Asks() || !r.Whole && !in.received.Whole() || !r.Upload().Abandon() {
		return false
	}
	in.placement.Missing(t.current.backend.AccountKey)
	if t.best.Response != nil && !t.best.missing {
		r.Discard() // a failure says more: its backend may have the object
	} else {
		t.keep(r.Response, true)
	}
	return true
}

// commit makes the reply the client's. reverse_proxy then copies its body, which internal/attempt follows; finish learns
// how it ended.
func (ex *exchange) commit(r *attempt.Reply, now time.Time) *http.Response {
	ex.tries.turn.firstByte(now)
	ex.decided()
	ex.intent.placement.Served(ex.tries.current.backend.AccountKey, r.Response)
	res, counts := r.Commit(ex.writer, now, nil)
	ex.bill.Follow(counts)
	if res.StatusCode == http.StatusSwitchingProtocols && ex.intent.socket != nil {
		ex.reader.converse(ex)
	}
	ex.outcome.reply, ex.outcome.status, ex.outcome.usage = r, res.StatusCode, counts
	ex.tries.forbidRetry(res.Header)
	ex.setRateLimits(res.Header, now)
	if to := ex.tries.current; res.StatusCode == http.StatusOK && !to.backend.Azure && // which lists no deployments
		openaiapi.AsksForModels(ex.intent.request.Method, ex.intent.Route) {
		observe.ReadModels(res, func(models []openaiapi.ListedModel) {
			ex.logger.ShutDown(to.Name, to.metrics.Listed(models, to.Member, now))
		})
	}
	return res
}

// decided puts benches in doubt if nothing but limits refused the request, and releases what only another attempt would
// need.
func (ex *exchange) decided() {
	ex.tries.doubtBenches(&ex.intent)
	ex.tries.dropBest()
	ex.intent.forget()
}

// answer is the response when no backend served the request: an answer that
// needed no backend, the last backend's reply that says more to the client than
// we could, or an error of our own.
func (ex *exchange) answer(req *http.Request) *http.Response {
	t, o, now := &ex.tries, &ex.outcome, time.Now()
	if t.best.missing {
		if ex.update(now); ex.Pool.Why(&t.ask, now).Takes {
			t.dropBest() // another account may have what the request names, which could not be asked now
		}
	}
	if t.best.Response != nil && t.list[t.best.attempt].class == verdict.NotHere {
		if ex.update(now); ex.Pool.Why(&t.ask, now).Throttled != nil {
			t.dropBest() // a backend that has it asks for a pause
		}
	}
	best := t.best
	if o.own.Response == nil {
		t.best = bestReply{} // it is not dropped
	}
	if _, gone := ex.proxied.Body.(replay.Gone); t.executed {
		// a handler that comes after the backends must not have it executed again
		ex.proxied.Body, ex.proxied.ContentLength = replay.Gone{}, -1
	} else if gone {
		ex.intent.received.Restore(&ex.proxied)
	}
	var res *http.Response
	switch {
	case o.own.Response != nil:
		ex.decided()
		res = o.own.Response
	case best.Response != nil:
		ex.decided()
		res = ex.forwarded(best, now)
	default:
		ex.update(now)
		wait, r := ex.Pool.Wait(&t.ask, now), ex.whoRefuses(now)
		e := r.why(ex.balancer, &ex.intent, &ex.tries, wait)
		if e.Class == apierror.AllThrottled && t.isFlex() {
			e.Class = string(verdict.NotHere) // the backends have no flex now, and serve other requests
		}
		ex.decided()
		o.own = e.Answer(ex.intent.request) // reverse_proxy has the option rewrite
		res = o.own.Response
		if e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable {
			verdict.SetHint(res.Header, wait)
		}
		if e.Class == apierror.AllThrottled || e.Class == apierror.OwnerThrottled {
			ex.countThrottled(&ex.outcome, r)
			if slices.ContainsFunc(ex.targets, func(of *target) bool { return of.PassedOver(&t.ask, now) }) {
				ex.bill.Reserved()
			}
		}
	}
	res.Request = req
	if o.own.Response == nil || res.StatusCode == http.StatusTooManyRequests {
		ex.setRateLimits(res.Header, now)
	}
	t.forbidRetry(res.Header)
	o.status, o.ours = res.StatusCode, o.own.Response != nil
	return res
}

// forwarded is the best reply that a backend had, as the answer.
func (ex *exchange) forwarded(best bestReply, now time.Time) *http.Response {
	from := &ex.tries.list[best.attempt]
	ex.outcome.from = from
	ex.update(now)
	wait := ex.Pool.Wait(&ex.tries.ask, now)
	if from.class != verdict.NotHere {
		verdict.RewriteHints(best.Header, wait)
	}
	if from.class == verdict.Overloaded {
		verdict.SetHint(best.Header, wait) // even if the backend does not say
	}
	attempt.Public{}.Final(best.Header)
	attempt.Public{}.Trailer(best.Trailer)
	attempt.TrailersLast(best.Response)
	attempt.ResetIfCut(ex.intent.request, best.Response)
	return best.Response
}

// refusals are why backends that take the request refuse it.
type refusals struct {
	pool.Why
	// all reports whether all refuse it for the same reason. With an object, these
	// are all of the one account that stores it. Others could take the request.
	all    bool
	object string
}

// whoRefuses returns why the backends refuse the request.
func (ex *exchange) whoRefuses(now time.Time) refusals {
	r := refusals{Why: ex.Pool.Why(&ex.tries.ask, now)}
	if r.Elsewhere {
		r.object = ex.intent.placement.Stored()
		r.Others = r.Others || r.object == "" // accounts that lack the object were asked
	}
	r.all = r.All()
	return r
}

// why is the error that says why no backend could serve.
func (r refusals) why(b *balancer, in *intent, t *tries, wait time.Duration) apierror.Error {
	if !r.Takes {
		return r.whyNoneTakes(b, in)
	}
	var last verdict.Class
	for i := range t.list {
		if class := t.list[i].class; class.Failover() {
			last = class
		}
	}
	return apierror.Unserved(r.Why, r.all, r.object, last, wait)
}

// whyNoneTakes is the error that says why the request can be sent to no backend.
func (r refusals) whyNoneTakes(b *balancer, in *intent) apierror.Error {
	models, lacksKey := []string(nil), false
	for _, t := range b.targets {
		if !in.entitled.May[t.Index] || !in.placement.Allows(t.backend.AccountKey) {
			continue
		}
		lacksKey = lacksKey || t.backend.Understands(&in.Request)
		for _, model := range t.backend.Model {
			if !slices.Contains(models, model.Name) {
				models = append(models, model.Name)
			}
		}
	}
	object := in.placement.Stored()
	switch {
	case lacksKey:
		return apierror.MissingKey
	case in.Clarity == openaiapi.Opaque:
		return apierror.CompressedBody
	case in.CutOff():
		return apierror.ModelBeyondBuffer(b.sender.RequestBuffers)
	case in.Clarity == openaiapi.Unclear, in.Model == "":
		return apierror.MissingModel(models)
	case r.Elsewhere && object != "":
		return apierror.UnknownModelThere(in.Model, object, models)
	}
	return apierror.UnknownModel(in.Model, models)
}

// forbidRetry keeps the client's SDK from sending a request again that may have been
// executed. Official SDKs retry a 408 and a 5xx unless this header forbids it.
func (t *tries) forbidRetry(header http.Header) {
	if t.executed {
		header["X-Should-Retry"] = []string{"false"}
	}
}

// The values of ratelimit_headers: whose limits a reply names.
const (
	rateLimitsOfCaller  = "caller"
	rateLimitsOfPool    = "pool"
	rateLimitsOfBackend = "backend"
	rateLimitsOff       = "off"
)

var rateLimitsOf = []string{rateLimitsOfCaller, rateLimitsOfPool, rateLimitsOfBackend, rateLimitsOff}

// setRateLimits makes the header of a reply say what ratelimit_headers wants.
func (ex *exchange) setRateLimits(header http.Header, now time.Time) {
	switch ex.rateLimits {
	case rateLimitsOff:
		quota.RemoveFields(header)
	case rateLimitsOfBackend: // what came from it stays
	case rateLimitsOfPool:
		ex.update(now)
		ex.Pool.Limits(&ex.tries.ask, now).Set(header, ex.intent.isAzure())
	default:
		if ex.bill.Limited() {
			ex.bill.Limits(now).Set(header, ex.intent.isAzure())
		}
	}
}
