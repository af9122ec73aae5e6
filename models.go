package openailb

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// modelsOf lists the models of all backends, in the order of the config. It is
// nil if a backend serves any model.
func modelsOf(backends []*Backend) []string {
	var models []string
	for _, b := range backends {
		if b.models == nil {
			return nil
		}
		for _, m := range b.Model {
			if !slices.Contains(models, m.Name) {
				models = append(models, m.Name)
			}
		}
	}
	return models
}

// modelObject describes a model in the format of OpenAI's API.
type modelObject struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int    `json:"created"`
	OwnedBy string `json:"owned_by"`
}

// answerModels answers GET /v1/models and GET /v1/models/{model}, and the same
// requests at Azure's paths. It returns nil for any other request.
func answerModels(r *http.Request, models []string) *http.Response {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return nil
	}
	route := openaiapi.ParsePath(r.URL.EscapedPath())
	rest, ok := strings.CutPrefix(route.Operation, "/models")
	if !ok || route.Dialect == openaiapi.Other || route.Deployment != "" || rest != "" && rest[0] != '/' {
		return nil
	}
	name, err := url.PathUnescape(strings.Trim(rest, "/"))
	switch {
	case err != nil:
		return nil
	case name == "":
		list := struct {
			Object string        `json:"object"`
			Data   []modelObject `json:"data"`
		}{Object: "list"}
		for _, model := range models {
			list.Data = append(list.Data, describeModel(model))
		}
		return jsonResponse(r, http.StatusOK, list)
	case slices.Contains(models, name):
		return jsonResponse(r, http.StatusOK, describeModel(name))
	}
	return unknownModel(name, models).response(r)
}

func describeModel(name string) modelObject {
	return modelObject{ID: name, Object: "model", OwnedBy: "openai_lb"}
}
