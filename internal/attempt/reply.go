package attempt

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/internal/websocket"
)

// Reply is the result of an attempt: a response, or a failure.
type Reply struct {
	// Response is nil if there is none.
	Response *http.Response
	Failure
	Class  verdict.Class
	Status int
	// Wait is for how long the backend asked not to be called, and Source where
	// it said so.
	Wait   time.Duration
	Source verdict.HintSource
	// Missing reports whether the backend does not have an object that the
	// request names.
	Missing bool
	// LacksPath reports whether the backend does not have the path of the
	// request, or its api-version.
	LacksPath bool
	// LacksSocket reports whether the backend opens no WebSocket for responses,
	// as its answer to the handshake says. It may serve the same request over
	// HTTP.
	LacksSocket bool
	// AboutAudience is what a refusal says about the audience of a token. It is
	// empty if that is nothing.
	AboutAudience string
	// Whole reports whether all of an error's body was read, and cut whether
	// the connection broke before its end.
	Whole, cut bool
	// code is the code of the error, if an operator may have to act.
	code string
	// sent is nil if nothing was sent.
	sent *Request
	// body is that of a response that may become the client's.
	body *body
	// backend is its end of a WebSocket that the reply has opened. It is nil
	// until that is relayed, or a message is sent.
	backend *websocket.Backend
	// firstByte is when the client got something, and end how the reply ended,
	// if it broke.
	firstByte time.Time
	end       atomic.Pointer[End]
	broken    func(End)
}

// Unsent is the reply of an attempt for which there was no credential.
func Unsent(err error) *Reply {
	r := &Reply{Failure: Failure{Err: err}, Class: verdict.NoCredential}
	var later interface{ RetryAfter() time.Duration }
	if errors.As(err, &later) {
		r.Wait = later.RetryAfter()
	}
	return r
}

// Ended returns why the client's request is over, if it is. The context of the
// attempt, which ends with it, is asked first: it is nearer.
func (r *Reply) Ended(proxied *http.Request) error {
	if r.sent != nil && r.sent.trip.Err() == nil {
		return nil
	}
	return proxied.Context().Err()
}

// Upload is the request's body on its way.
func (r *Reply) Upload() *replay.Upload {
	if r.sent == nil {
		return nil
	}
	return r.sent.trip.upload
}

// ClientsFault returns the error for a request that could not be sent because
// of the client. A backend that gives up an upload which the client stalls
// answers 408, breaks the connection, or waits until we give up.
func (r *Reply) ClientsFault() (apierror.Error, bool) {
	if r.sent == nil {
		return apierror.Error{}, false
	}
	failure := r.sent.Body.Failure()
	switch {
	case r.Refusal != nil:
		return *r.Refusal, true
	case failure != nil && r.Err != nil:
		return apierror.UnreadableBody(failure), true
	case r.Upload().Stalled() && (r.Err != nil || r.Status == http.StatusRequestTimeout):
		return apierror.UnreadableBody(os.ErrDeadlineExceeded), true
	}
	return apierror.Error{}, false
}

// Discard ends the attempt.
func (r *Reply) Discard() {
	if r.Response != nil {
		r.Response.Body.Close()
	}
	if r.sent != nil {
		r.sent.trip.cancel(context.Canceled)
	}
}

// Presentable reports whether a client may see the reply.
func (r *Reply) Presentable() bool {
	switch r.Class {
	case verdict.Credential, verdict.NotPermitted, verdict.NoCredential:
		return false
	}
	return r.Response != nil && !r.cut
}

// SaysMore reports whether the reply says more to the client than an error of
// our own would.
func (r *Reply) SaysMore() bool {
	return r.Presentable() && r.Class.Failover() && r.Class != verdict.Throttled
}

// PerhapsExecuted reports whether the backend may have executed the request.
// With a 503 or 403 it says that it did not, and with a 508 that it had nowhere
// to send it.
func (r *Reply) PerhapsExecuted() bool {
	if r.sent != nil && r.sent.Socket.IsAccepted() && !r.sent.delivering {
		return false
	}
	switch r.Status {
	case 0:
		return r.Connected
	case http.StatusServiceUnavailable, http.StatusForbidden, http.StatusLoopDetected:
		return false
	}
	return r.Status >= 500 || r.Status == http.StatusRequestTimeout || r.Class == verdict.Failed || r.Class == verdict.Timeout
}

// Unexecuted reports whether the backend did not execute the request.
func (r *Reply) Unexecuted() bool {
	return !r.PerhapsExecuted() && (r.Status == 0 || r.Status >= 300)
}

