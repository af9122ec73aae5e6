package attempt

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Errors of an attempt that net/http does not report.
var (
	ErrNoReply       = &verdict.CauseError{Word: "no_reply", Text: "no reply in time"}
	ErrSilent        = &verdict.CauseError{Word: "silent", Text: "the backend sends nothing to any request"}
	ErrNoHTTP        = &verdict.CauseError{Word: "malformed", Text: "the reply is not a valid HTTP response"}
	ErrWrongProtocol = &verdict.CauseError{Word: "wrong_protocol", Text: "the backend switched to another protocol than the requested one"}
	ErrNoUpgrade     = &verdict.CauseError{Word: "not_upgraded", Text: "the backend answered the handshake without opening a WebSocket"}
	ErrUnprocessed   = &verdict.CauseError{Word: "not_accepted", Text: "the backend did not process the request"}
	ErrLostAgain     = &verdict.CauseError{Word: "not_accepted", Text: "the backend accepted the request on neither of two connections"}
)

// maxInterims is how many interim responses a client gets for a request.
// net/http does not limit interim responses that are passed on, and a backend
// may send thousands in a second.
const maxInterims = 20

// trip is the context of a request that is sent, which can cancel it. It also
// records net/http's events.
type trip struct {
	context.Context
	cancel  context.CancelCauseFunc
	timeout deadline
	upload  *replay.Upload
	// final is the body if it can be released once net/http has sent it. It is
	// nil if another attempt may need it. certain reports whether the latest
	// connection is one on which net/http never sends a request a second time.
	final   *replay.Body
	certain atomic.Bool
	address *Address
	// needsHTTP1 reports whether the connection must not use HTTP/2. proxied
	// reports whether the latest connection is made through an outgoing proxy.
	needsHTTP1 bool
	proxied    atomic.Bool
	// interims counts the interim responses of all backends. It is nil if the
	// client can get none.
	interims *atomic.Int32
	client   http.ResponseWriter

	trace       httptrace.ClientTrace
	outer       *httptrace.ClientTrace
	connections atomic.Int32
	// latest is the connection that net/http took last. reused reports whether
	// it was used before.
	latest net.Conn
	reused bool
	// isSecond reports whether the request is sent for the second time, because
	// the first connection lost it.
	isSecond bool
	// shares reports whether a connection may be shared by requests although it
	// does not look like HTTP/2, because HTTP/2 is used without TLS.
	shares bool
	// interim guards replied, which reports whether the attempt has its reply
	// or has failed. Interim responses that net/http reads after that must not
	// reach the client.
	interim sync.Mutex
	replied bool
	// sent reports whether all of the request was written.
	sent atomic.Bool
	// uploads is the connection to which a long body is being sent, or nil.
	uploads atomic.Pointer[net.Conn]
}

// begin sets up the trip as a cancelable child of ctx.
func (t *trip) begin(ctx context.Context) {
	t.outer = httptrace.ContextClientTrace(ctx)
	t.Context, t.cancel = context.WithCancelCause(ctx)
	t.timeout.cancel = t.cancel
	if t.outer != nil {
		t.trace = *t.outer
	} else {
		t.Context = httptrace.WithClientTrace(t.Context, &t.trace)
	}
	t.trace.GotConn = t.gotConn
	t.trace.WroteRequest = t.wroteRequest
	t.trace.Got1xxResponse = t.got1xxResponse
}

// The keys under which Caddy's transport looks for values of reverse_proxy
// (hosts.go). The context has the reverseproxy.DialInfo. Caddy's variables say
// whether a connection must use HTTP/1.1, and whether it goes through a proxy.
const (
	dialInfo      = caddy.CtxKey("reverse_proxy.dial_info")
	onlyHTTP1     = "reverse_proxy.tls_h1_only"
	outgoingProxy = "reverse_proxy.proxy"
)

// tripKey is the context key of the trip, for contexts derived from it.
type tripKey struct{}

// Value implements context.Context. It returns the trip's trace instead of the
// outer one, because net/http/httptrace would combine the two by reflection for
// each request.
//
// An attempt of the directive has its own address, variables and placeholders.
// net/http may still dial for one attempt while the next one begins, so the
// values that Caddy's transport reads to dial are created anew for each call.
func (t *trip) Value(key any) any {
	switch key {
	case tripKey{}:
		return t
	case dialInfo, caddyhttp.VarsCtxKey, caddy.ReplacerCtxKey:
		if t.address != nil {
			return t.caddyValue(key)
		}
	}
	value := t.Context.Value(key)
	if _, ok := value.(*httptrace.ClientTrace); ok {
		return &t.trace
	}
	return value
}

