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
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Reply is the result of an attempt: a response, or a failure. It is read as
// far as its class depends on it. Whoever called Send must either commit it to
// the client, once, or discard it. Otherwise, its connection stays in use.
type Reply struct {
	// Response is nil if there is none.
	Response *http.Response
	Failure
	Class  verdict.Class
	Status int
	// Wait is how long the backend asked not to be called. Source is where it
	// said so.
	Wait   time.Duration
	Source verdict.HintSource
	// Missing reports whether the backend lacks an object that the request
	// names.
	Missing bool
	// LacksPath reports whether the backend lacks the path of the request, or
	// its api-version.
	LacksPath bool
	// LacksSocket reports whether the backend opens no WebSocket for responses,
	// according to its answer to the handshake. It may serve the same request
	// over HTTP.
	LacksSocket bool
	// AboutAudience is the part of a refusal that is about the audience of a
	// token. It is empty if there is none.
	AboutAudience string
	// Whole reports whether all of an error's body was read. cut reports
	// whether the connection was cut before its end.
	Whole, cut bool
	// code is the error's code, for errors on which an operator may have to
	// act.
	code string
	// sent is nil if nothing was sent.
	sent *Outgoing
	// body is the body of a response that may go to the client.
	body *body
	// backend is the backend's end of a WebSocket that the reply has opened. It
	// is nil until the WebSocket is relayed or a message is sent.
	backend seam.WebSocketBackend
	// firstByte is when the client got the first byte. end is how a broken
	// reply ended.
	firstByte time.Time
	end       atomic.Pointer[End]
	broken    func(End)
}

// Unsent returns the reply to an attempt for which there was no credential.
func Unsent(err error) *Reply {
	r := &Reply{Failure: Failure{Err: err}, Class: verdict.NoCredential}
	var later interface{ RetryAfter() time.Duration }
	if errors.As(err, &later) {
		r.Wait = later.RetryAfter()
	}
	return r
}

// Ended returns the reason if the client's request is over, else nil. It first
// checks the context of the attempt, which ends with the request's and is
// cheaper to ask.
func (r *Reply) Ended(proxied *http.Request) error {
	if r.sent != nil && r.sent.trip.Err() == nil {
		return nil
	}
	return proxied.Context().Err()
}

// Upload returns the upload of the request's body. It is nil if nothing was
// sent.
func (r *Reply) Upload() *replay.Upload {
	if r.sent == nil {
		return nil
	}
	return r.sent.trip.upload
}

// ClientsFault returns the error for a request that could not be sent because
// of the client. If the client stalls its upload, the backend may answer 408 or
// cut the connection, or the attempt may time out.
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

// Discard closes the reply and ends the attempt.
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

// SaysMore reports whether the reply says more to the client than the
// balancer's own error would.
func (r *Reply) SaysMore() bool {
	return r.Presentable() && r.Class.Failover() && r.Class != verdict.Throttled
}

