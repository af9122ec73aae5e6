package openaiapi

import (
	"cmp"
	"net/url"
	"strings"
)

// Paths are the path prefixes under which a backend has the API.
type Paths struct {
	// v1 is the prefix of an operation whose model is in the body.
	v1 string
	// classic is the prefix that replaces /openai in Azure's classic paths. It
	// is empty if the backend has no classic paths.
	classic string
	// anthropic is the prefix of operations of Anthropic's API. If it is empty,
	// they have the prefix v1.
	anthropic string
}

// PathsAt returns the paths of a backend with this base path. On Azure,
// OpenAI's API is below /openai, and Anthropic's below /anthropic. The base
// path may already end with the prefix of one of Azure's APIs, which then
// stands for all of them. It may also name a Foundry project, which has no
// classic paths. All paths are below the base path, except those of Anthropic's
// API, which are below the part before such a prefix or project.
func PathsAt(base string, azure bool) Paths {
	resource, project, isProject := cutBaseOfProject(base)
	switch {
	case isProject && azure:
		return Paths{v1: project + azureV1Prefix, anthropic: resource + anthropicPrefix}
	case isProject:
		return Paths{v1: project + azureV1Prefix}
	case !azure:
		return Paths{v1: cmp.Or(base, openAIPrefix)}
	}
	for _, prefix := range []string{classicPrefix, anthropicPrefix, "/anthropic"} {
		if resource, ok := strings.CutSuffix(base, prefix); ok || base == "" {
			return Paths{resource + azureV1Prefix, resource + classicPrefix, resource + anthropicPrefix}
		}
	}
	p := Paths{v1: base}
	if !strings.HasSuffix(base, openAIPrefix) {
		p.classic = base + classicPrefix
	}
	for _, prefix := range []string{azureV1Prefix, "/models"} {
		if resource, ok := strings.CutSuffix(base, prefix); ok {
			p.anthropic = resource + anthropicPrefix
		}
	}
	return p
}

// cutBaseOfProject splits the base path of a Foundry project, with or without a
// prefix of Azure's APIs. resource is the part before the project, under which
// the resource has its other paths. project is the path of the project.
func cutBaseOfProject(base string) (resource, project string, ok bool) {
	for _, prefix := range []string{azureV1Prefix, classicPrefix} {
		base = strings.TrimSuffix(base, prefix)
	}
	resource, name, ok := strings.Cut(base, "/api/projects/")
	return resource, base, ok && name != "" && !strings.Contains(name, "/")
}

// HasClassic reports whether the backend has Azure's classic paths, which name
// a deployment. Requests to all other paths have the model in the body.
func (p Paths) HasClassic() bool { return p.classic != "" }

// ModelPlace is the place in which the backend expects the model of a request
// with a rewritten path.
type ModelPlace int

const (
	// ModelAsNamed means that the body may name a model, which is replaced if
	// the backend has another name for it.
	ModelAsNamed ModelPlace = iota
	// ModelInPath means that the path names the model, and the body stays as it
	// is.
	ModelInPath
	// ModelInBody means that the client named the model in the path, and the
	// backend expects it in the body.
	ModelInBody
)

// Rewrite replaces the path and the query of a client's request by the
// backend's. route is the parsed path. asked is the model as the client names
// it, and model is the backend's name for it.
func (p Paths) Rewrite(u *url.URL, route Route, asked, model string) ModelPlace {
	var path string
	place, v1 := ModelAsNamed, p.v1
	if p.anthropic != "" && (route.Dialect == Anthropic || isOfMessages(route.Operation)) {
		v1 = p.anthropic
	}
	switch {
	case route.Dialect == Bare:
		path = joinBase(u, v1, route.Operation)
		if u.RawQuery != "" && !strings.HasSuffix(v1, "/models") { // where Foundry wants it
			u.RawQuery = DropParams(u.RawQuery, "api-version")
		}
	case route.Dialect != AzureClassic:
		path = joinBase(u, v1, route.Operation)
	case !p.HasClassic():
		path = p.v1 + route.Operation
		u.RawQuery = DropParams(u.RawQuery, "api-version")
		if route.Deployment != "" {
			place = ModelInBody
		}
	case route.Deployment != "":
		deployment := route.Deployment
		if model != asked {
			deployment = EscapeSegment(model)
		}
		path = p.classic + deployments + "/" + deployment + route.Operation
		place = ModelInPath
	default:
		path = p.classic + route.Operation
	}
	setEscapedPath(u, path)
	u.RawQuery = p.query(u.RawQuery, route, model)
	return place
}

// query replaces the model in the query by the backend's name for it. A
// realtime connection names its model in the parameter deployment on Azure's
// classic path, and in the parameter model on all other paths. If the query
// names several models, all are replaced.
func (p Paths) query(rawQuery string, route Route, model string) string {
	if rawQuery == "" {
		return ""
	}
	asked := "model"
	_, ok := Param(rawQuery, asked)
	if !ok {
		asked = "deployment"
		_, ok = Param(rawQuery, asked)
	}
	if !ok || model == "" {
		return rawQuery
	}
	want := asked
	if strings.HasSuffix(route.Operation, "/realtime") {
		other := "deployment"
		if want = "model"; route.Dialect == AzureClassic && p.HasClassic() {
			want, other = other, want
		}
		rawQuery = DropParams(rawQuery, other)
	}
	return SetParam(rawQuery, want, model)
}

// hasNoEscape reports whether no character of a path is escaped or needs to be.
func hasNoEscape(path string) bool {
	for i := range len(path) {
		// '-', '.', '/' and the digits follow each other
		if c := path[i]; c-'a' >= 26 && c-'A' >= 26 && c-'-' >= 13 && c != '_' {
			return false
		}
	}
	return true
}

// joinBase returns base + operation. It avoids the allocation if that is the
// path of u, as it often is.
func joinBase(u *url.URL, base, operation string) string {
	if path := u.Path; len(path) == len(base)+len(operation) && strings.HasPrefix(path, base) &&
		strings.HasSuffix(path, operation) {
		return path
	}
	return base + operation
}

// setEscapedPath sets u's path so that it is sent exactly as escaped.
func setEscapedPath(u *url.URL, escaped string) {
	if hasNoEscape(escaped) {
		u.Path, u.RawPath = escaped, ""
		return
	}
	if path, err := url.PathUnescape(escaped); err == nil {
		u.Path, u.RawPath = path, escaped
	}
}
