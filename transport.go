package openailb

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/bulk"
	"github.com/openai-lb/caddy-openai-lb/internal/contentcoding"
	"github.com/openai-lb/caddy-openai-lb/internal/deadline"
	"github.com/openai-lb/caddy-openai-lb/internal/mediatype"
	"github.com/openai-lb/caddy-openai-lb/internal/plainproxy"
	"github.com/openai-lb/caddy-openai-lb/internal/replyheader"
	"github.com/openai-lb/caddy-openai-lb/internal/tunnel"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

func init() {
	caddy.RegisterModule(new(Transport))
}

// Transport makes one attempt at a backend, classifies the reply and records
// what it means. If another backend may do better, the client does not get the
// reply: reverse_proxy asks the selection again, which chooses the next backend.
//
// In a plain reverse_proxy it works together with the openai_lb selection
// policy, and has no effect without it.
type Transport struct {
	PassiveHealth

	// HTTP configures the connections to the backends, as reverse_proxy's http
	// transport does. Default: that transport's defaults, but no added
	// compression, more idle connections, which are closed before providers
	// close theirs, and pings that find dead HTTP/2 connections.
	HTTP *reverseproxy.HTTPTransport `json:"http,omitempty"`

	roundTripper http.RoundTripper
	alarms       deadline.Alarms
	// schemes are those of the backends by dial address, for active health
	// checks. In a plain reverse_proxy it is nil.
	schemes map[string]string
}

// CaddyModule returns the Caddy module information.
func (*Transport) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.transport.openai_lb",
		New: func() caddy.Module { return new(Transport) },
	}
}

const (
	// idleConnTimeout is below the four minutes after which Azure's load
	// balancers drop an idle connection without a word.
	idleConnTimeout = 90 * time.Second
	// idleConnsPerHost keeps connections for hundreds of parallel streams.
	idleConnsPerHost = 512
	// handshakeTimeout is how long a backend may stay silent once it accepted
	// a connection.
	handshakeTimeout = 5 * time.Second
	pingInterval     = 15 * time.Second
	pingTimeout      = 5 * time.Second
	// maxReceiveBuffer is how much of a reply over HTTP/2 waits for a client
	// that does not read. Go's default is 4 MiB.
	maxReceiveBuffer = 256 << 10
)

// Provision sets up the transport.
func (t *Transport) Provision(ctx caddy.Context) error {
	if err := t.PassiveHealth.provision(); err != nil {
		return err
	}
	if proxy := plainproxy.Around(ctx.Modules()); t.schemes == nil && proxy != nil && !plainproxy.HasPolicy(proxy, "openai_lb") {
		ctx.Logger().Warn("transport openai_lb has no effect without lb_policy openai_lb")
	}
	if t.HTTP == nil {
		t.HTTP = new(reverseproxy.HTTPTransport)
	}
	if t.HTTP.ProxyProtocol != "" {
		return errors.New("http: proxy_protocol is not supported")
	}
	// net/http must not ask for compression that the client did not ask for,
	// nor decompress what the client asked for
	t.HTTP.Compression = new(false)
	if t.HTTP.KeepAlive == nil {
		t.HTTP.KeepAlive = new(reverseproxy.KeepAlive)
	}
	if t.HTTP.KeepAlive.IdleConnTimeout == 0 {
		t.HTTP.KeepAlive.IdleConnTimeout = caddy.Duration(idleConnTimeout)
	}
	if t.HTTP.KeepAlive.MaxIdleConnsPerHost == 0 {
		t.HTTP.KeepAlive.MaxIdleConnsPerHost = idleConnsPerHost
	}
	if err := t.HTTP.Provision(ctx); err != nil {
		return fmt.Errorf("http: %w", err)
	}
	if t.HTTP.Transport.TLSHandshakeTimeout == 0 {
		t.HTTP.Transport.TLSHandshakeTimeout = handshakeTimeout
	}
	t.HTTP.Transport.HTTP2 = &http.HTTP2Config{
		SendPingTimeout:           pingInterval,
		PingTimeout:               pingTimeout,
		MaxReceiveBufferPerStream: maxReceiveBuffer,
	}
	t.HTTP.Transport.DialContext = bulk.Over(t.HTTP.Transport.DialContext)
	t.roundTripper = t.HTTP
	return nil
}

// Cleanup closes idle connections, and stops unused timers.
func (t *Transport) Cleanup() error {
	t.alarms.Close()
	if t.HTTP == nil {
		return nil
	}
	return t.HTTP.Cleanup()
}

// errNextBackend makes reverse_proxy ask the selection again.
var errNextBackend = reverseproxy.NewDialError(errors.New("trying the next backend"))

// RoundTrip implements http.RoundTripper. It makes one attempt at the backend
// that the selection chose for the request, or answers if there is none.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	ex := exchangeOf(req.Context(), t)
	if ex == nil {
		return t.roundTripper.RoundTrip(req)
	}
	if ex.current == nil {
		return ex.answer(req), nil
	}
	r := t.attempt(ex, req)
	if err := r.ended(req); err != nil && !ex.bodyLate() {
		r.discard()
		ex.attempted().class = verdict.ClientLeft
		ex.endAttempt(ex.attempted())
		return nil, err // the client left, and no backend is to blame
	}
	if refusal, ok := ex.clientsFault(r); ok {
		r.discard()
		if r.upload().Stalled() {
			// net/http's server sends no answer while the body is being read
			_ = http.NewResponseController(ex.writer).SetReadDeadline(time.Now()) // not all writers have one
		}
		ex.own, ex.ownClass = refusal.Answer(req)
		ex.attempted().class = verdict.ClientError
		ex.endAttempt(ex.attempted())
		return ex.answer(req), nil
	}
	t.remember(ex, r)
	ex.executed = !ex.asked.repeatable && r.perhapsExecuted()
	if ex.mayBeElsewhere(r) {
		return nil, errNextBackend
	}
	if !r.class.Failover() || ex.forwarded && r.presentable() {
		return t.commit(ex, r), nil
	}
	if ex.mayRepeat(r) {
		return nil, errNextBackend
	}
	return ex.answer(req), nil
}

