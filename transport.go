package openailb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
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
	attempt.Options

	// HTTP configures the connections to the backends, as reverse_proxy's http
	// transport does. Default: that transport's defaults, but no added
	// compression, a larger write buffer, more idle connections, which are
	// closed before providers close theirs, and pings that find dead HTTP/2
	// connections.
	HTTP *reverseproxy.HTTPTransport `json:"http,omitempty"`

	sender attempt.Sender
	front  front
	// schemes are those of the backends by dial address, for active health
	// checks. A plain reverse_proxy has none.
	schemes map[string]string
	// closeDelay is reverse_proxy's stream_close_delay. closing is done when that has passed after an unload.
	closeDelay time.Duration
	closing    context.Context
}

// CaddyModule returns the Caddy module information.
func (*Transport) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.transport.openai_lb",
		New: func() caddy.Module { return new(Transport) },
	}
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *Transport) UnmarshalJSON(data []byte) error {
	type options Transport
	return directive.UnmarshalJSON(data, (*options)(t))
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
	if err := t.Options.Provision(); err != nil {
		return err
	}
	if t.front == nil {
		t.front = plainProxy{}
		proxy := proxyAround(ctx.Modules())
		if proxy != nil && !hasSelection(proxy) {
			ctx.Logger().Warn("transport openai_lb has no effect without lb_policy openai_lb")
		}
		if proxy != nil {
			t.closeDelay = time.Duration(proxy.StreamCloseDelay)
		}
	}
	closing, closes := context.WithCancel(context.Background())
	t.closing = closing
	context.AfterFunc(ctx, func() { time.AfterFunc(t.closeDelay, closes) })
	if t.HTTP == nil {
		t.HTTP = new(reverseproxy.HTTPTransport)
	}
	if err := checkHTTP(t.HTTP); err != nil {
		return err
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
	t.HTTP.WriteBufferSize = cmp.Or(t.HTTP.WriteBufferSize, attempt.WriteBuffer)
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
	attempt.HideSurplus()
	if server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok {
		attempt.KnowClients(server)
	}
	t.HTTP.Transport.DialContext = attempt.Dialing(t.HTTP.Transport.DialContext)
	t.sender = attempt.Sender{RoundTripper: t.HTTP, Options: t.Options, Statuses: t.UnhealthyStatus,
		SharesConnections: slices.Contains(t.HTTP.Versions, "h2c")}
	return nil
}

// Cleanup closes idle connections, and stops unused timers.
func (t *Transport) Cleanup() error {
	t.sender.Close()
	if t.HTTP == nil {
		return nil
	}
	return t.HTTP.Cleanup()
}

// errNextBackend makes a plain reverse_proxy ask the selection again.
var errNextBackend = reverseproxy.NewDialError(errors.New("trying the next backend"))

// answering is what the selection of a plain reverse_proxy returns if the transport answers, because no upstream is left.
var answering = &reverseproxy.Upstream{Dial: "openai_lb:0", Host: new(reverseproxy.Host)}

// exchangeVar is the variable in which a plain reverse_proxy's selection leaves
// the exchange for the transport: a selection policy cannot change the
// request's context.
const exchangeVar = "openai_lb.exchange"

// RoundTrip implements http.RoundTripper. It makes one attempt at the upstream
// that the selection chose for the request, or answers if there is none.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	// a request may pass several reverse_proxies, each with an exchange of its own
	ex, ok := caddyhttp.GetVar(req.Context(), exchangeVar).(*exchange)
	if !ok || ex.balancer.transport != t {
		return t.sender.RoundTripper.RoundTrip(req)
	}
	if ex.balancer.hidesHeader {
		defer hideHeader(req)
	}
	if ex.tries.current == nil {
		return ex.answer(req), nil
	}
	r := t.attempt(ex, req)
	res, err := t.next(ex, req, r)
	if res == nil && err == nil {
		err = errNextBackend
	}
	return res, err
}

// RequestHeaderOps sets the Host of a plain reverse_proxy's requests.
func (t *Transport) RequestHeaderOps() *headers.HeaderOps {
	return t.front.headerOps(t.HTTP)
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
	_ http.RoundTripper                                = (*Transport)(nil)
	_ reverseproxy.TLSTransport                        = (*Transport)(nil)
	_ reverseproxy.RequestHeaderOpsTransport           = (*Transport)(nil)
	_ reverseproxy.HealthCheckSchemeOverriderTransport = (*Transport)(nil)
)
