package attempt

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// CheckProxy returns what is wrong with the options of reverse_proxy as they are written.
func CheckProxy(proxy *reverseproxy.Handler) error {
	if err := RefuseOwnOptions(proxy); err != nil || proxy.TransportRaw == nil {
		return err
	}
	var transport reverseproxy.HTTPTransport
	if err := DecodeConnections(proxy.TransportRaw, &transport); err != nil {
		return fmt.Errorf("reverse_proxy: transport: %w", err)
	}
	return CheckConnections(&transport)
}

// HeaderUpOf returns what header_up does to a request, or nil without that option.
func HeaderUpOf(proxy *reverseproxy.Handler) func(*http.Request) {
	if proxy == nil || proxy.Headers == nil || proxy.Headers.Request == nil {
		return nil
	}
	return func(r *http.Request) { proxy.Headers.Request.ApplyToRequest(r) } // which are set up later
}

// NamesUpstream reports whether header_up has a placeholder that names the upstream.
func NamesUpstream(proxy *reverseproxy.Handler) bool {
	if proxy.Headers == nil {
		return false
	}
	headerUp, err := json.Marshal(proxy.Headers.Request)
	return err == nil && bytes.Contains(headerUp, []byte("{http.reverse_proxy.upstream."))
}

// RefuseOwnOptions refuses the options of reverse_proxy that openai_lb sets
// itself.
func RefuseOwnOptions(proxy *reverseproxy.Handler) error {
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

// Ourselves is the only upstream that reverse_proxy chooses: our transport is called once for each request, and makes
// the attempts at the backends. It is never dialed, and no policy or health check sees it.
var Ourselves = AddressOf(&reverseproxy.Upstream{Dial: "openai_lb:0", Host: new(reverseproxy.Host)})

// Address is that of an upstream, as reverse_proxy has it.
type Address struct {
	// Info is the reverseproxy.DialInfo, and shown are the values of its placeholders.
	Info  any
	shown [4]any
}

// AddressOf returns the address of an upstream.
func AddressOf(u *reverseproxy.Upstream) *Address {
	host, port, _ := net.SplitHostPort(u.Dial)
	return &Address{
		Info:  reverseproxy.DialInfo{Upstream: u, Network: "tcp", Address: u.Dial, Host: host, Port: port},
		shown: [...]any{u.Dial, u.Dial, host, port},
	}
}

// upstreamPlaceholders are those that tell where a request goes. tls_server_name may have one.
var upstreamPlaceholders = [...]string{
	"http.reverse_proxy.upstream.address", "http.reverse_proxy.upstream.hostport",
	"http.reverse_proxy.upstream.host", "http.reverse_proxy.upstream.port",
}

// Show makes the placeholders of reverse_proxy those of the address.
func (a *Address) Show(placeholders *caddy.Replacer) {
	for i, name := range upstreamPlaceholders {
		placeholders.Set(name, a.shown[i])
	}
}

// Select implements reverseproxy.Selector.
func (a *Address) Select(reverseproxy.UpstreamPool, *http.Request, http.ResponseWriter) *reverseproxy.Upstream {
	return a.Info.(reverseproxy.DialInfo).Upstream
}
