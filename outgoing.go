package openailb

import (
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/contentcoding"
	"github.com/openai-lb/caddy-openai-lb/internal/endpoint"
	"github.com/openai-lb/caddy-openai-lb/internal/tracing"
)

// direct turns an outgoing request, which is a clone of the client's, into one
// for the backend: its address, its credential, its headers and its paths. It
// returns the model that the body must name, or nothing if the body stays as it
// is.
func (b *Backend) direct(out *http.Request, ex *exchange, credential Credential) (model string) {
	out.Header = ex.credentials.Outgoing(out.Header, ex.split)
	if b.TraceContext {
		ex.attempted().span.Inject(out.Header)
	} else {
		tracing.Remove(out.Header)
	}
	b.authorize(out, credential, ex.credentials)
	// the body was read, so the client was told to continue already
	delete(out.Header, "Expect")
	if ex.asked.body.Stream {
		// the beginning of a stream is read before it is passed on
		delete(out.Header, "Accept-Encoding")
	}
	contentcoding.AcceptReadable(out.Header)
	for name, values := range b.header {
		out.Header[name] = values
	}
	out.Host = b.header.Get("Host")
	out.URL.Scheme, out.URL.Host = b.url.Scheme, b.url.Host

	model = b.nameOf(ex.asked.model)
	place := b.paths.Rewrite(out.URL, ex.asked.model, model)
	replaced := model != ex.asked.model || b.models != nil && ex.asked.body.NamesSeveral()
	if place == endpoint.InBody || place == endpoint.AsNamed && replaced && ex.asked.body.HasModel {
		return model
	}
	return ""
}
