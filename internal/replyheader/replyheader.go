// Package replyheader takes the header of a reply to the client.
package replyheader

import (
	"net/http"
	"strings"
)

// providers are fields that must not reach clients, in the header or as trailers
// (RFC 9110 section 6.5), which clients merge into it. Alt-Svc would lead them past
// the balancer, cookies and HSTS would be those of the balancer's host, and reports
// about the balancer would go to the provider.
var providers = []string{
	"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Public-Key-Pins",
	"Clear-Site-Data", "Nel", "Report-To", "Reporting-Endpoints", "Proxy-Authenticate",
}

// RemoveProviders removes the fields that are between a provider and its own
// clients, from a header or from trailers.
func RemoveProviders(fields http.Header) {
	if len(fields) == 0 {
		return
	}
	for _, name := range providers {
		delete(fields, name)
	}
}

// Pass gives the client the fields that reverse_proxy would pass on as they are,
// and leaves the others to it. Nobody else may use the client's header now, as
// interim responses do.
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
