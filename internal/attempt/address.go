package attempt

import (
	"net"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Address is the address of a backend, to which attempts are sent.
type Address struct {
	// info is the reverseproxy.DialInfo for Caddy's transport.
	info any
	// dial is the host and the port.
	dial, host, port string
}

// AddressOf returns the address that is dialed for an upstream.
func AddressOf(u *reverseproxy.Upstream) *Address {
	host, port, _ := net.SplitHostPort(u.Dial)
	info := reverseproxy.DialInfo{Upstream: u, Network: "tcp", Address: u.Dial, Host: host, Port: port}
	return &Address{info: info, dial: u.Dial, host: host, port: port}
}

// placeholders returns a replacer with the placeholders of a request and with
// those of reverse_proxy that name the upstream's address. The option
// tls_server_name of Caddy's transport may contain one.
func (a *Address) placeholders(whole *caddy.Replacer) *caddy.Replacer {
	replacer := caddy.NewEmptyReplacer()
	replacer.Map(func(name string) (any, bool) {
		switch name {
		case "http.reverse_proxy.upstream.address", "http.reverse_proxy.upstream.hostport":
			return a.dial, true
		case "http.reverse_proxy.upstream.host":
			return a.host, true
		case "http.reverse_proxy.upstream.port":
			return a.port, true
		}
		if whole == nil {
			return nil, false
		}
		return whole.Get(name)
	})
	return replacer
}
