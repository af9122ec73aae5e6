package simulator

import (
	"cmp"
	"net/http"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
)

// operations are the paths that take a POST, without the part before them.
var operations = map[string]model.Operation{
	"chat/completions":     model.OpChat,
	"embeddings":           model.OpEmbedding,
	"audio/transcriptions": model.OpTranscription,
	"responses":            model.OpResponse,
}

// route is what the request line asks for.
type route struct {
	op         model.Operation
	classic    bool // of Azure's API that requires an api-version
	openai     bool // under /v1/, where OpenAI has its API
	deployment string
	object     objectPath
	apiVersion string
}

func parseRoute(r *http.Request) route {
	path, query := openaiapi.ParsePath(r.URL.EscapedPath()), r.URL.Query()
	rt := route{
		classic:    path.Dialect == openaiapi.AzureClassic,
		openai:     path.Dialect == openaiapi.OpenAI,
		deployment: path.Name(),
		apiVersion: query.Get("api-version"),
	}
	operation := strings.TrimPrefix(path.Operation, "/")
	rt.object = parseObjectPath(operation)
	_, isObject := collections[rt.object.name]
	switch post, get := r.Method == http.MethodPost, r.Method == http.MethodGet; {
	case path.Dialect == openaiapi.Other || path.Dialect == openaiapi.Bare || rt.classic && rt.apiVersion == "":
	case rt.deployment != "":
		// The Responses API has no classic path.
		if post && operation != "responses" {
			rt.op = operations[operation]
		}
	case isObject:
		rt.op = model.OpObject
	case rt.object.name == "responses" && rt.object.id != "":
		rt.op = model.OpStoredResponse
	case post:
		rt.op = operations[operation]
	case get && operation == "models":
		rt.op = model.OpModels
	case get && operation == "responses":
		rt.op = model.OpResponses
	case get && operation == "realtime":
		rt.op, rt.deployment = model.OpRealtime, cmp.Or(query.Get("model"), query.Get("deployment"))
	}
	return rt
}
