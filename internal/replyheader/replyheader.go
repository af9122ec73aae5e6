// Package replyheader takes the header of a reply to the client.
package replyheader

import (
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// providers are fields that must not reach clients. Alt-Svc would lead them past
// the balancer, cookies and HSTS would be those of the balancer's host, and reports
// about the balancer would go to the provider.
var providers = []string{
	"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Public-Key-Pins",
	"Clear-Site-Data", "Nel", "Report-To", "Reporting-Endpoints", "Proxy-Authenticate",
}

// RemoveProviders removes the fields that are between a provider and its own
// clients.
func RemoveProviders(header http.Header) {
	for _, name := range providers {
		delete(header, name)
	}
}

// Pass gives the client the fields that reverse_proxy would pass on as they are,
// and leaves the others to it. For each field, reverse_proxy also sets a
// placeholder; Placeholder has those of all of them. Nobody else may use the
// client's header now, as interim responses do.
func Pass(client http.Header, reply *http.Response) {
	connection := reply.Header["Connection"]
	namesFields := len(connection) > 1 || len(connection) == 1 && !strings.EqualFold(connection[0], "keep-alive")
	if namesFields || reply.Header["Incremental"] != nil { // for which reverse_proxy may refuse the reply
		return
	}
	var others http.Header // hardly ever are there any
	for name, values := range reply.Header {
		switch {
		case len(values) == 0:
		case isReverseProxys(name, reply):
			if others == nil {
				others = make(http.Header)
			}
			others[name] = values
		case client[name] == nil:
			client[name] = values
		default:
			client[name] = append(client[name], values...)
		}
	}
	reply.Header = others
}

// isReverseProxys reports whether reverse_proxy does something else with a field
// than to pass it on: with those between two hops, those that it sets itself, and
// the one that has it flush each write.
func isReverseProxys(name string, reply *http.Response) bool {
	switch name {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
		"Server", "Via":
		return true
	case "Content-Type":
		return reply.ContentLength >= 0 && strings.Contains(strings.ToLower(reply.Header.Get(name)), "event-stream")
	}
	return false
}

// placeholders is the prefix of the placeholders that reverse_proxy sets.
const placeholders = "http.reverse_proxy.header."

// Those of an upstream that hardly anybody asks for.
const (
	upstreamRequests    = "http.reverse_proxy.upstream.requests"
	upstreamMaxRequests = "http.reverse_proxy.upstream.max_requests"
	upstreamFails       = "http.reverse_proxy.upstream.fails"
)

// DropPlaceholders takes out those that Placeholder makes when somebody asks for
// them. With three fewer, their map does not grow once more, to 32, while
// reverse_proxy sets the rest.
func DropPlaceholders(repl *caddy.Replacer) {
	repl.Delete(upstreamRequests)
	repl.Delete(upstreamMaxRequests)
	repl.Delete(upstreamFails)
}

// Placeholder is a placeholder of reverse_proxy's for the reply with this header
// of the upstream. The upstream's are those of now, and not of when it was chosen.
func Placeholder(key string, reply http.Header, upstream *reverseproxy.Upstream) (any, bool) {
	switch key {
	case upstreamRequests:
		return upstream.Host.NumRequests(), true
	case upstreamMaxRequests:
		return upstream.MaxRequests, true
	case upstreamFails:
		return upstream.Host.Fails(), true
	}
	name, ok := strings.CutPrefix(key, placeholders)
	if !ok {
		return nil, false
	}
	values, ok := reply[name]
	return strings.Join(values, ","), ok
}
