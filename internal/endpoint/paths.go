package endpoint

import (
	"net/url"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// Paths are where a backend has its API.
type Paths struct {
	// v1 comes before an operation whose model is in the body.
	v1 string
	// classic comes before what follows /openai on Azure's classic paths. If
	// empty, the backend does not have them.
	classic string
}

// PathsAt tells where a backend with this base path has its API. On Azure, the
// API is below /openai. The base path may already end with that, or with the
// prefix of the v1 API. All paths stay below the base path.
func PathsAt(base string, azure bool) Paths {
	switch {
	case azure && base == "":
		return Paths{"/openai/v1", "/openai"}
	case azure && strings.HasSuffix(base, "/openai"):
		return Paths{base + "/v1", base}
	case azure && !strings.HasSuffix(base, "/v1"):
		return Paths{base, base + "/openai"}
	case base == "":
		return Paths{"/v1", ""}
	}
	return Paths{base, ""}
}

// HasClassic reports whether the backend has Azure's classic paths, which name
// a deployment. All others have the model in the body.
func (p Paths) HasClassic() bool { return p.classic != "" }

// ModelPlace tells what the body of a request is to have for a model, after its
// path was rewritten.
type ModelPlace int

const (
	// AsNamed: the body may name a model, which is replaced if the backend has
	// another name for it.
	AsNamed ModelPlace = iota
	// InPath: the path names the model, and the body stays as it is.
	InPath
	// InBody: the client named the model in the path, and the backend wants it
	// in the body.
	InBody
)

// Rewrite changes the path and the query of a client's request to those that
// the backend has for it. asked is the model as the client names it, and model
// is the backend's name for it.
func (p Paths) Rewrite(u *url.URL, asked, model string) ModelPlace {
	path := u.EscapedPath()
	route := openaiapi.ParsePath(path)
	place := AsNamed
	switch {
	case route.Dialect == openaiapi.Bare:
		path = p.v1 + route.Operation
		if u.RawQuery != "" && !strings.HasSuffix(p.v1, "/models") { // where Foundry wants it
			u.RawQuery = openaiapi.DropParams(u.RawQuery, "api-version")
		}
	case route.Dialect != openaiapi.AzureClassic:
		path = p.v1 + route.Operation
	case !p.HasClassic():
		path = p.v1 + route.Operation
		u.RawQuery = openaiapi.DropParams(u.RawQuery, "api-version")
		if route.Deployment != "" {
			place = InBody
		}
	case route.Deployment != "":
		path = route.Path()
		if model != asked {
			path = openaiapi.ClassicPath(model, route.Operation)
		}
		path = p.classic + strings.TrimPrefix(path, "/openai")
		place = InPath
	default:
		path = p.classic + route.Operation
	}
	setEscapedPath(u, path)
	u.RawQuery = p.query(u.RawQuery, route, model)
	return place
}

// query puts the backend's name of the model where the query has the client's.
// A realtime connection has it in the parameter deployment on Azure's classic
// path, and in the parameter model on all others.
func (p Paths) query(rawQuery string, route openaiapi.Route, model string) string {
	if rawQuery == "" {
		return ""
	}
	asked := "model"
	named, ok := openaiapi.Param(rawQuery, asked)
	if !ok {
		asked = "deployment"
		named, ok = openaiapi.Param(rawQuery, asked)
	}
	want := asked
	if strings.HasSuffix(route.Operation, "/realtime") {
		want = "model"
		if route.Dialect == openaiapi.AzureClassic && p.HasClassic() {
			want = "deployment"
		}
	}
	if !ok || model == "" || named == model && asked == want {
		return rawQuery
	}
	if asked != want {
		rawQuery = openaiapi.DropParams(rawQuery, asked)
	}
	return openaiapi.SetParam(rawQuery, want, model)
}

// setEscapedPath sets u's path so that it is sent exactly as escaped.
func setEscapedPath(u *url.URL, escaped string) {
	if path, err := url.PathUnescape(escaped); err == nil {
		u.Path, u.RawPath = path, escaped
	}
}
