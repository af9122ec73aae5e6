package openailb

import (
	"errors"
	"net/http"
	"net/url"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// Transport makes one attempt at an upstream of a plain reverse_proxy,
// classifies the reply and records what it means. If another upstream may do
// better, the client does not get the reply: reverse_proxy asks the selection
// policy openai_lb again, which chooses the next upstream. Without that policy,
// the transport has no effect.
//
// The options silence and quota_steering are not available here: only the
// handler openai_lb has them.
type Transport struct {
	attempt.PassiveHealth
	attempt.Options

	// HTTP configures the connections to the upstreams, as reverse_proxy's http
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

// UnmarshalCaddyfile sets up the transport from Caddyfile tokens. Syntax:
//
//	transport openai_lb {
//	    <fail_duration, retry_after_max, request_buffers and the timeouts of openai_lb...>
//
//	    http {
//	        <options of the http transport...>
//	    }
//	}
func (t *Transport) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, t.PassiveHealth.Directives(), t.Options.Directives(), directive.Options{
		"http": directive.Func(func(d *caddyfile.Dispenser) error {
			t.HTTP = new(reverseproxy.HTTPTransport)
			return t.HTTP.UnmarshalCaddyfile(d.NewFromNextSegment())
		}).Check(func() error { return attempt.CheckConnections(t.HTTP) }),
	}.Check(t.check))
}

// check rejects the options that have no effect here.
func (t *Transport) check() error {
	const elsewhere = " has no effect in a plain reverse_proxy: use the directive openai_lb"
	switch {
	case t.Silence != nil:
		return errors.New("silence" + elsewhere)
	case t.QuotaSteering != nil:
		return errors.New("quota_steering" + elsewhere)
	}
	return nil
}

// Provision sets up the transport.
func (t *Transport) Provision(ctx caddy.Context) error {
	if err := t.check(); err != nil {
		return err
	}
	proxy := proxyAround(ctx.Modules())
	if proxy != nil && !hasSelection(proxy) {
		ctx.Logger().Warn("transport openai_lb has no effect without lb_policy openai_lb")
	}
	t.sender = &attempt.Sender{PassiveHealth: t.PassiveHealth, Options: t.Options, HTTP: t.HTTP}
	if proxy != nil {
		t.sender.CloseDelay = time.Duration(proxy.StreamCloseDelay)
	}
	err := t.sender.Provision(ctx)
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

// errNext is the error for which reverse_proxy asks the policy again.
var errNext = reverseproxy.NewDialError(errors.New("trying the next backend"))

// RoundTrip implements http.RoundTripper. It makes one attempt at the upstream
// that the policy chose for the request. If the policy found no upstream, it
// returns an answer.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	// a request may pass several reverse_proxies
	p, ok := caddyhttp.GetVar(req.Context(), proxiedRequestVar).(*proxiedRequest)
	switch {
	case !ok || p.selection.transport != t:
		return t.sender.RoundTripper.RoundTrip(req)
	case p.search.current == nil:
		return responseTo(req, p.group.answer(&p.transaction, p.answer)), nil
	}
	b, q, s := p.group.balancer, &p.request, &p.search
	reply := p.send(t.sender, req)
	judgement := judge(q, s, reply)
	b.learn(q, s, reply, judgement)
	step := s.Tell(reply, judgement)
	s.attempts.last().count() // now: nobody tells when reverse_proxy has sent the reply
	defer s.release()
	switch {
	case judgement.left:
		return nil, req.Context().Err() // no upstream is to blame
	case step == again:
		return nil, errNext
	case step == stop:
		return responseTo(req, b.answer(&p.transaction, s.answer)), nil
	}
	s.decided()
	res, _ := reply.Commit(q.writer, time.Now(), func(end attempt.End) { b.learnEnd(q, s, end) })
	s.forbidRetry(res.Header)
	return res, nil
}

// RequestHeaderOps returns the operations that set the Host of requests.
func (t *Transport) RequestHeaderOps() *headers.HeaderOps {
	return t.HTTP.RequestHeaderOps()
}

// TLSEnabled reports whether the upstreams are reached over TLS.
func (t *Transport) TLSEnabled() bool { return t.HTTP != nil && t.HTTP.TLSEnabled() }

// EnableTLS makes the transport reach the upstreams over TLS.
func (t *Transport) EnableTLS(base *reverseproxy.TLSConfig) error {
	if t.HTTP == nil {
		t.HTTP = new(reverseproxy.HTTPTransport)
	}
	return t.HTTP.EnableTLS(base)
}

// OverrideHealthCheckScheme makes active health checks use the scheme of the
// upstreams.
func (t *Transport) OverrideHealthCheckScheme(base *url.URL, port string) {
	t.HTTP.OverrideHealthCheckScheme(base, port)
}

// Interface guards
var (
	_ caddyfile.Unmarshaler                            = (*Transport)(nil)
	_ caddy.Provisioner                                = (*Transport)(nil)
	_ caddy.CleanerUpper                               = (*Transport)(nil)
	_ http.RoundTripper                                = (*Transport)(nil)
	_ reverseproxy.TLSTransport                        = (*Transport)(nil)
	_ reverseproxy.RequestHeaderOpsTransport           = (*Transport)(nil)
	_ reverseproxy.HealthCheckSchemeOverriderTransport = (*Transport)(nil)
)
