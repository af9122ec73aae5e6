// Package replyheader removes from the header of a reply what must not reach clients.
package replyheader

import "net/http"

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
