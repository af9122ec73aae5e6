package attempt

import (
	"io"
	"net/http"

	"golang.org/x/net/http/httpguts"
)

// Public implements Fields for replies from providers to clients of the
// balancer.
type Public struct{}

// providers lists fields that must not reach clients, in the header or as
// trailers (RFC 9110 section 6.5), which clients merge into the header. Alt-Svc
// would lead clients past the balancer, cookies and HSTS would apply to the
// balancer's host, and reports about the balancer would go to the provider.
var providers = []string{
	"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Public-Key-Pins",
	"Clear-Site-Data", "Nel", "Report-To", "Reporting-Endpoints", "Proxy-Authenticate",
}

// Final implements Fields. It removes the fields that a provider means for its
// own clients.
func (Public) Final(fields http.Header) {
	if len(fields) == 0 {
		return
	}
	for _, name := range providers {
		delete(fields, name)
	}
}

// Trailer implements Fields. A trailer must not affect framing, routing or how
// a body is read (RFC 9110 section 6.5.1).
func (p Public) Trailer(fields http.Header) {
	p.Final(fields)
	for name := range fields {
		if !httpguts.ValidTrailerHeader(name) || name == "Upgrade" {
			delete(fields, name)
		}
	}
}

// trailing is the body of a reply whose trailers were read ahead. Close adds
// the trailers to the response. Earlier, net/http would announce them, and join
// them with header fields of the same names.
type trailing struct {
	io.ReadCloser
	response *http.Response
	trailer  http.Header
}

// Finish prepares a response to r for the client, as the last step. It removes
// the fields that no client gets. Trailers that were read ahead are added when
// the body is closed, and a cut reply looks cut to the client.
func Finish(r *http.Request, res *http.Response, fields Fields) {
	fields.Final(res.Header)
	fields.Trailer(res.Trailer)
	if len(res.Trailer) > 0 {
		res.Body = trailing{res.Body, res, res.Trailer}
		res.Trailer = nil
	}
	resetIfCut(r, res)
}

// Close implements io.Closer.
func (b trailing) Close() error {
	err := b.ReadCloser.Close()
	b.response.Trailer = b.trailer
	return err
}

// All implements Fields for a plain reverse_proxy, which decides about fields
// itself.
type All struct{}

// Final implements Fields.
func (All) Final(http.Header) {}

// Trailer implements Fields.
func (All) Trailer(http.Header) {}
