// Package replyheader takes the header of a reply to the client.
package replyheader

import (
	"net/http"
	"strings"
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
// and returns the others. For each field, reverse_proxy also sets a placeholder;
// Placeholder has those of all of them.
func Pass(client, reply http.Header) (others http.Header) {
	if connection := reply["Connection"]; len(connection) > 1 || len(connection) == 1 && !strings.EqualFold(connection[0], "keep-alive") {
		return reply // it may name fields that are not to be passed on
	}
	others = make(http.Header)
	for name, values := range reply {
		switch {
		case reverseProxys(name, values):
			others[name] = values
		case client[name] == nil:
			client[name] = values
		default:
			client[name] = append(client[name], values...)
		}
	}
	return others
}

// reverseProxys reports whether reverse_proxy does something else with a field
// than to pass it on: those between two hops, those that it sets itself, and those
// that tell it to flush each write.
func reverseProxys(name string, values []string) bool {
	switch name {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
		"Server", "Via", "Incremental":
		return true
	case "Content-Type":
		return len(values) != 1 || values[0] != "application/json"
	}
	return false
}

// placeholders is the prefix of the placeholders that reverse_proxy sets.
const placeholders = "http.reverse_proxy.header."

// Placeholder is a placeholder of reverse_proxy's for a field of the reply.
func Placeholder(key string, reply http.Header) (any, bool) {
	name, ok := strings.CutPrefix(key, placeholders)
	if !ok {
		return nil, false
	}
	values, ok := reply[name]
	return strings.Join(values, ","), ok
}
