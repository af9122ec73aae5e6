package openailb

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/cause"
	"github.com/openai-lb/caddy-openai-lb/internal/contentcoding"
	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/redact"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/replybody"
	"github.com/openai-lb/caddy-openai-lb/internal/roundtrip"
	"github.com/openai-lb/caddy-openai-lb/internal/showntext"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// reply is the result of an attempt: a response, or an error.
type reply struct {
	res    *http.Response
	err    error
	class  verdict.Class
	status int
	wait   time.Duration
	source hint.Source
	// missing reports whether the backend does not have an object that the request
	// names.
	missing bool
	// whole reports whether all of an error's body was read, and cut whether the
	// connection broke before its end.
	whole, cut bool
	// connected tells, if there is no response, that the backend may have got the
	// request.
	connected bool
	// uploading reports whether the connection broke in the midst of the upload.
	uploading bool
	// code is the code of the error, if it may need somebody to act.
	code string
	// refusal is the answer to a request that net/http refuses to send.
	refusal apierror.Error
	// credential is the backend's credential with which the request was sent.
	credential Credential
	// secrets are the keys that were sent with the request.
	secrets redact.Secrets
	// trip is the attempt's. It is nil if there was no credential for one.
	trip *roundtrip.Trip
	// body is that of a response that may become the client's.
	body *replybody.Body
}

// ended tells why the client's request is over, if it is. The context of the
// attempt, which ends with it, is asked first: it is nearer.
func (r *reply) ended(req *http.Request) error {
	if r.trip != nil && !r.trip.Ended() {
		return nil
	}
	return req.Context().Err()
}

// upload is the request's body on its way.
func (r *reply) upload() *replay.Upload {
	if r.trip == nil {
		return nil
	}
	return r.trip.Upload
}

// discard ends the attempt.
func (r *reply) discard() {
	if r.res != nil {
		r.res.Body.Close()
	}
	if r.trip != nil {
		r.trip.Cancel(context.Canceled)
	}
}

// presentable reports whether a client may see the reply.
func (r *reply) presentable() bool {
	switch r.class {
	case verdict.Credential, verdict.NotPermitted, verdict.NoCredential:
		return false
	}
	return r.res != nil && !r.cut
}

// tellsMore reports whether the reply tells the client more than an error of
// our own would. With forward, that is also true of a throttle.
func (r *reply) tellsMore(forward bool) bool {
	if !r.presentable() {
		return false
	}
	switch r.class {
	case verdict.Failed, verdict.Overloaded, verdict.TooLarge, verdict.Quota, verdict.NoModel:
		return true
	}
	return forward && r.class == verdict.Throttled
}

