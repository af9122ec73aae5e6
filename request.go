package openailb

import (
	"net/http"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
)

// apiRequest is what a client asks for. It is read once.
type apiRequest struct {
	openaiapi.Request
	// received is the body, as far as it is kept to be sent again.
	received replay.Body
	// affinity is the request's affinity in the pool, and placement the accounts that may get it.
	affinity  pool.Affinity
	placement affinity.Placement

	// caller is who sent the request, if callers need a key.
	caller keys.Caller
	// credentials are what the caller identified itself with, for a backend
	// with auth passthrough. anonymous reports whether such a backend could not get any.
	credentials keys.Presented
	anonymous   bool
	// split is the client's header, if reverse_proxy got only a part of it.
	split http.Header
}

// parse finds out what the request asks for.
func (a *apiRequest) parse(r *http.Request, route openaiapi.Route, cache *affinity.PromptCache) {
	prompt := cache.Prompt()
	a.Request = openaiapi.Parse(r, route, openaiapi.Received{Bytes: a.received.Buffered(), Whole: a.received.Whole(), Length: a.received.Length()}, prompt)
	if a.Kind.Infers() && !a.Kind.IsHandshake() {
		a.affinity.Key = cache.Key(r.Header, route.Operation, a.Model, prompt, a.PromptLength)
	}
}

// asks is what an attempt has to know of the request.
func (a *apiRequest) asks() attempt.Asks {
	return attempt.Asks{Kind: a.Kind, Stream: a.Body.Stream, Operation: a.Route.Operation, Cost: a.Cost}
}

// makesObject reports whether the request makes an object without a model, which may be
// used with any.
func (a *apiRequest) makesObject() bool { return a.Model == "" && a.placement.Makes() }

// hasUnknownLength reports whether the prompt may have any length: its body is not kept as a whole, and does not
// say how long it is. The estimate for a form does not depend on that.
func (a *apiRequest) hasUnknownLength() bool {
	return a.PromptLength > 0 && !a.received.Whole() && a.received.Length() < 0
}

// callerField names the caller in a log. It is empty if callers need no key.
func (a *apiRequest) callerField() zap.Field {
	if a.caller.Name == "" {
		return zap.Skip()
	}
	return zap.String("caller", a.caller.Name)
}
