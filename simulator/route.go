package simulator

import (
	"cmp"
	"net/http"
	"net/url"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
)

// operations are the paths that take a POST, without the part before them.
var operations = map[string]model.Operation{
	"chat/completions":     model.OpChat,
	"completions":          model.OpCompletion,
	"embeddings":           model.OpEmbedding,
	"audio/transcriptions": model.OpTranscription,
	"responses":            model.OpResponse,
}

// route is what the request line asks for.
type route struct {
	op         model.Operation
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
		if err != nil || deployment == "" || rt.apiVersion == "" || r.Method != http.MethodPost || op == model.OpResponse {
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
		rt.op, rt.object = model.OpObject, object
	case isStored && r.Method == http.MethodPost && about == "cancel", isStored && r.Method == http.MethodGet && about == "input_items":
		rt.op, rt.id, rt.about = model.OpStoredResponse, id, about
	case r.Method == http.MethodPost:
		rt.op = operations[rest]
	case r.Method == http.MethodGet && rest == "models":
		rt.op = model.OpModels
	case r.Method == http.MethodGet && rest == "realtime":
		query := r.URL.Query()
		rt.op, rt.classic = model.OpRealtime, strings.HasPrefix(path, "/openai/realtime")
		rt.deployment = cmp.Or(query.Get("model"), query.Get("deployment"))
	case isStored && id != "" && about == "" && (r.Method == http.MethodGet || r.Method == http.MethodDelete):
		rt.op, rt.id = model.OpStoredResponse, id
	}
	return rt
}