// caddyValue returns the attempt's value for a key under which Caddy has a
// value for the whole request.
func (t *trip) caddyValue(key any) any {
	switch key {
	case dialInfo:
		return t.address.info
	case caddy.ReplacerCtxKey:
		whole, _ := t.Context.Value(key).(*caddy.Replacer)
		return t.address.placeholders(whole)
	}
	vars := make(map[string]any)
	if t.needsHTTP1 {
		vars[onlyHTTP1] = true
	}
	if t.proxied.Load() {
		vars[outgoingProxy] = true
	}
	return vars
}

// knowProxies wraps a Proxy function so that an attempt records whether it goes
// through an outgoing proxy. Caddy's transport records this for its dialer in
// the variables that it finds in the request's context.
func knowProxies(proxyOf func(*http.Request) (*url.URL, error)) func(*http.Request) (*url.URL, error) {
	if proxyOf == nil {
		return nil
	}
	return func(r *http.Request) (*url.URL, error) {
		proxy, err := proxyOf(r)
		if t, ok := r.Context().Value(tripKey{}).(*trip); ok {
			t.proxied.Store(proxy != nil)
		}
		return proxy, err
	}
}

// gotConn ends an attempt for which net/http takes one connection after
// another. While a backend sends GOAWAY or REFUSED_STREAM, net/http does so
// without end, or with growing pauses, although another backend could serve the
// request.
//
// The third connection ends the attempt. Idle HTTP/1.1 connections that turn
// out to be dead are not counted, because their number is limited. Only HTTP/2
// takes the same connection again, with or without TLS.
func (t *trip) gotConn(got httptrace.GotConnInfo) {
	if t.outer != nil && t.outer.GotConn != nil {
		t.outer.GotConn(got)
	}
	t.endUpload()
	if t.reused = got.Reused; !got.Reused {
		hideSurplus()
	}
	t.certain.Store(!got.Reused && !t.shares && !isHTTP2(got.Conn))
	if t.isSecond && got.Reused && !t.shares && !isHTTP2(got.Conn) {
		_ = got.Conn.Close() // so that net/http takes the next one, and at last a new one
		return
	}
	if t.upload.Long() {
		conn := got.Conn
		uploadBegins(conn)
		t.uploads.Store(&conn)
	}
	again := got.Conn == t.latest
	if t.latest = got.Conn; got.Reused && !again && !isHTTP2(got.Conn) {
		t.connections.CompareAndSwap(0, 1)
		return
	}
	switch n := t.connections.Add(1); {
	case n > 2:
		t.cancel(ErrLostAgain)
	case n == 2 && isHTTP2(got.Conn): // net/http pauses for a second before it takes the next one
		t.timeout.refused()
	}
}

// endUpload removes this upload from the connection's count. It is needed
// because net/http does not report the end of a request that it never began to
// write, and other requests share the connection.
func (t *trip) endUpload() {
	if conn := t.uploads.Swap(nil); conn != nil {
		uploadEnds(*conn)
	}
}

// brokenHTTP1 is the beginning of net/http's error for a connection that broke
// after the first byte of a reply, or in a write.
const brokenHTTP1 = "net/http: HTTP/1.x transport connection broken: "

// lost reports whether a reused connection lost the request before any byte of
// a reply. Servers close idle connections, perhaps just when the next request
// is on its way, so this says nothing about the backend.
func (t *trip) lost(err error) bool {
	if !t.reused || t.isSecond || t.Err() != nil {
		return false
	}
	text, network := err.Error(), (*net.OpError)(nil)
	switch {
	case errors.As(err, &network) && network.Op == "write", strings.HasPrefix(text, brokenHTTP1+"readLoopPeekFailLocked: "):
		return true
	case strings.HasPrefix(text, brokenHTTP1):
		return false
	case network != nil, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return true
	}
	return text == "http: server closed idle connection" || text == "http2: client connection lost"
}

func isHTTP2(conn net.Conn) bool {
	secured, ok := conn.(interface{ ConnectionState() tls.ConnectionState })
	return ok && secured.ConnectionState().NegotiatedProtocol == "h2"
}

