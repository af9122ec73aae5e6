package attempt

import "net/http"

// Public is the Fields of replies from providers to clients of the balancer.
type Public struct{}

// Interim implements Fields. No field of an interim response is needed.
func (Public) Interim(header http.Header) { clear(header) }

// providers are fields that must not reach clients, in the header or as trailers
// (RFC 9110 section 6.5), which clients merge into it. Alt-Svc would lead them past
// the balancer, cookies and HSTS would be those of the balancer's host, and reports
// about the balancer would go to the provider.
var providers = []string{
	"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Public-Key-Pins",
	"Clear-Site-Data", "Nel", "Report-To", "Reporting-Endpoints", "Proxy-Authenticate",
}

// Final implements Fields. It removes the fields that are between a provider and
// its own clients.
func (Public) Final(fields http.Header) {
	if len(fields) == 0 {
		return
	}
	for _, name := range providers {
		delete(fields, name)
	}
}

// All is the Fields of a plain reverse_proxy, which decides on them itself.
type All struct{}

// Interim implements Fields.
func (All) Interim(http.Header) {}

// Final implements Fields.
func (All) Final(http.Header) {}