// PerhapsExecuted reports whether the backend may have executed the request. A
// 503 or 403 means that it did not, and a 508 that the request got no further.
func (r *Reply) PerhapsExecuted() bool {
	if r.sent != nil && r.sent.Socket != nil && !r.sent.delivering {
		return false
	}
	switch r.Status {
	case 0:
		return r.Connected
	case http.StatusServiceUnavailable, http.StatusForbidden, http.StatusLoopDetected:
		return false
	}
	return r.Status >= 500 || r.Status == http.StatusRequestTimeout || r.Class == verdict.Failed ||
		r.Class == verdict.Timeout
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

// maxErrorText is the length to which logged errors are cut.
const maxErrorText = 256

// ErrorText returns the text of an error for a log.
func ErrorText(err error) string { return pool.CutText(err.Error(), maxErrorText) }

// ErrorField returns the log field of an attempt's error. It is empty if err is
// nil.
func ErrorField(err error) zap.Field {
	if err == nil {
		return zap.Skip()
	}
	return zap.String("error", ErrorText(err))
}

// AboutTiers returns the service tiers that the reply is about. If a request of
// an unusual tier is refused or fails, that usually says nothing about the
// usual tiers: there was no capacity for its tier, or not in time, which
// backends report in many forms. A refusal is about the usual tiers, too, only
// if its tier shares their limits and the reply says that these are used up.
func (r *Reply) AboutTiers() pool.ServiceTiers {
	tiers := r.traits().Tiers
	if tiers.ShareLimits() && r.Class == verdict.Throttled && verdict.NoneLeft(r.Response.Header) {
		return pool.UsualTiers
	}
	return tiers
}

// isImpatient reports whether the attempt timed out earlier than the options
// allow, because of the client's patience.
func (r *Reply) isImpatient() bool {
	return r.Class == verdict.Timeout && r.sent != nil && r.sent.impatient
}

// traits returns the parts of the request that decide the meaning of the reply.
// It is empty if the request was not sent.
func (r *Reply) traits() Traits {
	if r.sent == nil {
		return Traits{}
	}
	return r.sent.Traits
}

func (r *Reply) secrets() keys.Secrets {
	if r.sent == nil {
		return nil
	}
	return r.sent.Secrets
}

// Commit begins to pass the reply to the client. It returns the response, and
// the reader of the tokens that the reply costs. If the reply breaks later,
// broken is called with its end, unless broken is nil.
func (r *Reply) Commit(client http.ResponseWriter, now time.Time, broken func(End)) (*http.Response, *usage.Reader) {
	r.firstByte, r.broken = now, broken
	var tokens *usage.Reader
	if r.body != nil {
		tokens = r.body.goOut(r)
	}
	res := r.Response
	if r.sent.Change.AskUsage && openaiapi.ContentType(res.Header) == openaiapi.TypeEventStream &&
		!openaiapi.IsCompressed(res.Header) {
		res.Body, res.ContentLength = usage.Hide(res.Body), -1
		delete(res.Header, "Content-Length")
	}
	if backend, ok := res.Body.(io.ReadWriteCloser); ok && r.Status == http.StatusSwitchingProtocols &&
		r.sent.Address == nil {
		res.Body = r.tunnel(client, backend) // reverse_proxy relays it
	}
	r.secrets().DropFrom(res.Trailer)
	Finish(r.sent.Incoming, res, r.sent.Fields)
	return res, tokens
}

const (
	// errorBodyLimit is how much of an error's body is read to classify it.
	errorBodyLimit = 64 << 10
	// errorBodyTimeout is how long reading that much may take.
	errorBodyTimeout = 2 * time.Second
)

var errSlowBody = errors.New("the body of an error did not arrive in time")

// judge classifies a response by its status, its headers and, if it is an
// error, its body.
func (r *Reply) judge() {
	var text []byte
	complete := false
	if verdict.NeedsBody(r.Status) ||
		len(r.secrets()) > 0 && r.Status >= 300 && openaiapi.IsCompressed(r.Response.Header) {
		text, complete = r.peek()
		r.Missing = verdict.Missing(r.Status, text)
		r.AboutAudience = verdict.AboutAudience(r.Status, text)
	}
	infers := r.sent.Traits.Kind.Infers() && !r.sent.handshakes()
	r.Class = verdict.Judge(verdict.Reply{
		Status: r.Status, Header: r.Response.Header, Body: text, Cost: r.sent.Traits.Cost, Infers: infers,
	})
	r.LacksPath = infers && r.Class == verdict.NotHere && verdict.LacksPath(r.Status, text)
	if r.Status >= 300 {
		r.Wait, r.Source = verdict.HintOf(r.Class, r.Status, r.Response.Header, text, time.Now())
	}
	r.readCode(text)
	r.guard(text, complete)
}

// readCode reads the code of an error. It skips throttles, because they are
// frequent.
func (r *Reply) readCode(text []byte) {
	if r.Class.Failover() && r.Class != verdict.Throttled {
		r.code = verdict.Code(text)
	}
}

// guard keeps the secrets out of the response. It removes headers that contain
// one, and replaces secrets by stars in the body of an error or a redirect. A
// compressed body cannot be changed, so it is replaced by the balancer's own
// error, unless its text is complete and contains no secret.
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

// peek returns the beginning of an error's body, decompressed. The client can
// still read the whole body. complete reports whether the text is the whole
// body.
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

// raw returns the response's body without the time limit for each read.
func (r *Reply) raw() io.Reader {
	if r.body != nil {
		return r.body.source
	}
	return r.Response.Body
}

// becomeError replaces the reply by the error that its body contains. If the
// error is the client's own, the reply is passed on as it is.
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

// decompress replaces a compressed body that contains a secret by its
// decompressed text, with stars instead of the secret.
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

// drained reads a body to its end and returns no data.
type drained struct{ io.Reader }

func (d drained) Read(p []byte) (int, error) {
	_, err := d.Reader.Read(p)
	return 0, err
}
