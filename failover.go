package openailb

import (
	"errors"
	"net/http"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// hideHeader keeps the header of a request out of reverse_proxy's log of a reply that breaks
// off. It may have a key from the config (header_up). Only the upgrade that the request asks for
// stays, because reverse_proxy compares it with that of the reply.
func hideHeader(req *http.Request) {
	upgrade := req.Header["Upgrade"]
	if upgrade == nil {
		req.Header = nil
		return
	}
	req.Header = http.Header{"Connection": req.Header["Connection"], "Upgrade": upgrade}
}

// attempt asks the exchange's current backend, and asks it once more if it
// refuses a credential of which the source has a newer one.
func (ex *exchange) attempt(req *http.Request) *attempt.Reply {
	ctx, b, try := req.Context(), ex.tries.current.backend, ex.attempted()
	ex.startSpan(ctx)
	var err error
	if try.credential, err = b.Credentials.Credential(ctx); err != nil {
		return attempt.Unsent(err)
	}
	r := ex.balancer.sender.Send(ex.outgoing(req, try.credential))
	if r.Status == http.StatusUnauthorized && r.Class != verdict.NotPermitted {
		if renewed, ok := b.Credentials.Renew(ctx, try.credential); ok && r.Upload().Abandon() {
			r.Discard()
			if c := ex.balancer.logger.Check(zap.InfoLevel, "credential renewed"); c != nil {
				c.Write(zap.String("backend", ex.tries.current.Name))
			}
			try.credential = renewed
			r = ex.balancer.sender.Send(ex.outgoing(req, renewed))
		}
	}
	switch {
	case b.Credentials.Passthrough && r.Class.OfCredential():
		r.Class = verdict.ClientError // the credential is the caller's
	case (r.Class == verdict.Credential || r.Class == verdict.NotPermitted) && b.Credentials.HasReplaced(try.credential):
		r.Class = verdict.NoCredential // the refusal does not apply to the credential that there is now
	}
	return r
}

// outgoing is the request for the current backend.
func (ex *exchange) outgoing(req *http.Request, credential keys.Credential) *attempt.Request {
	b, api := ex.tries.current.backend, &ex.api
	out := &attempt.Request{
		Proxied: req, URL: *req.URL, Host: req.Host, Header: req.Header, Body: &api.received, Change: replay.Options{Request: &api.Body},
		Asks: api.asks(), Secrets: b.Credentials.Secrets(credential, api.credentials), Fields: ex.balancer.front, CountsTokens: ex.balancer.front.finishes(),
		CountsContent: ex.admission.CountsTokens(), CountsAll: ex.readsUsage(), FindsID: ex.admission.Open() && api.Body.Background,
		Interims: &ex.tries.interims, Watch: ex.watch(), Marks: ex.tries.current,
	}
	ex.balancer.front.direct(ex, out, credential)
	out.Change.AskUsage = (ex.balancer.streamUsage || ex.admission.CountsTokens()) && (b.StreamUsage == nil || *b.StreamUsage) && api.CanAskUsage()
	if api.placement.Teaches() {
		out.IDs = func(res *http.Response) attempt.IDReader {
			if reader := api.placement.IDReader(b.AccountKey, res); reader != nil {
				return reader
			}
			return nil
		}
	}
	return out
}

// bodyLate reports whether the client was too slow with its body. net/http's
// server then cancels the request, as if the client had left.
func (ex *exchange) bodyLate() bool {
	return errors.Is(ex.api.received.Failure(), os.ErrDeadlineExceeded)
}

// clientsFault returns the error for a request that could not be sent because of
// the client. A backend that gives up an upload which the client stalls answers 408,
// breaks the connection, or waits until we give up.
func (ex *exchange) clientsFault(r *attempt.Reply) (apierror.Error, bool) {
	failure := ex.api.received.Failure()
	switch {
	case r.Refusal.Status != 0:
		return r.Refusal, true
	case failure != nil && r.Err != nil:
		return apierror.UnreadableBody(failure), true
	case r.Upload().Stalled() && (r.Err != nil || r.Status == http.StatusRequestTimeout):
		return apierror.UnreadableBody(os.ErrDeadlineExceeded), true
	}
	return apierror.Error{}, false
}

// refuse makes the answer an error of the client's.
func (ex *exchange) refuse(r *attempt.Reply, refusal apierror.Error) {
	ex.attempted().mark.Return() // no backend got all of it
	r.Discard()
	if r.Upload().Stalled() {
		// net/http's server sends no answer while the body is being read
		_ = http.NewResponseController(ex.writer).SetReadDeadline(time.Now()) // not all writers have one
	}
	ex.own = refusal.Answer(ex.request)
	ex.endAttemptAs(verdict.ClientError)
}

// mayRepeat reports whether the request may be sent to another backend. It also
// keeps what the client gets if no other backend has a better reply.
func (ex *exchange) mayRepeat(r *attempt.Reply) bool {
	sendable := r.Upload().Abandon()
	switch {
	case ex.tries.executed && !r.Presentable():
		r.Discard()
		ex.own.Response = apierror.PerhapsExecuted.Response(ex.request)
		if r.Class == verdict.Timeout {
			ex.own.Response = apierror.PerhapsStillExecuted.Response(ex.request)
		}
	case !sendable && errors.Is(r.Err, attempt.ErrUnprocessed):
		r.Discard()
		ex.own.Response = apierror.NotProcessed.Response(ex.request)
		verdict.SetHint(ex.own.Header, time.Second)
	// an upload that is ended takes the rest of a long error with it
	case r.SaysMore(ex.balancer.forward) && (r.Whole || !sendable || ex.api.received.Whole()):
		ex.keep(r.Response)
	default:
		r.Discard()
	}
	if r.Class.ContextLength(r.Status) {
		ex.tries.exceeded = append(ex.tries.exceeded, ex.model())
	}
	return sendable && !ex.tries.executed
}

// mayBeElsewhere reports whether the request goes on to another account,
// because the current one does not have what the request names, and it is not
// known which one does.
func (ex *exchange) mayBeElsewhere(r *attempt.Reply) bool {
	placement, best := &ex.api.placement, &ex.tries.best
	if r.Class.Failover() || !r.Missing || !placement.Asks() || !r.Whole && !ex.api.received.Whole() || !r.Upload().Abandon() {
		return false
	}
	placement.Missing(ex.tries.current.backend.AccountKey)
	if best.Response != nil && !best.missing {
		r.Discard() // a failure says more: its backend may have the object
		return true
	}
	ex.keep(r.Response)
	best.missing = true
	return true
}

// keep keeps a reply, in case no backend has a better one.
func (ex *exchange) keep(res *http.Response) {
	ex.dropBest()
	ex.tries.best = bestReply{Response: res, attempt: len(ex.tries.attempts) - 1}
}

// forbidRetry keeps the client's SDK from sending a request again that may have been
// executed. Official SDKs retry a 408 and a 5xx unless this header forbids it.
func (ex *exchange) forbidRetry(res *http.Response) {
	if ex.tries.executed {
		res.Header["X-Should-Retry"] = []string{"false"}
	}
}

// commit makes the response the client's.
func (ex *exchange) commit(r *attempt.Reply) *http.Response {
	ex.tries.turn.firstByte()
	ex.committed()
	ex.api.placement.Served(ex.tries.current.backend.AccountKey, r.Response)
	ex.observeForwarded(r.Class)
	ex.FirstByte()
	res, tokens := r.Commit(ex.writer, ex)
	ex.admission.Follow(tokens)
	ex.record.status, ex.record.usage = res.StatusCode, tokens
	ex.forbidRetry(res)
	ex.setRateLimits(res.Header)
	return res
}

// FirstByte implements attempt.Recipient.
func (ex *exchange) FirstByte() { ex.record.firstByte = time.Since(ex.record.started) }
