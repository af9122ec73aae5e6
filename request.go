package openailb

import (
	"mime"
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/contentcoding"
	"github.com/openai-lb/caddy-openai-lb/internal/mediatype"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/tunnel"
)

// asked is what a request asks for.
type asked struct {
	// model is what the client named, in the path, the body or the query. It
	// is empty if the request needs none, or it cannot be found.
	model string
	// inPath reports whether the path names the model, as Azure's classic paths do.
	inPath bool
	// operation is the path without what tells its dialect.
	operation string
	// body is what the body says.
	body openaiapi.Request
	// opaque reports whether the body is compressed, so that no model in it can be
	// found or replaced.
	opaque bool
	// unclear reports whether the request is for inference, and backends may read
	// a model in its body that we do not find there: it is not JSON, or
	// is declared as something else.
	unclear bool
	// needsModel reports whether a backend that lists its models gets the request
	// only for one of these.
	needsModel bool
	// cutOff reports whether the body is too long to be buffered and no model was
	// found in its beginning, so that none can be replaced.
	cutOff bool
	// cost is how many tokens the request counts for in a rate limit.
	cost int64
	// promptCost is how much of that is the prompt.
	promptCost int64
	// handshake reports whether the request opens a WebSocket.
	handshake bool
	// infers reports whether the request is for inference, and not about files,
	// fine-tuning and the like.
	infers bool
	// withoutUsage reports whether the request is for a stream that does not tell its
	// usage, because nobody asked for that: neither the client nor we.
	withoutUsage bool
	// repeatable reports whether the request may be retried when it is unknown
	// whether it was executed.
	repeatable bool
	// affinity is the request's affinity in the pool.
	affinity pool.Affinity
	// anonymous reports whether the caller brought no credential for a backend.
	anonymous bool
}

// Affinity implements pool.Request.
func (ex *exchange) Affinity() *pool.Affinity { return &ex.asked.affinity }

// readAsked finds what a request asks for.
func readAsked(r *http.Request, route openaiapi.Route, b *replay.Body, cache *affinity.PromptCache) asked {
	var a asked
	beginning := cache.Prompt()
	prompt := max(b.Length(), int64(len(b.Buffered())))
	switch {
	case !contentcoding.Readable(r.Header):
		a.opaque = len(b.Buffered()) > 0
	case mediatype.Of(r.Header) == mediatype.Form:
		_, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
		a.body = openaiapi.ParseForm(b.Buffered(), params["boundary"])
		prompt = 0 // a file's size tells nothing of its tokens
	default:
		a.body = openaiapi.ParseJSON(b.Buffered(), beginning)
	}
	a.operation = route.Operation
	method := tunnel.MethodOf(r)
	a.handshake = tunnel.IsHandshake(r)
	byBody := openaiapi.Inference(method, route.Operation)
	a.infers = byBody || a.handshake && openaiapi.InfersByWebSocket(route.Operation)
	a.withoutUsage = a.infers && a.body.Stream && !a.body.StreamUsage && openaiapi.TellsUsageIfAsked(route.Operation)
	a.repeatable = a.infers || openaiapi.Repeatable(method, route.Operation)
	a.cost, a.promptCost = a.body.Cost(prompt), openaiapi.PromptCost(prompt)
	a.model = route.Name()
	a.inPath = a.model != ""
	if a.model == "" {
		a.model = a.body.Model
	}
	if a.needsModel = a.infers || openaiapi.MayInfer(method, route.Operation); a.needsModel && !a.opaque && len(b.Buffered()) > 0 {
		a.unclear = !a.body.Clear || b.Whole() && !a.body.Whole || mediatype.Disputed(r.Header)
	}
	for _, param := range []string{"model", "deployment"} {
		if a.model == "" && r.URL.RawQuery != "" && !a.unclear {
			a.model, _ = openaiapi.Param(r.URL.RawQuery, param)
		}
	}
	if a.handshake {
		call, _ := openaiapi.Param(r.URL.RawQuery, "call_id")
		a.needsModel = a.needsModel && call == "" // a call has its model
	}
	if byBody {
		a.affinity.Key = cache.Key(r.Header, route.Operation, a.model, beginning, prompt)
	}
	a.cutOff = !b.Whole() && !a.body.Whole && !a.body.HasModel
	return a
}

// asksUsage reports whether the current backend is asked for the usage of a stream
// in the client's place.
func (ex *exchange) asksUsage() bool {
	b := ex.current.backend
	return ex.balancer.streamUsage && (b.StreamUsage == nil || *b.StreamUsage) && ex.asked.withoutUsage && ex.asked.body.CanAskUsage() && ex.body.Whole()
}
