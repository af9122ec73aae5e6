package openailb

import (
	"cmp"
	"errors"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

func init() {
	caddy.RegisterModule(new(Transport))
}

// Transport makes one attempt at a backend, judges the reply and remembers
// what it means. A reply after which another backend may do better never
// reaches the client while there is one: the transport has the selection
// choose it and lets reverse_proxy come again.
//
// In a plain reverse_proxy it works together with the openai_lb selection
// policy, and does nothing without it.
type Transport struct {
	Failover

	// HTTP configures the connections to the backends, as reverse_proxy's
	// http transport does. Default: that transport's defaults, but no
	// compression of its own, buffers of 2 KiB, more idle connections, kept for
	// less long than providers keep theirs, and pings that find dead HTTP/2
	// connections.
	HTTP *reverseproxy.HTTPTransport `json:"http,omitempty"`

	roundTripper http.RoundTripper
	// schemes of the backends by dial address, for active health checks.
	schemes map[string]string
	logger  *zap.Logger
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
	// handshakeTimeout limits what a backend that accepts and stays silent costs.
	handshakeTimeout = 5 * time.Second
	pingInterval     = 15 * time.Second
	pingTimeout      = 5 * time.Second
	// bufferSize has room for headers and for an event. What is longer
	// bypasses the buffers, of which a stream over HTTP/1.1 keeps two.
	bufferSize = 2 << 10
)

// Provision sets up the transport.
func (t *Transport) Provision(ctx caddy.Context) error {
	t.logger = ctx.Logger()
	if err := t.Failover.provision(); err != nil {
		return err
	}
	if t.HTTP == nil {
		t.HTTP = new(reverseproxy.HTTPTransport)
	}
	if t.HTTP.ProxyProtocol != "" {
		return errors.New("http: proxy_protocol is not supported")
	}
	// what the client did not ask to be compressed must not be, and what it
	// did ask for is its own to decode
	t.HTTP.Compression = new(false)
	t.HTTP.ReadBufferSize = cmp.Or(t.HTTP.ReadBufferSize, bufferSize)
	t.HTTP.WriteBufferSize = cmp.Or(t.HTTP.WriteBufferSize, bufferSize)
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
		return err
	}
	if t.HTTP.Transport.TLSHandshakeTimeout == 0 {
		t.HTTP.Transport.TLSHandshakeTimeout = handshakeTimeout
	}
	t.HTTP.Transport.HTTP2 = &http.HTTP2Config{SendPingTimeout: pingInterval, PingTimeout: pingTimeout}
	t.roundTripper = t.HTTP
	return nil
}

// Cleanup closes idle connections.
func (t *Transport) Cleanup() error {
	if t.HTTP == nil {
		return nil
	}
	return t.HTTP.Cleanup()
}

// errNextBackend makes reverse_proxy ask the selection again.
var errNextBackend = reverseproxy.NewDialError(errors.New("trying the next backend"))

// RoundTrip implements http.RoundTripper. It makes one attempt at the member
// that the selection has chosen for the request.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	ex := exchangeOf(req.Context(), t)
	if ex == nil {
		return t.roundTripper.RoundTrip(req)
	}
	m := ex.current
	if m == nil {
		return ex.answer(req), nil
	}
	if err := ex.readBody(req, t.RequestBuffers); err != nil {
		return ex.refuseBody(req, err), nil
	}
	started := time.Now()
	r := t.attempt(ex, m, req)
	failure := ex.body.failure()
	// an HTTP/1.1 server takes a client that is late for one that left
	if err := req.Context().Err(); err != nil && !errors.Is(failure, os.ErrDeadlineExceeded) {
		r.discard()
		return nil, err // nobody is to blame
	}
	if failure != nil && r.err != nil {
		r.discard()
		return ex.refuseBody(req, failure), nil
	}
	t.record(ex, m, r, started)

	if !r.class.Failover() || ex.forwarded && r.presentable() {
		return t.commit(ex, m, r), nil
	}
	again := r.upload.abandon()
	// what is left of a long error body goes down with the upload it interrupts
	if r.tellsMore(ex.pool.forward) && (r.whole || !again || ex.body.tail == nil) {
		ex.keep(r.res)
	} else {
		r.discard()
	}
	if again && ex.next() != nil {
		return nil, errNextBackend
	}
	return ex.answer(req), nil
}

// record remembers what a reply means for the member, and logs the attempt.
func (t *Transport) record(ex *exchange, m *member, r *reply, started time.Time) {
	now := time.Now()
	ex.attempts = append(ex.attempts, attempt{member: m, class: r.class, status: r.status, started: started})
	if c := m.logger.Check(zap.DebugLevel, "attempt"); c != nil {
		c.Write(zap.String("backend", m.name), ex.callerField(), zap.String("class", string(r.class)), zap.Int("status", r.status),
			zap.Duration("duration", now.Sub(started)), zap.String("hint", string(r.source)), r.secrets.errorField(r.err))
	}
	model := ex.model(m)
	if !r.class.Failover() {
		m.served(model, started)
	}
	if m.outdated(r.credential) {
		return // it says nothing of the key that there is now
	}
	if wait, benches := t.wait(ex, m, r, now); benches {
		m.bench(r.class, model, r.status, now, wait, r.source)
	}
}

// commit makes the response the client's.
func (t *Transport) commit(ex *exchange, m *member, r *reply) *http.Response {
	ex.committed()
	if r.body != nil {
		r.body.broken = func(err error) { t.recordBroken(ex, m, r.secrets, err) }
	}
	ex.removeProviderHeaders(r.res.Header)
	return r.res
}

// recordBroken remembers that a reply broke off, or told of an error, after
// its beginning went to the client.
func (t *Transport) recordBroken(ex *exchange, m *member, sent secrets, reason error) {
	if ex.request.Context().Err() != nil {
		return // the client left
	}
	now, model := time.Now(), ex.model(m)
	last := &ex.attempts[len(ex.attempts)-1]
	last.class = verdict.BrokenStream
	if c := m.logger.Check(zap.WarnLevel, "reply broken"); c != nil {
		c.Write(zap.String("backend", m.name), zap.String("model", modelKey(model)),
			zap.Duration("duration", now.Sub(last.started)), sent.errorField(reason))
	}
	if m.health.failed(verdict.BrokenStream, model, now, t.MaxFails, time.Duration(t.FailDuration)) {
		m.bench(verdict.BrokenStream, model, last.status, now, time.Duration(t.FailDuration), hint.None)
	}
}

// providerHeaders are between the backend and us: Alt-Svc would lead clients
// past the balancer, a cookie or HSTS is not ours to set for another host, and
// reports about the balancer are not for the backend.
var providerHeaders = []string{
	"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Public-Key-Pins",
	"Clear-Site-Data", "Nel", "Report-To", "Reporting-Endpoints", "Proxy-Authenticate",
}

// removeProviderHeaders removes them, unless a plain reverse_proxy decides on
// its headers itself.
func (ex *exchange) removeProviderHeaders(header http.Header) {
	if ex.pool.members[0].backend == nil {
		return
	}
	for _, name := range providerHeaders {
		delete(header, name)
	}
}

func cloneURL(u *url.URL) *url.URL {
	clone := *u
	return &clone
}

// RequestHeaderOps sets the Host of a plain reverse_proxy's requests.
func (t *Transport) RequestHeaderOps() *headers.HeaderOps { return t.HTTP.RequestHeaderOps() }

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
