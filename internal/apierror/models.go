package apierror

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// modelObject describes a model in the format of OpenAI's API.
type modelObject struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int    `json:"created"`
	OwnedBy string `json:"owned_by"`
}

// ModelList answers GET /v1/models and GET /v1/models/{model}, and the same
// requests at Azure's paths. It returns no answer to any other request.
func ModelList(r *http.Request, route openaiapi.Route, models []string) (none Answer) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return none
	}
	rest, ok := strings.CutPrefix(route.Operation, "/models")
	if !ok || route.Dialect == openaiapi.Other || route.Deployment != "" || rest != "" && rest[0] != '/' {
		return none
	}
	name, err := url.PathUnescape(strings.Trim(rest, "/"))
	switch {
	case err != nil:
		return none
	case name == "":
		list := struct {
			Object string        `json:"object"`
			Data   []modelObject `json:"data"`
		}{Object: "list"}
		for _, model := range models {
			list.Data = append(list.Data, describe(model))
		}
		return Answer{Response: JSONResponse(r, http.StatusOK, list), Class: Models}
	case slices.Contains(models, name):
		return Answer{Response: JSONResponse(r, http.StatusOK, describe(name)), Class: Models}
	}
	return UnknownModel(name, models).Answer(r)
}

func describe(name string) modelObject {
	return modelObject{ID: name, Object: "model", OwnedBy: "openai_lb"}
}
