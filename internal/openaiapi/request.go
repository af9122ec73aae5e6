package openaiapi

import (
	"math"
	"mime"
	"net/http"
)

// Request is a parsed request to the API. It is parsed once, before a backend
// is chosen, and does not change.
type Request struct {
	// Route is the parsed path.
	Route Route

	// Body is the parsed body, as far as it was received and can be read.
	Body Body

	// Model is the model that the client named in the path, the body or the
	// query. It is empty if the request needs none, or if none can be found.
	Model string
	// HeaderTier is the service tier of the client's header [TierHeader], if
	// its caller may use that header. It overrides the tier in the body. See
	// [Request.ReadHeaderTier].
	HeaderTier string
	// Kind is the kind of work for a backend. It decides whether the request
	// may be executed twice.
	Kind Kind
	// Whole reports whether all of the body was received. If not, the body is
	// too long to be buffered.
	Whole bool
	// Clarity says whether the body has exactly the models that Body found in
	// it.
	Clarity Clarity
	// NeedsModel reports whether a backend that lists its models gets the
	// request only if it lists the request's model.
	NeedsModel bool
	// MayInfer reports whether a model may answer the request, although it is
	// not known as inference.
	MayInfer bool

	// PromptLength is how many bytes of the body count as the prompt.
	PromptLength int64
	// Cost is how many tokens the request counts as in a rate limit.
	Cost int64
}

// Kind classifies a request by what a backend does for it.
type Kind uint8

const (
	// Once means that the request changes something, or may do so, and must not
	// be executed twice.
	Once Kind = iota
	// Safe means that the method is safe (RFC 9110 section 9.2.1).
	Safe
	// WebSocket means that the request opens a WebSocket that is not for
	// inference.
	WebSocket
	// Inference means that a model answers the body. See [IsInference].
	Inference
	// InferenceWebSocket means that the request opens a WebSocket in which a
	// model answers messages.
	InferenceWebSocket
	// Acting means that a model answers, but the request must not be executed
	// twice: the work goes on without the connection, or may have an effect
	// besides the answer, or the body cannot be read.
	Acting
)

// Repeatable reports whether the request may be retried if it is unknown
// whether it was executed.
func (k Kind) Repeatable() bool { return k != Once && k != Acting }

// Infers reports whether the request is for inference, and not, for example,
// about files or fine-tuning.
func (k Kind) Infers() bool { return k >= Inference }

// IsHandshake reports whether the request opens a WebSocket.
func (k Kind) IsHandshake() bool { return k == WebSocket || k == InferenceWebSocket }

// Clarity says whether a body has exactly the models that were found in it.
type Clarity uint8

const (
	// Clear means that all servers find the same models in the received part of
	// the body, or that the request needs no model.
	Clear Clarity = iota
	// Unclear means that the request is for inference, and that backends may
	// read a model in its body which was not found there. The body is not JSON,
	// or is declared as something else.
	Unclear
	// Opaque means that the body is compressed, so that no model in it can be
	// found or replaced.
	Opaque
)

// Received is the received part of a body.
type Received struct {
	// Bytes is the body, or its beginning.
	Bytes []byte
	// Whole reports whether this is all of it.
	Whole bool
	// Length is the length of the whole body, or less than 0 if it is not
	// known.
	Length int64
	// Decoded reports whether the body was compressed, and Bytes are the
	// decoded text.
	Decoded bool
}

