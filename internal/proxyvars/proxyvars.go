// Package proxyvars makes placeholders of reverse_proxy when somebody asks for
// them. reverse_proxy itself sets them for each request, 17 and one for each field
// of the reply, and so the map that holds them grows again and again. It does not
// if there are never more than eight.
package proxyvars

import (
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	upstreamPrefix = "http.reverse_proxy.upstream."
	headerPrefix   = "http.reverse_proxy.header."
	statusText     = "http.reverse_proxy.status_text"
)

// ofUpstream are those of an upstream that reverse_proxy sets when it has chosen
// it.
var ofUpstream = []string{
	upstreamPrefix + "address", upstreamPrefix + "hostport", upstreamPrefix + "host", upstreamPrefix + "port",
	upstreamPrefix + "requests", upstreamPrefix + "max_requests", upstreamPrefix + "fails",
}

// Vars are the placeholders of one request. Before Take, they are none: those that
// reverse_proxy has set stay.
type Vars struct {
	// Replacer is the request's.
	Replacer *caddy.Replacer
	// mu guards what is below. A dial that nobody waits for any more may ask, too.
	mu       sync.Mutex
	upstream *reverseproxy.Upstream
	header   http.Header
	status   string
}

// Take takes the placeholders of the upstream from reverse_proxy, and makes those
// of the header of its reply.
func (v *Vars) Take(upstream *reverseproxy.Upstream, reply *http.Response) {
	v.mu.Lock()
	v.upstream, v.header, v.status = upstream, reply.Header, reply.Status
	v.mu.Unlock()
	for _, key := range ofUpstream {
		v.Replacer.Delete(key)
	}
}

// Closed takes one more from reverse_proxy, which is about to set the last ones.
// It is called when the reply's body is closed.
func (v *Vars) Closed() {
	if v != nil {
		v.Replacer.Delete(statusText)
	}
}

// Value is a placeholder that was taken, or would be one of the reply's header.
// Those of the upstream are as they are now, and not as when it was chosen.
func (v *Vars) Value(key string) (any, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.upstream == nil {
		return nil, false
	}
	if name, ok := strings.CutPrefix(key, headerPrefix); ok {
		values, ok := v.header[name]
		return strings.Join(values, ","), ok
	}
	if name, ok := strings.CutPrefix(key, upstreamPrefix); ok {
		return v.ofUpstream(name)
	}
	return v.status, key == statusText
}

func (v *Vars) ofUpstream(name string) (any, bool) {
	switch name {
	case "requests":
		return v.upstream.Host.NumRequests(), true
	case "max_requests":
		return v.upstream.MaxRequests, true
	case "fails":
		return v.upstream.Host.Fails(), true
	}
	address, err := caddy.ParseNetworkAddress(v.upstream.Dial)
	port := strconv.FormatUint(uint64(address.StartPort), 10)
	switch {
	case err != nil:
	case name == "address":
		return caddy.JoinNetworkAddress(address.Network, address.Host, port), true
	case name == "hostport":
		return address.JoinHostPort(0), true
	case name == "host":
		return address.Host, true
	case name == "port":
		return port, true
	}
	return nil, false
}