func (t *trip) wroteRequest(info httptrace.WroteRequestInfo) {
	if t.outer != nil && t.outer.WroteRequest != nil {
		t.outer.WroteRequest(info)
	}
	t.endUpload()
	if info.Err == nil {
		t.sent.Store(true)
		if t.upload.Long() {
			t.timeout.sent()
		}
		t.upload.Sent()
		// A reused connection may have been closed just then, and an HTTP/2
		// connection may not accept the request. In these cases, net/http sends
		// the request again until a reply arrives.
		if t.final != nil && t.certain.Load() {
			t.final.Release()
		}
	}
}

// got1xxResponse passes an interim response on at once (RFC 9110 section 15.2),
// before the result of the attempt is known. The directive passes only its
// status, because no field of an interim response is needed. Those over the
// limit are dropped.
//
// HTTP/2 has no 101 (RFC 9113 section 8.6). net/http treats it as an interim
// response, but for the client it would be the last response, so it is an
// error.
func (t *trip) got1xxResponse(code int, header textproto.MIMEHeader) error {
	if code == http.StatusSwitchingProtocols {
		return ErrWrongProtocol
	}
	t.interim.Lock()
	defer t.interim.Unlock()
	switch {
	case t.replied || t.interims == nil || t.interims.Add(1) > maxInterims:
	case t.client != nil:
		t.client.WriteHeader(code)
	case t.outer != nil && t.outer.Got1xxResponse != nil:
		return t.outer.Got1xxResponse(code, header)
	}
	return nil
}

// endInterim stops passing interim responses on.
func (t *trip) endInterim() {
	t.interim.Lock()
	t.replied = true
	t.interim.Unlock()
}

// Failure is the reason why there is no response.
type Failure struct {
	Err   error
	class verdict.Class
	// Connected reports whether the backend may have received the request.
	Connected bool
	// Uploading reports whether the connection broke during the upload. The
	// backend may have refused the upload in this way, without a reason.
	Uploading bool
	// Refusal is the answer to a request that net/http refuses to send. It is
	// nil if net/http does not refuse it.
	Refusal *apierror.Error
}

// Parts of net/http's errors for a request that it refuses to send. net/http
// exports no errors for that.
const (
	headerListTooLarge = "request header list larger than peer's advertised limit"
	invalidHeader      = "net/http: invalid header field"
)

// failure returns the Failure for an error of the round trip.
func (t *trip) failure(err error) Failure {
	t.endUpload()
	f := Failure{Err: verdict.OwnWords(err), class: verdict.Unreachable, Connected: t.connections.Load() > 0}
	ended := context.Cause(t)
	switch {
	case errors.Is(err, ErrNoReply), errors.Is(ended, ErrNoReply), isHeaderTimeout(err):
		f.Err, f.class = ErrNoReply, verdict.Timeout
	case errors.Is(err, ErrSilent), errors.Is(ended, ErrSilent):
		f.Err, f.class = ErrSilent, verdict.Silent
	case errors.Is(ended, ErrLostAgain):
		// both connections refused it before it was executed
		f.Err, f.class, f.Connected = ErrLostAgain, verdict.Failed, false
	case isUnprocessed(err.Error()):
		f.Err, f.class, f.Connected, f.Uploading = ErrUnprocessed, verdict.Failed, false, t.upload.Long()
	case strings.Contains(err.Error(), headerListTooLarge):
		f.class, f.Refusal = verdict.ClientError, &apierror.HeadersTooLarge
	case strings.HasPrefix(err.Error(), invalidHeader):
		f.class, f.Refusal = verdict.ClientError, &apierror.InvalidHeaders
	case f.Connected:
		f.class, f.Uploading = verdict.Failed, t.upload.Long() && !t.sent.Load()
	}
	return f
}

// isUnprocessed reports whether this is net/http's error for a request that was
// not processed, as HTTP/2 guarantees: by REFUSED_STREAM (RFC 9113 section
// 8.7), or by GOAWAY if its stream is above the last one (section 6.8).
// net/http resends such a request itself if it has the whole body.
func isUnprocessed(text string) bool {
	text = strings.TrimPrefix(text, "http2: Transport: cannot retry err [")
	return strings.HasPrefix(text, "http2: Transport received ") && strings.Contains(text, "GOAWAY") ||
		strings.HasPrefix(text, "stream error: ") && strings.Contains(text, "; REFUSED_STREAM")
}

// isHeaderTimeout reports whether err is due to the http transport's own
// response_header_timeout, and not a timeout of dialing or TLS. net/http
// exports no error for it.
func isHeaderTimeout(err error) bool {
	return strings.Contains(err.Error(), "timeout awaiting response headers")
}
