// Package roundtrip follows one request to one backend: it ends what takes too long, and what
// net/http tries again and again, and tells why there is no reply.
package roundtrip

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync/atomic"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/bulk"
	"github.com/openai-lb/caddy-openai-lb/internal/cause"
	"github.com/openai-lb/caddy-openai-lb/internal/deadline"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// What can become of a round trip besides the errors of net/http.
var (
	ErrNoReply       = &cause.Error{Word: "no_reply", Text: "no reply in time"}
	ErrNoHTTP        = &cause.Error{Word: "malformed", Text: "the reply is not a valid HTTP response"}
	ErrWrongProtocol = &cause.Error{Word: "wrong_protocol", Text: "the backend switched to another protocol than the requested one"}
	ErrNoUpgrade     = &cause.Error{Word: "not_upgraded", Text: "the backend answered the handshake without opening a WebSocket"}
	ErrLostAgain     = &cause.Error{Word: "not_accepted", Text: "the backend accepted the request on neither of two connections"}
)

// Trip is a request on its way: the context that ends it, and what net/http reports of it.
type Trip struct {
	context.Context
	Cancel  context.CancelCauseFunc
	Timeout deadline.Deadline
	Upload  *replay.Upload
	// KeepInterimHeader leaves the header of interim responses as it is.
	KeepInterimHeader bool

	trace       httptrace.ClientTrace
	outer       *httptrace.ClientTrace
	connections atomic.Int32
	// latest is the connection that net/http took last.
	latest net.Conn
	// sent reports whether all of the request was written.
	sent atomic.Bool
	// uploads is the connection to which a long body is being sent, or nil.
	uploads atomic.Pointer[net.Conn]
}

// Begin makes ctx, with a way to end it, the context of the trip.
func (t *Trip) Begin(ctx context.Context) {
	t.outer = httptrace.ContextClientTrace(ctx)
	t.Context, t.Cancel = context.WithCancelCause(ctx)
	t.Timeout.Cancel = t.Cancel
	if t.outer != nil {
		t.trace = *t.outer
	} else {
		t.Context = httptrace.WithClientTrace(t.Context, &t.trace)
	}
	t.trace.GotConn = t.gotConn
	t.trace.WroteRequest = t.wroteRequest
	t.trace.Got1xxResponse = t.got1xxResponse
}

// Ended reports whether the trip is cancelled, by us or with the context that it began with.
func (t *Trip) Ended() bool { return t.Err() != nil }

// Value implements context.Context. It puts our trace in place of the outer
// one: net/http/httptrace would join the two by reflection, for each request.
func (t *Trip) Value(key any) any {
	value := t.Context.Value(key)
	if _, ok := value.(*httptrace.ClientTrace); ok {
		return &t.trace
	}
	return value
}

// gotConn ends an attempt for which net/http takes one connection after the
// other. It does so without end, or with growing pauses, while a backend sends
// GOAWAY or REFUSED_STREAM, where another backend could serve. Idle HTTP/1.1
// connections that turn out dead are not counted: there are only so many. Only
// HTTP/2 takes the same one again, with TLS or without.
func (t *Trip) gotConn(got httptrace.GotConnInfo) {
	if t.outer != nil && t.outer.GotConn != nil {
		t.outer.GotConn(got)
	}
	t.endUpload()
	if t.Upload.Long() {
		conn := got.Conn
		bulk.UploadBegins(conn)
		t.uploads.Store(&conn)
	}
	again := got.Conn == t.latest
	if t.latest = got.Conn; got.Reused && !again && !isHTTP2(got.Conn) {
		t.connections.CompareAndSwap(0, 1)
		return
	}
	if t.connections.Add(1) > 2 {
		t.Cancel(ErrLostAgain)
	}
}

// endUpload ends what is said of a connection. net/http does not report the end of a request that it never
// began to write, and others share the connection.
func (t *Trip) endUpload() {
	if conn := t.uploads.Swap(nil); conn != nil {
		bulk.UploadEnds(*conn)
	}
}

func isHTTP2(conn net.Conn) bool {
	secured, ok := conn.(interface{ ConnectionState() tls.ConnectionState })
	return ok && secured.ConnectionState().NegotiatedProtocol == "h2"
}

func (t *Trip) wroteRequest(info httptrace.WroteRequestInfo) {
	if t.outer != nil && t.outer.WroteRequest != nil {
		t.outer.WroteRequest(info)
	}
	t.endUpload()
	if info.Err == nil {
		t.sent.Store(true)
		t.Upload.Sent()
	}
}

// got1xxResponse takes the headers out of an interim response (RFC 9110 section
// 15.2), which reverse_proxy passes on at once, before anybody knows what comes
// of the attempt.
func (t *Trip) got1xxResponse(code int, header textproto.MIMEHeader) error {
	if !t.KeepInterimHeader {
		clear(header)
	}
	if t.outer == nil || t.outer.Got1xxResponse == nil {
		return nil
	}
	return t.outer.Got1xxResponse(code, header)
}

// Failure is why a trip has no reply.
type Failure struct {
	Err   error
	Class verdict.Class
	// Connected tells that the backend may have got the request.
	Connected bool
	// Uploading reports whether the connection broke in the midst of the upload.
	// The backend may refuse such an upload, and nothing says why.
	Uploading bool
	// Refusal is the answer to a request that net/http refuses to send.
	Refusal apierror.Error
}

// What net/http says of a request that it refuses to send. It has no exported
// errors for that.
const (
	headerListTooLarge = "request header list larger than peer's advertised limit"
	invalidHeader      = "net/http: invalid header field"
)

// Why tells why there is no reply, if this is the error.
func (t *Trip) Why(err error) Failure {
	t.endUpload()
	f := Failure{Err: err, Class: verdict.Unreachable, Connected: t.connections.Load() > 0}
	ended := context.Cause(t)
	switch {
	case errors.Is(err, ErrNoReply), errors.Is(ended, ErrNoReply), isHeaderTimeout(err):
		f.Err, f.Class = ErrNoReply, verdict.Timeout
	case errors.Is(ended, ErrLostAgain):
		// both connections refused it before it was executed
		f.Err, f.Class, f.Connected = ErrLostAgain, verdict.Failed, false
	case strings.Contains(err.Error(), headerListTooLarge):
		f.Class, f.Refusal = verdict.ClientError, apierror.HeadersTooLarge
	case strings.HasPrefix(err.Error(), invalidHeader):
		f.Class, f.Refusal = verdict.ClientError, apierror.InvalidHeaders
	case f.Connected:
		f.Class, f.Uploading = verdict.Failed, t.Upload.Long() && !t.sent.Load()
	}
	return f
}

// isHeaderTimeout recognizes the http transport's own response_header_timeout,
// for which net/http has no exported error, as opposed to one of dialing or TLS.
func isHeaderTimeout(err error) bool {
	return strings.Contains(err.Error(), "timeout awaiting response headers")
}