// bodyLate reports whether the client was too slow with its body. net/http's
// server then cancels the request, as if the client had left.
func (ex *exchange) bodyLate() bool { return errors.Is(ex.body.Failure(), os.ErrDeadlineExceeded) }

// clientsFault returns the error for a request that could not be sent because of
// the client. A backend that gives up an upload which the client stalls answers 408,
// breaks the connection, or waits until we give up.
func (ex *exchange) clientsFault(r *reply) (apierror.Error, bool) {
	failure := ex.body.Failure()
	switch {
	case r.refusal.Status != 0:
		return r.refusal, true
	case failure != nil && r.err != nil:
		return apierror.UnreadableBody(failure), true
	case r.upload().Stalled() && (r.err != nil || r.status == http.StatusRequestTimeout):
		return apierror.UnreadableBody(os.ErrDeadlineExceeded), true
	}
	return apierror.Error{}, false
}

// mayRepeat reports whether the request may be sent to another backend. It also
// keeps what the client gets if no other backend has a better reply.
func (ex *exchange) mayRepeat(r *reply) bool {
	sendable := r.upload().Abandon()
	switch {
	case ex.executed && !r.presentable():
		r.discard()
		ex.own = apierror.PerhapsExecuted.Response(ex.request)
		if r.class == verdict.Timeout {
			ex.own = apierror.PerhapsStillExecuted.Response(ex.request)
		}
	// an upload that is ended takes the rest of a long error with it
	case r.tellsMore(ex.balancer.forward) && (r.whole || !sendable || ex.body.Whole()):
		ex.keep(r.res)
	default:
		r.discard()
	}
	if r.class.ContextLength(r.status) {
		ex.exceeded = append(ex.exceeded, ex.model())
	}
	return sendable && !ex.executed
}

// forbidRetry keeps the client's SDK from sending a request again that may have been
// executed. Official SDKs retry a 408 and a 5xx unless this header forbids it.
func (ex *exchange) forbidRetry(res *http.Response) {
	if ex.executed {
		res.Header["X-Should-Retry"] = []string{"false"}
	}
}

// commit makes the response the client's.
func (t *Transport) commit(ex *exchange, r *reply) *http.Response {
	ex.committed()
	ex.home.Served(ex.current.backend.account, r.res)
	ex.status = r.res.StatusCode
	ex.observeForwarded(r.class)
	if ex.firstByte = time.Since(ex.started); r.body != nil {
		if r.body.Waits() {
			r.body.Begun = func() { ex.firstByte = time.Since(ex.started) }
		}
		r.body.GoesOut()
		ex.usage = r.body.Usage
		r.body.Broken = func(err error) { t.rememberBroken(ex, r, err) }
	}
	if ex.asksUsage() && mediatype.Of(r.res.Header) == mediatype.EventStream && !contentcoding.Compressed(r.res.Header) {
		r.res.Body, r.res.ContentLength = usage.Hide(r.res.Body), -1
		delete(r.res.Header, "Content-Length")
	}
	ex.forbidRetry(r.res)
	if backend, ok := r.res.Body.(io.ReadWriteCloser); ok && r.status == http.StatusSwitchingProtocols {
		var broken func(reason error, begun bool)
		if ex.asked.handshake {
			broken = func(reason error, begun bool) { t.rememberBrokenTunnel(ex, r, reason, begun) }
		}
		r.res.Body = tunnel.Between(ex.writer, backend, broken)
	}
	if !ex.balancer.plain {
		replyheader.RemoveProviders(r.res.Header)
		replyheader.RemoveProviders(r.res.Trailer) // those announced: others come with the end of the body
	}
	return r.res
}

// RequestHeaderOps sets the Host of a plain reverse_proxy's requests.
func (t *Transport) RequestHeaderOps() *headers.HeaderOps {
	if t.schemes != nil {
		return nil // each backend has its own
	}
	return t.HTTP.RequestHeaderOps()
}

// TLSEnabled reports whether a plain reverse_proxy reaches its upstreams by TLS.
func (t *Transport) TLSEnabled() bool { return t.HTTP != nil && t.HTTP.TLSEnabled() }

// EnableTLS makes a plain reverse_proxy reach its upstreams by TLS.
func (t *Transport) EnableTLS(base *reverseproxy.TLSConfig) error {
	if t.HTTP == nil {
		t.HTTP = new(reverseproxy.HTTPTransport)
	}
	return t.HTTP.EnableTLS(base)
}

// OverrideHealthCheckScheme makes active health checks use the scheme of the
// backend they check.
func (t *Transport) OverrideHealthCheckScheme(base *url.URL, port string) {
	if scheme, ok := t.schemes[base.Host]; ok {
		base.Scheme = scheme
		return
	}
	t.HTTP.OverrideHealthCheckScheme(base, port)
}

// Interface guards
var (
	_ caddy.Provisioner                                = (*Transport)(nil)
	_ caddy.CleanerUpper                               = (*Transport)(nil)
	_ caddyfile.Unmarshaler                            = (*Transport)(nil)
	_ http.RoundTripper                                = (*Transport)(nil)
	_ reverseproxy.TLSTransport                        = (*Transport)(nil)
	_ reverseproxy.RequestHeaderOpsTransport           = (*Transport)(nil)
	_ reverseproxy.HealthCheckSchemeOverriderTransport = (*Transport)(nil)
)
