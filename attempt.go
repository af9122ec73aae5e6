package openailb

import (
	"context"
	"crypto/tls"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/cause"
	"github.com/openai-lb/caddy-openai-lb/internal/deadline"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// attempt asks the exchange's current backend, and asks it once more if it
// refuses a credential of which the source has a newer one.
func (t *Transport) attempt(ex *exchange, req *http.Request) *reply {
	b := ex.current.backend
	ex.startSpan(req.Context())
	credential, err := b.credential(req.Context())
	if err != nil {
		r := &reply{err: err, class: verdict.Credential}
		var later interface{ RetryAfter() time.Duration }
		if errors.As(err, &later) {
			r.wait = later.RetryAfter()
		}
		return r
	}
	r := t.send(ex, req, credential)
	if r.status != http.StatusUnauthorized || r.class == verdict.NotPermitted {
		return r
	}
	renewed, ok := b.renew(req.Context(), credential)
	if !ok || !r.upload.Abandon() {
		return r
	}
	r.discard()
	if c := ex.balancer.logger.Check(zap.InfoLevel, "credential renewed"); c != nil {
		c.Write(zap.String("backend", ex.current.Name))
	}
	return t.send(ex, req, renewed)
}

// send sends the request to the current backend and judges what comes back.
func (t *Transport) send(ex *exchange, req *http.Request, credential Credential) *reply {
	b := ex.current.backend
	rt := ex.newRoundTrip(req)
	r := &rt.reply
	r.credential, r.secrets = credential, b.secretsOf(credential, ex.credentials)
	out := req.WithContext(rt)
	rt.url = *req.URL
	out.URL = &rt.url
	var model string
	if ex.balancer.plain {
		out.Header = maps.Clone(req.Header) // nobody changes the values in place
	} else {
		model = b.direct(out, ex, credential)
	}
	if r.asksUsage = ex.asksUsage(); r.asksUsage {
		out.Header["Accept-Encoding"] = []string{"identity"} // its chunk has to be taken out again
	}
	r.upload = ex.body.Attach(out, replay.Options{
		Model: model, AskUsage: r.asksUsage, Request: &ex.asked.body, Repeatable: ex.asked.repeatable, Progress: &rt.deadline,
	})
	rt.upload = r.upload

	timeout := t.ResponseHeaderTimeout
	if ex.asked.body.Stream {
		timeout = t.StreamFirstEventTimeout
	}
	rt.deadline.Start(time.Duration(timeout), errNoReply)
	res, err := t.roundTripper.RoundTrip(out)
	r.connected = rt.connections.Load() > 0
	if err == nil && (res.StatusCode < 100 || res.StatusCode == http.StatusSwitchingProtocols && req.Header.Get("Upgrade") == "") {
		// the first would make net/http's server panic, the second would be empty
		res.Body.Close()
		err = errNoHTTP
	}
	if err != nil {
		rt.deadline.End()
		r.fail(err, context.Cause(rt))
		return r
	}
	if !isEventStream(res) && !rt.deadline.Stop() {
		res.Body.Close()
		r.fail(errNoReply, errNoReply)
		return r
	}
	r.res, r.status = res, res.StatusCode
	r.body = t.watchOver(r, rt)
	t.judge(r, ex.asked.cost, rt)
	if r.class == verdict.Served {
		t.open(ex, r, rt)
	}
	rt.deadline.End()
	if b.passesThrough() && r.class.OfCredential() {
		r.class = verdict.ClientError // the credential is the caller's
	}
	return r
}

var (
	errNoReply   = &cause.Error{Word: "no_reply", Text: "no reply in time"}
	errNoHTTP    = &cause.Error{Word: "malformed", Text: "the reply is not a valid HTTP response"}
	errLostAgain = &cause.Error{Word: "not_accepted", Text: "the backend accepted the request on neither of two connections"}
)

// What net/http says of a request that it refuses to send. It has no exported
// errors for that.
const (
	headerListTooLarge = "request header list larger than peer's advertised limit"
	invalidHeader      = "net/http: invalid header field"
)

// fail takes in why there is no reply. cause is why the attempt was ended, if
// it was.
func (r *reply) fail(err, cause error) {
	r.err, r.class = err, verdict.Unreachable
	switch {
	case errors.Is(cause, errNoReply), isHeaderTimeout(err):
		r.err, r.class = errNoReply, verdict.Timeout
	case errors.Is(cause, errLostAgain):
		// both connections refused it before it was executed
		r.err, r.class, r.connected = errLostAgain, verdict.Failed, false
	case strings.Contains(err.Error(), headerListTooLarge):
		r.class, r.refusal = verdict.ClientError, apierror.HeadersTooLarge
	case strings.HasPrefix(err.Error(), invalidHeader):
		r.class, r.refusal = verdict.ClientError, apierror.InvalidHeaders
	case r.connected:
		r.class = verdict.Failed
	}
}

// isHeaderTimeout recognizes the http transport's own response_header_timeout,
// for which net/http has no exported error, as opposed to one of dialing or TLS.
func isHeaderTimeout(err error) bool {
	return strings.Contains(err.Error(), "timeout awaiting response headers")
}

// roundTrip is one request to one backend: the context that ends it, and what
// net/http reports of it.
type roundTrip struct {
	context.Context
	cancel   context.CancelCauseFunc
	deadline deadline.Deadline
	upload   *replay.Upload

	// These are here, and not on their own, to spare the garbage collector.
	url   url.URL
	reply reply
	body  replyBody

	trace       httptrace.ClientTrace
	outer       *httptrace.ClientTrace
	plain       bool
	connections atomic.Int32
}

func (ex *exchange) newRoundTrip(req *http.Request) *roundTrip {
	rt := &roundTrip{plain: ex.balancer.plain, outer: httptrace.ContextClientTrace(req.Context())}
	rt.Context, rt.cancel = context.WithCancelCause(req.Context())
	rt.deadline.Cancel = rt.cancel
	ex.cancels = append(ex.cancels, rt.cancel)
	if rt.outer != nil {
		rt.trace = *rt.outer
	} else {
		rt.Context = httptrace.WithClientTrace(rt.Context, &rt.trace)
	}
	rt.trace.GotConn = rt.gotConn
	rt.trace.WroteRequest = rt.wroteRequest
	rt.trace.Got1xxResponse = rt.got1xxResponse
	return rt
}

// Value implements context.Context. It puts our trace in place of the outer
// one: net/http/httptrace would join the two by reflection, for each request.
func (rt *roundTrip) Value(key any) any {
	value := rt.Context.Value(key)
	if _, ok := value.(*httptrace.ClientTrace); ok {
		return &rt.trace
	}
	return value
}

// gotConn ends an attempt for which net/http takes one connection after the
// other. It does so without end, or with growing pauses, while a backend sends
// GOAWAY or REFUSED_STREAM, where another backend could serve. Idle HTTP/1.1
// connections that turn out dead are not counted: there are only so many.
func (rt *roundTrip) gotConn(got httptrace.GotConnInfo) {
	if rt.outer != nil && rt.outer.GotConn != nil {
		rt.outer.GotConn(got)
	}
	if got.Reused && !isHTTP2(got.Conn) {
		rt.connections.CompareAndSwap(0, 1)
		return
	}
	if rt.connections.Add(1) > 2 {
		rt.cancel(errLostAgain)
	}
}

func isHTTP2(conn net.Conn) bool {
	secured, ok := conn.(interface{ ConnectionState() tls.ConnectionState })
	return ok && secured.ConnectionState().NegotiatedProtocol == "h2"
}

func (rt *roundTrip) wroteRequest(info httptrace.WroteRequestInfo) {
	if rt.outer != nil && rt.outer.WroteRequest != nil {
		rt.outer.WroteRequest(info)
	}
	if info.Err == nil {
		rt.upload.Sent()
	}
}

// got1xxResponse takes the headers out of an interim response (RFC 9110 section
// 15.2), which reverse_proxy passes on at once, before anybody knows what comes
// of the attempt.
func (rt *roundTrip) got1xxResponse(code int, header textproto.MIMEHeader) error {
	if !rt.plain { // a plain reverse_proxy decides on its headers itself
		clear(header)
	}
	if rt.outer == nil || rt.outer.Got1xxResponse == nil {
		return nil
	}
	return rt.outer.Got1xxResponse(code, header)
}

func cloneURL(u *url.URL) *url.URL {
	clone := *u
	return &clone
}
