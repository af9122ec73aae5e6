package openailb

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
)

// provisionTransport sets up the transport, and with it passive health.
func (h *Handler) provisionTransport(ctx caddy.Context) error {
	h.Transport = &Transport{PassiveHealth: h.PassiveHealth, Options: h.Options, front: openaiLB{}, schemes: make(map[string]string)}
	if h.ReverseProxy != nil {
		h.Transport.closeDelay = time.Duration(h.ReverseProxy.StreamCloseDelay)
	}
	if h.ReverseProxy != nil && h.ReverseProxy.TransportRaw != nil {
		h.Transport.HTTP = new(reverseproxy.HTTPTransport)
		if err := decodeHTTPTransport(h.ReverseProxy.TransportRaw, h.Transport.HTTP); err != nil {
			return fmt.Errorf("reverse_proxy: transport: %w", err)
		}
	}
	for _, b := range h.Backends {
		h.Transport.schemes[b.Dial()] = b.Origin.Scheme
	}
	return h.Transport.Provision(ctx)
}

// decodeHTTPTransport reads the config of reverse_proxy's http transport.
func decodeHTTPTransport(raw json.RawMessage, into *reverseproxy.HTTPTransport) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return err
	}
	if string(fields["protocol"]) != `"http"` {
		return fmt.Errorf("protocol %s is not allowed: expected \"http\"", fields["protocol"])
	}
	delete(fields, "protocol")
	rest, err := json.Marshal(fields)
	if err != nil {
		return err
	}
	return caddy.StrictUnmarshalJSON(rest, into)
}

// provisionProxy sets up the reverse_proxy that carries the requests.
func (h *Handler) provisionProxy(ctx caddy.Context) error {
	proxy := new(reverseproxy.Handler)
	if h.ReverseProxy != nil {
		*proxy = *h.ReverseProxy
		if err := refuseOwnOptions(proxy); err != nil {
			return err
		}
	}
	proxy.TransportRaw = nil
	proxy.Transport = h.Transport
	proxy.LoadBalancing = &reverseproxy.LoadBalancing{
		SelectionPolicy: nextBackend{},
		// each backend once, a silent one perhaps once more, and then our own answer
		Retries: len(h.Backends) + 1,
	}
	if h.Wait != nil {
		proxy.LoadBalancing.Retries = math.MaxInt // a request that waits may try a backend again
	}
	for _, t := range h.balancer.targets {
		proxy.Upstreams = append(proxy.Upstreams, t.upstream)
	}
	h.proxy = proxy
	logsHeaders := ctx.Logger(proxy).Core().Enabled(zap.DebugLevel)
	h.balancer.hidesHeader = !logsHeaders
	h.splitsHeaders = !logsHeaders && proxy.Headers == nil && proxy.Rewrite == nil && proxy.HandleResponse == nil
	if err := proxy.Provision(ctx); err != nil {
		return fmt.Errorf("reverse_proxy: %w", err)
	}
	return nil
}

// headerUpOf returns what header_up does to a request, or nil without that option.
func headerUpOf(proxy *reverseproxy.Handler) func(*http.Request) {
	if proxy == nil || proxy.Headers == nil || proxy.Headers.Request == nil {
		return nil
	}
	return func(r *http.Request) { proxy.Headers.Request.ApplyToRequest(r) } // which are set up later
}

// refuseOwnOptions refuses the options of reverse_proxy that openai_lb sets
// itself.
func refuseOwnOptions(proxy *reverseproxy.Handler) error {
	for _, option := range []struct {
		name string
		used bool
	}{
		{"upstreams (to)", len(proxy.Upstreams) > 0},
		{"dynamic_upstreams (dynamic)", proxy.DynamicUpstreamsRaw != nil},
		{"load_balancing (lb_…)", proxy.LoadBalancing != nil},
		{"passive health checking", proxy.HealthChecks != nil && proxy.HealthChecks.Passive != nil},
		{"request_buffers", proxy.RequestBuffers != 0},
	} {
		if option.used {
			return fmt.Errorf("reverse_proxy: %s is not allowed here: use openai_lb's own options", option.name)
		}
	}
	return nil
}
