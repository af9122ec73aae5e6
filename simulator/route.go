package simulator

import (
	"cmp"
	"net/http"
	"net/url"
	"strings"
)

// operation is the kind of a request.
type operation int

const (
	opUnknown operation = iota
	opChat
	opCompletion
	opEmbedding
	opTranscription
	opResponse
	opStoredResponse
	opObject
	opModels
	opRealtime
)

// operations are the paths that take a POST, without the part before them.
var operations = map[string]operation{
	"chat/completions":     opChat,
	"completions":          opCompletion,
	"embeddings":           opEmbedding,
	"audio/transcriptions": opTranscription,
	"responses":            opResponse,
}

// generates reports whether the operation counts towards the limits.
func (op operation) generates() bool {
	return op >= opChat && op <= opResponse
}

// limited reports whether the operation is one of a deployment, whose limits it counts
// towards.
func (op operation) limited() bool { return op.generates() || op == opRealtime }

// azureName is the name of the operation in the text of Azure's 429.
func (op operation) azureName() string {
	switch op {
	case opCompletion:
		return "Completions_Create"
	case opEmbedding:
		return "Embeddings_Create"
	case opTranscription:
		return "Transcriptions_Create"
	case opResponse:
		return "Responses_Create"
	case opRealtime:
		return "Realtime_Connect"
	default:
		return "ChatCompletions_Create"
	}
}

// route is what the request line asks for.
type route struct {
	op         operation
	classic    bool // under /openai/deployments/
	openai     bool // under /v1/, where OpenAI has its API
	deployment string
	id         string // of a stored response
	about      string // what of the stored response is asked for; empty: all of it
	object     objectPath
	apiVersion string
}

func parseRoute(r *http.Request) route {
	rt := route{apiVersion: r.URL.Query().Get("api-version")}
	path := r.URL.EscapedPath()

	if rest, ok := strings.CutPrefix(path, "/openai/deployments/"); ok {
		rt.classic = true
		segment, rest, _ := strings.Cut(rest, "/")
		deployment, err := url.PathUnescape(segment)
		// The Responses API has no classic path, and every classic path
		// requires an api-version.
		op := operations[rest]
		if err != nil || deployment == "" || rt.apiVersion == "" || r.Method != http.MethodPost || op == opResponse {
			return rt
		}
		rt.deployment, rt.op = deployment, op
		return rt
	}

	rest, ok := strings.CutPrefix(path, "/openai/v1/")
	if !ok {
		rest, ok = strings.CutPrefix(path, "/v1/")
		rt.openai = ok
	}
	if !ok && rt.apiVersion != "" {
		// AzureOpenAI clients use this path for what belongs to no deployment
		rest, ok = strings.CutPrefix(path, "/openai/")
	}
	if !ok {
		return rt
	}
	id, isStored := strings.CutPrefix(rest, "responses/")
	id, about, _ := strings.Cut(id, "/")
	object, isObject := parseObjectPath(rest)
	switch {
	case isObject:
		rt.op, rt.object = opObject, object
	case isStored && r.Method == http.MethodPost && about == "cancel", isStored && r.Method == http.MethodGet && about == "input_items":
		rt.op, rt.id, rt.about = opStoredResponse, id, about
	case r.Method == http.MethodPost:
		rt.op = operations[rest]
	case r.Method == http.MethodGet && rest == "models":
		rt.op = opModels
	case r.Method == http.MethodGet && rest == "realtime":
		query := r.URL.Query()
		rt.op, rt.classic = opRealtime, strings.HasPrefix(path, "/openai/realtime")
		rt.deployment = cmp.Or(query.Get("model"), query.Get("deployment"))
	case isStored && id != "" && about == "" && (r.Method == http.MethodGet || r.Method == http.MethodDelete):
		rt.op, rt.id = opStoredResponse, id
	}
	return rt
}
