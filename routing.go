package openailb

import (
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// asked is what a request asks for.
type asked struct {
	// model is what the client named, in the path, the body or the query. It
	// is empty if the request needs none, or it cannot be found.
	model string
	// inPath tells that the path names the model, as Azure's classic ones do.
	inPath bool
	// body is what the body says of it.
	body openaiapi.Request
	// opaque tells that the body cannot be read, so that nothing in it can be
	// replaced.
	opaque bool
	// infers tells that a model is to do what models are for: it is not about
	// files, fine-tuning and the like.
	infers bool
	// anonymous tells that the caller brought no credential for a backend.
	anonymous bool
}

// inference are the operations that every credential for a model is meant for.
var inference = []string{"/chat/completions", "/completions", "/embeddings", "/responses", "/audio/", "/images/"}

// readAsked finds what a request asks for, of whose body prefix is what was
// read.
func readAsked(r *http.Request, prefix []byte) asked {
	var a asked
	switch mediaType, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); {
	case encoded(r.Header):
		a.opaque = len(prefix) > 0
	case mediaType == "multipart/form-data":
		a.body = openaiapi.ParseForm(prefix, params["boundary"])
	default:
		a.body = openaiapi.ParseJSON(prefix)
	}
	route := openaiapi.ParsePath(r.URL.EscapedPath())
	a.infers = r.Method == http.MethodPost && slices.ContainsFunc(inference, func(operation string) bool {
		return strings.HasPrefix(route.Operation, operation)
	})
	a.model = route.Name()
	a.inPath = a.model != ""
	for _, param := range []string{"model", "deployment"} {
		if a.model == "" {
			a.model = a.body.Model
		}
		if a.model == "" {
			a.model, _ = openaiapi.Param(r.URL.RawQuery, param)
		}
	}
	return a
}

// paths are where a backend has its API.
type paths struct {
	// base comes before a path that belongs to no dialect.
	base string
	// v1 comes before an operation whose model is in the body.
	v1 string
	// classic comes before what follows /openai on Azure's classic paths. If
	// empty, the backend does not have them.
	classic string
}

// pathsOf tells where a backend with this base path has its API. All of
// Azure's is below /openai, and a base path may end with that or with the v1
// API's own.
func pathsOf(base string, azure bool) paths {
	switch {
	case azure && base == "":
		return paths{base, "/openai/v1", "/openai"}
	case azure && strings.HasSuffix(base, "/openai"):
		return paths{strings.TrimSuffix(base, "/openai"), base + "/v1", base}
	case azure && !strings.HasSuffix(base, "/v1"):
		return paths{base, base, base + "/openai"}
	case base == "":
		return paths{base, "/v1", ""}
	}
	return paths{base, base, ""}
}

// direct points an outgoing request, which is a clone of the client's, at the
// backend, and makes it ask in the backend's dialect for its name of the model.
func (b *Backend) direct(out *http.Request, ex *exchange, credential Credential, progress func()) *bodyReader {
	b.authorize(out, credential, ex.credentials)
	removePrivateHeaders(out.Header)
	// the client was told to go on when its body was read
	delete(out.Header, "Expect")
	if ex.asked.body.Stream {
		// the beginning of a stream must be read before it is passed on
		delete(out.Header, "Accept-Encoding")
	}
	acceptDecodable(out.Header)
	for name, values := range b.header {
		out.Header[name] = values
	}
	out.Host = b.header.Get("Host")
	out.URL.Scheme, out.URL.Host = b.url.Scheme, b.url.Host

	path := out.URL.EscapedPath()
	route := openaiapi.ParsePath(path)
	model := b.nameOf(ex.asked.model)
	renamed := model != ex.asked.model
	inBody := renamed && ex.asked.body.HasModel
	switch {
	case route.Dialect == openaiapi.Other:
		path = b.paths.base + path
	case route.Dialect != openaiapi.AzureClassic:
		path = b.paths.v1 + route.Operation
	case b.paths.classic == "":
		path = b.paths.v1 + route.Operation
		out.URL.RawQuery = openaiapi.DropParams(out.URL.RawQuery, "api-version")
		// where the deployment was in the path, the body may name no model
		inBody = inBody || route.Deployment != ""
	case route.Deployment != "" && renamed:
		path = b.paths.classic + strings.TrimPrefix(openaiapi.ClassicPath(model, route.Operation), "/openai")
		inBody = false
	default:
		path = b.paths.classic + strings.TrimPrefix(route.Path(), "/openai")
		inBody = inBody && route.Deployment == ""
	}
	setEscapedPath(out.URL, path)
	out.URL.RawQuery = b.query(out.URL.RawQuery, route, model)
	if !inBody {
		model = ""
	}
	return ex.body.attach(out, &ex.asked.body, model, progress)
}

// acceptDecodable leaves the backend no coding in which an error could not be
// read.
func acceptDecodable(header http.Header) {
	var kept []string
	for _, value := range header["Accept-Encoding"] {
		for coding := range strings.SplitSeq(value, ",") {
			name, _, _ := strings.Cut(coding, ";")
			if slices.Contains(decodable, strings.ToLower(strings.TrimSpace(name))) {
				kept = append(kept, strings.TrimSpace(coding))
			}
		}
	}
	if delete(header, "Accept-Encoding"); kept != nil {
		header["Accept-Encoding"] = []string{strings.Join(kept, ", ")}
	}
}

// query puts the backend's name of the model where the query has the client's.
// Realtime connections have it in a parameter named deployment on Azure's
// classic path, and in one named model on all others.
func (b *Backend) query(rawQuery string, route openaiapi.Route, model string) string {
	asked := "model"
	named, ok := openaiapi.Param(rawQuery, asked)
	if !ok {
		asked = "deployment"
		named, ok = openaiapi.Param(rawQuery, asked)
	}
	want := asked
	if strings.HasSuffix(route.Operation, "/realtime") {
		want = "model"
		if route.Dialect == openaiapi.AzureClassic && b.paths.classic != "" {
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

// takes reports whether the backend can be sent what is asked: it has the
// model, if the body cannot be read it needs no other, and if it wants the
// caller's own credential, there is one.
func (b *Backend) takes(a *asked) bool {
	if b.auth == authPassthrough && a.anonymous {
		return false
	}
	if a.opaque && (b.models != nil || b.Deployment != "" || a.inPath && b.paths.classic == "") {
		return false
	}
	return b.serves(a.model)
}