// Reason returns the reason for the cooldown that the reply starts.
func (r *Reply) Reason() pool.Reason {
	reason := pool.Reason{Class: string(r.Class), Status: r.Status, Hint: string(r.Source), Cause: r.code}
	if r.Err != nil {
		reason.Cause, reason.Error = verdict.CauseOf(r.Err), ErrorText(r.Err)
	}
	if r.secrets().In(reason.Cause) {
		reason.Cause = keys.Redacted
	}
	return reason
}

// maxErrorText is how much of an error is logged.
const maxErrorText = 256

// ErrorText is an error for a log.
func ErrorText(err error) string { return pool.CutText(err.Error(), maxErrorText) }

// ErrorField is an error of an attempt for a log.
func ErrorField(err error) zap.Field {
	if err == nil {
		return zap.Skip()
	}
	return zap.String("error", ErrorText(err))
}

// AboutTiers returns the service tiers that the reply says something about.
// That a request of another tier than the usual ones was refused, or failed,
// says nothing about those: there was no capacity for its tier, or none in
// time, which has many forms. The limits that both share are used up only if
// the reply says so.
func (r *Reply) AboutTiers() pool.ServiceTiers {
	tiers := r.asks().Tiers
	if tiers.ShareLimits() && r.Class == verdict.Throttled && verdict.NoneLeft(r.Response.Header) {
		return pool.UsualTiers
	}
	return tiers
}

// isImpatient reports whether the backend had less time than the options allow,
// because of the client's patience.
func (r *Reply) isImpatient() bool {
	return r.Class == verdict.Timeout && r.sent != nil && r.sent.impatient
}

// asks is what the request asks for. Of one that was not sent, it is not known.
func (r *Reply) asks() Asks {
	if r.sent == nil {
		return Asks{}
	}
	return r.sent.Asks
}

func (r *Reply) secrets() keys.Secrets {
	if r.sent == nil {
		return nil
	}
	return r.sent.Secrets
}

// Commit makes the reply the client's now. It returns the response, and the
// reader of the tokens that it costs. broken, if it is not nil, gets the end of
// a broken reply at once.
func (r *Reply) Commit(client http.ResponseWriter, now time.Time, broken func(End)) (*http.Response, *usage.Reader) {
	r.firstByte, r.broken = now, broken
	var tokens *usage.Reader
	if r.body != nil {
		tokens = r.body.goOut(r)
	}
	res := r.Response
	if r.sent.Change.AskUsage && openaiapi.ContentType(res.Header) == openaiapi.TypeEventStream && !openaiapi.IsCompressed(res.Header) {
		res.Body, res.ContentLength = usage.Hide(res.Body), -1
		delete(res.Header, "Content-Length")
	}
	if backend, ok := res.Body.(io.ReadWriteCloser); ok && r.Status == http.StatusSwitchingProtocols && r.sent.Address == nil {
		res.Body = r.tunnel(client, backend) // reverse_proxy relays it
	}
	r.secrets().DropFrom(res.Trailer)
	Finish(r.sent.Incoming, res, r.sent.Fields)
	return res, tokens
}

const (
	// errorBodyLimit is how much of an error's body is read to judge it.
	errorBodyLimit = 64 << 10
	// errorBodyTimeout is how long that may take.
	errorBodyTimeout = 2 * time.Second
)

var errSlowBody = errors.New("the body of an error did not arrive in time")

// judge finds out what a response means: by its status, its headers and, if it
// is an error, its body.
func (r *Reply) judge() {
	var text []byte
	complete := false
	if verdict.NeedsBody(r.Status) || len(r.secrets()) > 0 && r.Status >= 300 && openaiapi.IsCompressed(r.Response.Header) {
		text, complete = r.peek()
		r.Missing = verdict.Missing(r.Status, text)
		r.AboutAudience = verdict.AboutAudience(r.Status, text)
	}
	infers := r.sent.Asks.Kind.Infers() && !r.sent.handshakes()
	r.Class = verdict.Judge(verdict.Reply{Status: r.Status, Header: r.Response.Header, Body: text, Cost: r.sent.Asks.Cost, Infers: infers})
	r.LacksPath = infers && r.Class == verdict.NotHere && verdict.LacksPath(r.Status, text)
	if r.Status >= 300 {
		r.Wait, r.Source = verdict.HintOf(r.Class, r.Status, r.Response.Header, text, time.Now())
	}
	r.readCode(text)
	r.guard(text, complete)
}

// readCode reads the code of an error, but not of a throttle: there are many.
func (r *Reply) readCode(text []byte) {
	if r.Class.Failover() && r.Class != verdict.Throttled {
		r.code = verdict.Code(text)
	}
}

