// Package modellist answers requests for the list of models.
package modellist

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// object describes a model in the format of OpenAI's API.
type object struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int    `json:"created"`
	OwnedBy string `json:"owned_by"`
}

// Answer answers GET /v1/models and GET /v1/models/{model}, and the same
// requests at Azure's paths. It returns nil for any other request. The answer
// has a class in metrics.
func Answer(r *http.Request, models []string) (res *http.Response, class string) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return nil, ""
	}
	route := openaiapi.ParsePath(r.URL.EscapedPath())
	rest, ok := strings.CutPrefix(route.Operation, "/models")
	if !ok || route.Dialect == openaiapi.Other || route.Deployment != "" || rest != "" && rest[0] != '/' {
		return nil, ""
	}
	name, err := url.PathUnescape(strings.Trim(rest, "/"))
	switch {
	case err != nil:
		return nil, ""
	case name == "":
		list := struct {
			Object string   `json:"object"`
			Data   []object `json:"data"`
		}{Object: "list"}
		for _, model := range models {
			list.Data = append(list.Data, describe(model))
		}
		return apierror.JSONResponse(r, http.StatusOK, list), apierror.Models
	case slices.Contains(models, name):
		return apierror.JSONResponse(r, http.StatusOK, describe(name)), apierror.Models
	}
	return apierror.UnknownModel(name, models).Answer(r)
}

func describe(name string) object {
	return object{ID: name, Object: "model", OwnedBy: "openai_lb"}
}
