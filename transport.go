package openailb

import (
	"errors"
	"net/http"
	"net/url"
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
	attempt.PassiveHealth
	attempt.Options

	// HTTP configures the connections to the backends, as reverse_proxy's http
	// transport does. Default: that transport's defaults, but no added
	// compression, a larger write buffer, more idle connections, which are
	// closed before providers close theirs, and pings that find dead HTTP/2
	// connections.
	HTTP *reverseproxy.HTTPTransport `json:"http,omitempty"`

	sender *attempt.Sender
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

// Provision sets up the transport.
func (t *Transport) Provision(ctx caddy.Context) error {
	proxy, closeDelay := proxyAround(ctx.Modules()), time.Duration(0)
	if proxy != nil {
		closeDelay = time.Duration(proxy.StreamCloseDelay)
		if !hasSelection(proxy) {
			ctx.Logger().Warn("transport openai_lb has no effect without lb_policy openai_lb")
		}
	}
	t.sender = &attempt.Sender{PassiveHealth: t.PassiveHealth, Options: t.Options, HTTP: t.HTTP}
	err := t.sender.Provision(ctx, closeDelay)
	t.HTTP = t.sender.HTTP
	return err
}

// Cleanup closes idle connections, and stops unused timers.
func (t *Transport) Cleanup() error {
	if t.sender == nil {
		return nil
	}
	return t.sender.Cleanup()
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
	if !ok || ex.balancer.sender != t.sender {
		return t.sender.RoundTripper.RoundTrip(req)
	}
	if ex.balancer.hidesHeader {
		defer hideHeader(req)
	}
	if ex.tries.current == nil {
		return ex.answer(req), nil
	}
	r := ex.attempt(req)
	res, err := ex.next(req, r)
	if res == nil && err == nil {
		err = errNextBackend
	}
	return res, err
}

// RequestHeaderOps sets the Host of a plain reverse_proxy's requests.
func (t *Transport) RequestHeaderOps() *headers.HeaderOps {
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

// OverrideHealthCheckScheme makes active health checks use the scheme of the upstreams.
func (t *Transport) OverrideHealthCheckScheme(base *url.URL, port string) {
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