// perhapsExecuted reports whether the backend may have executed the request.
// With a 503 it says that it did not.
func (r *reply) perhapsExecuted() bool {
	switch r.status {
	case 0:
		return r.connected
	case http.StatusServiceUnavailable:
		return false
	}
	return r.status >= 500 || r.status == http.StatusRequestTimeout || r.class == verdict.Failed || r.class == verdict.Timeout
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
func (t *Transport) judge(r *reply, cost int64, rt *roundTrip) {
	listed := t.listed(r.status)
	judged := listed || len(t.UnhealthyStatus) == 0
	var text []byte
	complete := false
	mayMiss := r.status == http.StatusNotFound || r.status == http.StatusBadRequest
	if mayMiss || judged && (listed || verdict.NeedsBody(r.status)) || len(r.secrets) > 0 && r.status >= 300 && contentcoding.Compressed(r.res.Header) {
		text, complete = r.peek(rt)
		r.missing = verdict.Missing(r.status, text)
	}
	if !judged {
		r.class = verdict.Served // the client gets it as it is
	} else if r.class = verdict.Judge(verdict.Reply{Status: r.status, Header: r.res.Header, Body: text, Cost: cost}); listed && !r.class.Failover() {
		r.class = verdict.Failed
	}
	if r.status >= 300 {
		r.wait, r.source = hint.Read(r.status, r.res.Header, text, time.Now())
	}
	r.readCode(text)
	r.guard(text, complete)
}

// readCode reads the code of an error, but not of a throttle: there are many.
func (r *reply) readCode(text []byte) {
	if r.class.Failover() && r.class != verdict.Throttled {
		r.code = verdict.Code(text)
	}
}

// reason says why the reply benches a backend.
func (r *reply) reason() pool.Reason {
	reason := pool.Reason{Class: string(r.class), Status: r.status, Hint: string(r.source), Cause: r.code}
	if r.err != nil {
		reason.Cause, reason.Error = cause.Of(r.err), boundedText(r.secrets, r.err)
	}
	if r.secrets.In(reason.Cause) {
		reason.Cause = redact.Mark
	}
	return reason
}

// maxErrorText is how much of an error is logged.
const maxErrorText = 256

// boundedText is an error for a log. One of net/http's may repeat what the
// backend sent.
func boundedText(secrets redact.Secrets, err error) string {
	return showntext.Cut(secrets.Text(err.Error()), maxErrorText)
}

// guard keeps the secrets out of the response. It removes headers that hold
// one, and puts stars in its place in the body of an error or a redirect. A
// compressed body cannot be changed: it is replaced by an error of our own,
// unless the text is complete and holds no secret.
func (r *reply) guard(text []byte, complete bool) {
	if len(r.secrets) == 0 {
		return
	}
	r.secrets.DropFrom(r.res.Header)
	switch {
	case r.res.StatusCode < 300:
	case !contentcoding.Compressed(r.res.Header):
		r.res.Body = r.secrets.Body(r.res.Body)
	case !complete || r.secrets.In(string(text)):
		r.res.Body.Close()
		e := apierror.UpstreamError
		e.Status = r.res.StatusCode
		*r.res = *e.Response(r.res.Request)
	}
}

// peek returns the beginning of an error's body, decoded. The client can still
// read the body from its beginning. complete reports whether the text is all of it.
func (r *reply) peek(rt *roundTrip) (text []byte, complete bool) {
	body := r.res.Body
	rt.Timeout.Start(errorBodyTimeout, errSlowBody)
	raw, err := io.ReadAll(io.LimitReader(r.raw(), errorBodyLimit))
	r.cut = !rt.Timeout.Stop() || err != nil
	r.whole = len(raw) < errorBodyLimit && !r.cut
	r.res.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(raw), body), body}
	text, complete = contentcoding.Decode(raw, contentcoding.Of(r.res.Header), errorBodyLimit)
	return text, r.whole && complete
}

// raw is the response's body without the time limit for each read.
func (r *reply) raw() io.Reader {
	if r.body != nil {
		return r.body.Source
	}
	return r.res.Body
}

// becomeError makes the reply the error that it brought. If the error is the client's
// own, the reply stays as it is.
func (t *Transport) becomeError(r *reply, failure *sse.Error) {
	class := verdict.Judge(verdict.Reply{Status: failure.Status, Body: failure.Body})
	if !class.Failover() || len(t.UnhealthyStatus) > 0 && !t.listed(failure.Status) {
		r.body.Forgive()
		if len(r.secrets) > 0 {
			r.decompress()
			r.res.Body = r.secrets.Body(r.res.Body)
		}
		return
	}
	original := r.res
	header := original.Header.Clone()
	for _, name := range []string{"Content-Length", "Content-Encoding", "Cache-Control", "Transfer-Encoding"} {
		header.Del(name)
	}
	header.Set("Content-Type", "application/json")
	original.Body.Close()
	r.res = &http.Response{
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
	r.body, r.class, r.status, r.whole = nil, class, failure.Status, true
	r.readCode(failure.Body)
	r.guard(nil, true)
	r.wait, r.source = hint.Read(r.status, header, failure.Body, time.Now())
}

// decompress makes a compressed reply that holds a secret its text, in which it can be replaced.
func (r *reply) decompress() {
	if !contentcoding.Compressed(r.res.Header) {
		return
	}
	text, all := r.body.Text()
	if !all || !r.secrets.In(string(text)) {
		return
	}
	r.res.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(text), drained{r.res.Body}), r.res.Body}
	r.res.ContentLength = int64(len(text))
	r.res.Header.Set("Content-Length", strconv.Itoa(len(text)))
	r.res.Header.Del("Content-Encoding")
}

// drained reads a body to its end and returns nothing of it.
type drained struct{ io.Reader }

func (d drained) Read(p []byte) (int, error) {
	_, err := d.Reader.Read(p)
	return 0, err
}
