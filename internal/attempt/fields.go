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

// framing are fields of which clients learn where a message ends, and what is between them and the balancer.
// They must not be trailers (RFC 9110 section 6.5.1). Trailers of a reply that was read ahead are announced,
// and net/http rejects a reply that announces one of the first three.
var framing = []string{"Content-Length", "Transfer-Encoding", "Trailer", "Connection", "Keep-Alive", "Te", "Upgrade", "Host"}

// Trailer implements Fields.
func (p Public) Trailer(fields http.Header) {
	if len(fields) == 0 {
		return
	}
	p.Final(fields)
	for _, name := range framing {
		delete(fields, name)
	}
}

// All is the Fields of a plain reverse_proxy, which decides on them itself.
type All struct{}

// Interim implements Fields.
func (All) Interim(http.Header) {}

// Final implements Fields.
func (All) Final(http.Header) {}

// Trailer implements Fields.
func (All) Trailer(http.Header) {}
