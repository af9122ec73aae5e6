package openailb

import (
	"mime"
	"net/http"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apibody"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/content"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
)

// apiRequest is what a client asks for. It is read once.
type apiRequest struct {
	method string // at a backend
	route  openaiapi.Route
	// model is what the client named, in the path, the body or the query. It
	// is empty if the request needs none, or it cannot be found.
	model string
	body  replay.Body
	// parsed is what the body says, and clarity how much of it can be read.
	parsed  apibody.Body
	clarity clarity
	attempt.Asks
	// needsModel reports whether a backend that lists its models gets the request
	// only for one of these.
	needsModel bool
	// promptCost is how much of the cost is the prompt.
	promptCost int64
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

// clarity is how much of a body can be read, and so be replaced.
type clarity uint8

const (
	bodyClear clarity = iota
	// bodyUnclear: the request is for inference, and backends may read a model in its
	// body that we do not find there: it is not JSON, or is declared as something else.
	bodyUnclear
	// bodyOpaque: it is compressed.
	bodyOpaque
)

// inPath reports whether the path names the model, as Azure's classic paths do.
func (a *apiRequest) inPath() bool { return a.route.Name() != "" }

// cutOff reports whether the body is too long to be buffered and no model was found in its
// beginning, so that none can be replaced.
func (a *apiRequest) cutOff() bool { return !a.body.Whole() && !a.parsed.Whole && !a.parsed.HasModel }

// makesObject reports whether the request makes an object without a model, which may be
// used with any.
func (a *apiRequest) makesObject() bool { return a.model == "" && a.placement.Makes() }

// read finds what a request with this body asks for.
func (a *apiRequest) read(r *http.Request, route openaiapi.Route, cache *affinity.PromptCache) {
	buffered := a.body.Buffered()
	beginning := cache.Prompt()
	prompt := max(a.body.Length(), int64(len(buffered)))
	readable := content.Readable(r.Header)
	switch {
	case !readable:
	case content.TypeOf(r.Header) == content.Form:
		_, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
		a.parsed = apibody.ParseForm(buffered, params["boundary"])
		prompt = 0 // a file's size says nothing about its tokens
	default:
		a.parsed = apibody.ParseJSON(buffered, beginning)
	}
	a.method, a.route = openaiapi.MethodOf(r), route
	a.Handshake = openaiapi.IsHandshake(r)
	a.Infers = openaiapi.IsInference(a.method, route.Operation) || a.Handshake && openaiapi.InfersByWebSocket(route.Operation)
	a.Repeatable = a.Infers || openaiapi.Repeatable(a.method, route.Operation)
	a.Stream, a.Responds = a.parsed.Stream, strings.HasSuffix(r.URL.Path, "/responses")
	a.needsModel = a.Infers || openaiapi.MayInfer(a.method, route.Operation)
	a.Cost, a.promptCost = a.parsed.Cost(prompt), apibody.PromptCost(prompt)
	if a.model = route.Name(); a.model == "" {
		a.model = a.parsed.Model
	}
	switch {
	case !readable && len(buffered) > 0:
		a.clarity = bodyOpaque
	case a.needsModel && len(buffered) > 0 && (!a.parsed.Clear || a.body.Whole() && !a.parsed.Whole || content.Disputed(r.Header)):
		a.clarity = bodyUnclear
	}
	for _, param := range []string{"model", "deployment"} {
		if a.model == "" && r.URL.RawQuery != "" && a.clarity != bodyUnclear {
			a.model, _ = openaiapi.Param(r.URL.RawQuery, param)
		}
	}
	if a.Handshake {
		call, _ := openaiapi.Param(r.URL.RawQuery, "call_id")
		a.needsModel = a.needsModel && call == "" // a call has its model
	} else if a.Infers {
		a.affinity.Key = cache.Key(r.Header, route.Operation, a.model, beginning, prompt)
	}
}

// hidesUsage reports whether the request is for a stream that does not report its
// usage unless somebody asks for that, which we may do.
func (a *apiRequest) hidesUsage() bool {
	return a.Infers && a.Stream && !a.parsed.StreamUsage && openaiapi.ShowsUsageIfAsked(a.route.Operation) && a.parsed.CanAskUsage() && a.body.Whole()
}

// Affinity implements pool.Request.
func (ex *exchange) Affinity() *pool.Affinity { return &ex.api.affinity }