// guard keeps the secrets out of the response. It removes headers that hold
// one, and puts stars in its place in the body of an error or a redirect. A
// compressed body cannot be changed: it is replaced by an error of our own,
// unless the text is complete and holds no secret.
func (r *Reply) guard(text []byte, complete bool) {
	if len(r.secrets()) == 0 {
		return
	}
	r.secrets().DropFrom(r.Response.Header)
	r.secrets().DropFrom(r.Response.Trailer) // which may have come with the end of an error
	if r.secrets().In(r.Response.Status) {
		r.Response.Status = strconv.Itoa(r.Response.StatusCode)
	}
	switch {
	case r.Response.StatusCode < 300:
	case !openaiapi.IsCompressed(r.Response.Header):
		r.Response.Body = r.secrets().Body(r.Response.Body)
	case !complete || r.secrets().In(string(text)):
		r.Response.Body.Close()
		e := apierror.UpstreamError
		e.Status = r.Response.StatusCode
		*r.Response = *e.Response(r.sent.Incoming) // whose path has the client's dialect
	}
}

// peek returns the beginning of an error's body, decoded. The client can still
// read the body from its beginning. complete reports whether the text is all of
// it.
func (r *Reply) peek() (text []byte, complete bool) {
	body, timeout := r.Response.Body, &r.sent.trip.timeout
	timeout.start(errorBodyTimeout, errSlowBody)
	raw, err := io.ReadAll(io.LimitReader(r.raw(), errorBodyLimit))
	r.cut = !timeout.stop() || err != nil
	r.Whole = len(raw) < errorBodyLimit && !r.cut
	r.Response.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(raw), body), body}
	text, complete = openaiapi.Decompress(raw, openaiapi.ContentCoding(r.Response.Header), errorBodyLimit)
	return text, r.Whole && complete
}

// raw is the response's body without the time limit for each read.
func (r *Reply) raw() io.Reader {
	if r.body != nil {
		return r.body.source
	}
	return r.Response.Body
}

// becomeError makes the reply the error that it brought. If the error is the
// client's own, the reply stays as it is.
func (r *Reply) becomeError(failure *sse.Error) {
	class := verdict.Judge(verdict.Reply{Status: failure.Status, Body: failure.Body, OfResponse: failure.OfResponse})
	if !class.Failover() {
		r.body.forgive()
		if len(r.secrets()) > 0 {
			r.decompress(r.secrets())
			r.Response.Body = r.secrets().Body(r.Response.Body)
		}
		return
	}
	original := r.Response
	header := original.Header.Clone()
	for _, name := range []string{"Content-Length", "Content-Encoding", "Cache-Control", "Transfer-Encoding"} {
		header.Del(name)
	}
	header.Set("Content-Type", "application/json")
	if class == verdict.Unclear { // SDKs would repeat a prompt that perhaps no backend serves
		header.Set("X-Should-Retry", "false")
	}
	original.Body.Close()
	r.Response = &http.Response{
		Status:        strconv.Itoa(failure.Status) + " " + http.StatusText(failure.Status),
		StatusCode:    failure.Status,
		Proto:         original.Proto,
		ProtoMajor:    original.ProtoMajor,
		ProtoMinor:    original.ProtoMinor,
		Header:        header,
		Body:          io.NopCloser(bytes.NewReader(failure.Body)),
		ContentLength: int64(len(failure.Body)),
		Request:       original.Request,
	}
	r.body, r.Class, r.Status, r.Whole = nil, class, failure.Status, true
	r.readCode(failure.Body)
	r.guard(nil, true)
	r.Wait, r.Source = verdict.HintOf(r.Class, r.Status, header, failure.Body, time.Now())
}

// decompress makes a compressed reply that holds a secret its text, in which it
// is replaced.
func (r *Reply) decompress(secrets keys.Secrets) {
	if len(secrets) == 0 || !openaiapi.IsCompressed(r.Response.Header) {
		return
	}
	text, all := r.body.text()
	if !all || !secrets.In(string(text)) {
		return
	}
	secrets.Star(text, true)
	r.Response.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(text), drained{r.Response.Body}), r.Response.Body}
	r.Response.ContentLength = int64(len(text))
	r.Response.Header.Set("Content-Length", strconv.Itoa(len(text)))
	r.Response.Header.Del("Content-Encoding")
}

// drained reads a body to its end and returns nothing of it.
type drained struct{ io.Reader }

func (d drained) Read(p []byte) (int, error) {
	_, err := d.Reader.Read(p)
	return 0, err
}
