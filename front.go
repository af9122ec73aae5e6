package openailb

import (
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// openaiLB is the directive openai_lb.
type openaiLB struct{ attempt.Public }

// direct sets the request's address, its credential, its headers, its path and the
// model in its body.
func (openaiLB) direct(ex *exchange, out *attempt.Request, credential keys.Credential) {
	b, api := ex.tries.current.backend, &ex.api
	out.Dial = ex.tries.current.address.info
	out.Header = api.credentials.Outgoing(out.Header, api.split)
	if b.TraceContext {
		ex.attempted().span.Inject(out.Header)
	} else {
		observe.RemoveTraceContext(out.Header)
	}
	b.Credentials.Authorize(out.Header, &out.URL, credential, api.credentials)
	// the body was read, so the client was told to continue already
	delete(out.Header, "Expect")
	if api.Body.Stream {
		// the beginning of a stream is read before it is passed on
		delete(out.Header, "Accept-Encoding")
	}
	openaiapi.AcceptReadable(out.Header)
	route := api.Route
	if out.URL.Path != ex.request.URL.Path || out.URL.RawPath != ex.request.URL.RawPath {
		route = openaiapi.ParsePath(out.URL.EscapedPath()) // reverse_proxy has the option rewrite
	}
	out.Host, out.Change.Model = b.Direct(&out.URL, out.Header, &api.Request, route)
}

func (openaiLB) rechecks() bool { return true }
func (openaiLB) finishes() bool { return true }

// Interface guards
var _ front = openaiLB{}