// Parse parses a request with a parsed path. It records the prompt in p, unless
// p is nil.
func Parse(r *http.Request, route Route, body Received, p *Prompt) Request {
	q := Request{Route: route, Kind: kindOf(r, route.Operation), Whole: body.Whole,
		PromptLength: max(body.Length, int64(len(body.Bytes)))}
	switch {
	case !body.Decoded && !readAsIs(r.Header):
		if len(body.Bytes) > 0 {
			q.Clarity = Opaque
		}
	case ContentType(r.Header) == typeForm:
		_, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
		q.Body = parseForm(body.Bytes, params["boundary"])
		q.PromptLength = 0 // the size of a file says nothing about its tokens
	default:
		q.Body = ParseJSON(body.Bytes, p)
	}
	if makesSession(r.Method, route.Operation) {
		q.Body.useSession(body.Bytes)
	}
	q.Cost = q.Body.Cost(q.PromptLength)
	q.NeedsModel = q.Kind.Infers() || mayInfer(r.Method, route.Operation)
	if q.NeedsModel && q.Clarity == Clear && len(body.Bytes) > 0 &&
		(!q.Body.Clear || body.Whole && !q.Body.Whole || DisputedType(r.Header)) {
		q.Clarity = Unclear
	}
	if q.Kind == Inference && inferenceOf(route.Operation).mayAct &&
		(q.Body.Background || q.Body.Acts || q.Clarity != Clear) {
		q.Kind = Acting
	}
	q.MayInfer = !q.NeedsModel && maybeInfers(r, route.Operation)
	q.findModel(r.URL.RawQuery)
	return q
}

func kindOf(r *http.Request, operation string) Kind {
	method := r.Method
	switch handshake := IsHandshake(r); {
	case IsInference(method, operation):
		return Inference
	case handshake && infersByWebSocket(operation):
		return InferenceWebSocket
	case handshake:
		return WebSocket
	case repeatable(method, operation):
		return Safe
	}
	return Once
}

// findModel finds the model in the path, the body or the query, in this order.
func (q *Request) findModel(rawQuery string) {
	if q.Model = q.Route.Name(); q.Model == "" {
		q.Model = q.Body.Model
	}
	if rawQuery == "" {
		return
	}
	for _, param := range []string{"model", "deployment"} {
		if q.Model == "" && q.Clarity != Unclear {
			q.Model, _ = Param(rawQuery, param)
		}
	}
	if q.Kind.IsHandshake() {
		call, _ := Param(rawQuery, "call_id")
		q.NeedsModel = q.NeedsModel && call == "" // a call has its model
	}
}

// ModelInPath reports whether the path names the model, as Azure's classic
// paths do.
func (q *Request) ModelInPath() bool { return q.Route.Deployment != "" }

// CutOff reports whether the body is too long to be buffered and has no model
// in its beginning, so that none can be replaced. The received part may also be
// unclear or opaque.
func (q *Request) CutOff() bool { return !q.Whole && !q.Body.Whole && !q.Body.HasModel }

// IsUpload reports whether the body is a file, or a part of one, and needs no
// model.
func (q *Request) IsUpload(method string) bool {
	return !q.NeedsModel && BodyNamesNothing(method, q.Route.Operation)
}

// CanAskUsage reports whether the request is for a stream without its usage,
// and the balancer can ask for the usage.
func (q *Request) CanAskUsage() bool {
	return q.Kind.Infers() && q.Body.Stream && q.Whole && q.Body.CanAskUsage() &&
		inferenceOf(q.Route.Operation).showsUsageIfAsked
}

// PromptTokens estimates the tokens of the prompt in the body. It returns at
// least 1, even if none of the prompt can be read. It returns 0 if the request
// costs no tokens.
func (q *Request) PromptTokens(body []byte) int64 {
	switch {
	case !q.NeedsModel && (!q.MayInfer || !q.NamesModel()), inferenceOf(q.Route.Operation).countsOnly:
		return 0
	case q.PromptLength == 0 && len(body) > 0: // a form, with a recording or a picture
		return mediaTokens
	}
	return max(1, promptTokens(body, q.PromptLength))
}

// CostsTokens reports whether a request to this route costs tokens if it has a
// body.
func CostsTokens(r *http.Request, route Route) bool {
	return mayInfer(r.Method, route.Operation) && !inferenceOf(route.Operation).countsOnly
}

// OutputLimit returns the maximum number of tokens in all requested answers
// together. Only the members that the operation obeys count. ok is false if the
// request does not limit its output.
func (q *Request) OutputLimit() (limit int64, ok bool) {
	output := inferenceOf(q.Route.Operation).output
	if output == noOutput {
		return 0, true
	}
	if output != unknownOutput || q.MayInfer {
		limit = output.limit(q.Body.MaxOutput)
	}
	if limit == 0 || !q.Body.Whole { // a larger one may follow
		return 0, false
	}
	return limit * min(max(q.Body.N, 1), math.MaxInt64/limit), true
}
