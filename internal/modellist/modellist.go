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
// requests at Azure's paths. It returns no answer to any other request.
func Answer(r *http.Request, route openaiapi.Route, models []string) (none apierror.Answer) {
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
			Object string   `json:"object"`
			Data   []object `json:"data"`
		}{Object: "list"}
		for _, model := range models {
			list.Data = append(list.Data, describe(model))
		}
		return apierror.Answer{Response: apierror.JSONResponse(r, http.StatusOK, list), Class: apierror.Models}
	case slices.Contains(models, name):
		return apierror.Answer{Response: apierror.JSONResponse(r, http.StatusOK, describe(name)), Class: apierror.Models}
	}
	return apierror.UnknownModel(name, models).Answer(r)
}

func describe(name string) object {
	return object{ID: name, Object: "model", OwnedBy: "openai_lb"}
}
