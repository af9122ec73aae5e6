// Package backend is one backend: the options that describe it, in a block or in environment
// variables, and what follows from them for the requests that it gets.
package backend

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// Backend is an OpenAI or Azure OpenAI endpoint with its own credential.
type Backend struct {
	// URL is an http or https URL, with a base path if the API does not start
	// at the root (`https://host/openai/v1`). A host under openai.azure.com,
	// cognitiveservices.azure.com or services.ai.azure.com is Azure, and any
	// other is OpenAI. Placeholders like {env.X} are resolved at load.
	// Required.
	URL string `json:"url"`

	// Name identifies the backend in logs, metrics and placeholders.
	// Placeholders like {env.X} are resolved at load. Default: the URL's host,
	// made unique.
	Name string `json:"name,omitempty"`

	// Priority ranks the backend. Requests go to the backends with the lowest
	// number among those that can serve. It is 1 or more. Default: 1.
	Priority int `json:"priority,omitempty"`

	// Weight is the backend's share of the requests within its priority. With 0
	// the backend is drained: it is used only when no other backend is left.
	// Default: 1.
	Weight *int `json:"weight,omitempty"`

	// APIKey is the backend's key. Use {env.X} or {file.X}: they are resolved
	// at load and never shown. Anyone who can read the config can read a
	// literal key. A file is reloaded when it changes. Default: none.
	APIKey string `json:"api_key,omitempty"`

	// Auth is how requests to the backend are authenticated: `api_key` (an
	// api-key header), `bearer` (an Authorization header), `passthrough` (the
	// caller's own credential goes to this backend), `none`, or the name of a
	// module in the namespace http.openai_lb.credentials, such as
	// `azure_identity`. With `api_key` or `azure_identity`, the backend counts
	// as Azure, whatever its host. Default: `api_key` for Azure, `bearer` for
	// api.openai.com and other hosts with a key, `none` for other hosts without
	// one.
	Auth string `json:"auth,omitempty"`

	// AuthOptions configures the module in the namespace
	// http.openai_lb.credentials that auth names. Default: the module's
	// defaults.
	AuthOptions json.RawMessage `json:"auth_options,omitempty" caddy:"namespace=http.openai_lb.credentials"`

	// Header is set on every request to this backend. Placeholders are
	// resolved at load. Authorization is not allowed next to a credential of
	// the backend, which it would replace. Default: none.
	Header http.Header `json:"header,omitempty"`

	// Deployment replaces the deployment or model that the client named, unless
	// Model has another name for it. Placeholders like {env.X} are resolved at
	// load. Default: the client's name is kept.
	Deployment string `json:"deployment,omitempty"`

	// Account is a name for backends that share stored objects, such as two keys
	// of one organization. Placeholders like {env.X} are resolved at load.
	// Default: the URL's host and the credential, or only the host for Azure.
	Account string `json:"account,omitempty"`

	// Model lists the models that the backend serves. Requests for other models
	// go to other backends. Default: the backend serves any model.
	Model []Model `json:"model,omitempty"`

	// MaxRequests is how many requests the backend gets at a time. Further
	// requests go to other backends, or get a 429 if no backend is left.
	// Default: no limit.
	MaxRequests int `json:"max_requests,omitempty"`

	// StreamUsage, if it is false, leaves the streams of this backend as their clients
	// asked for them. If it is true, a stream of a caller with a limit of tokens is asked
	// for its usage, which is removed before the client gets it. Use false for a backend
	// that refuses stream_options. Default: true.
	StreamUsage *bool `json:"stream_usage,omitempty"`

	// TraceContext sends the backend the context of the request's trace
	// (`traceparent`, `tracestate`, `baggage` and similar). With Caddy's
	// tracing, the attempt is then the parent of the backend's spans.
	// Default: false.
	TraceContext bool `json:"trace_context,omitempty"`

	Resolved `json:"-"`
}

// Resolved is what the options say when their placeholders are resolved.
type Resolved struct {
	// Origin is the URL without a path.
	Origin *url.URL
	// Models are its names of models by the clients' names. If nil, it serves any model.
	Models map[string]string
	// Credentials authenticate requests to it.
	Credentials keys.Auth
	Azure       bool
	// HealthKey identifies what is known of its health, and AccountKey its stored objects.
	HealthKey, AccountKey string

	base   string // the URL with its path
	paths  openaiapi.Paths
	header http.Header
}

// Model is a model that a backend serves.
type Model struct {
	// Name is the model as clients name it: in the body, or as the deployment
	// of a classic Azure path. Required.
	Name string `json:"name"`

	// Deployment is the backend's name for it. Default: the backend's
	// deployment, or else the same name.
	Deployment string `json:"deployment,omitempty"`
}

// check checks the values of options that JSON may have and a Caddyfile cannot.
func (b *Backend) check() error {
	if b.MaxRequests < 0 {
		return fmt.Errorf("max_requests '%d' is not a whole number of 1 or more", b.MaxRequests)
	}
	return CheckRank(b.Priority, *b.Weight)
}

// Takes reports whether the request can be sent to the backend: the backend
// understands it, and there is a credential of the caller's if the backend gets
// that one.
func (b *Backend) Takes(r *openaiapi.Request, anonymous bool) bool {
	return (!anonymous || !b.Credentials.Passthrough) && b.Understands(r)
}

// Understands reports whether the backend has the model, and the body need not be
// read or changed if it cannot be.
func (b *Backend) Understands(r *openaiapi.Request) bool {
	switch {
	case r.ModelInPath():
		if (r.Clarity != openaiapi.Clear || r.CutOff()) && !b.paths.HasClassic() {
			return false
		}
	case r.Clarity != openaiapi.Clear && (b.Models != nil || b.Deployment != ""):
		return false
	}
	if b.Models == nil {
		return true
	}
	_, has := b.Models[r.Model]
	return has || r.Model == "" && !r.NeedsModel
}

// Direct sets the address and the path of an outgoing request, and the backend's own headers. It
// returns its Host, and the model that its body is to name, if that changes. route is the path that
// the request has.
func (b *Backend) Direct(to *url.URL, header http.Header, r *openaiapi.Request, route openaiapi.Route) (host, inBody string) {
	maps.Copy(header, b.header)
	to.Scheme, to.Host = b.Origin.Scheme, b.Origin.Host
	model := b.NameOf(r.Model)
	place := b.paths.Rewrite(to, route, r.Model, model)
	replaced := model != r.Model || b.Models != nil && r.Body.NamesSeveral()
	if place == openaiapi.ModelInBody || place == openaiapi.ModelAsNamed && replaced && r.Body.HasModel {
		inBody = model
	}
	return b.header.Get("Host"), inBody
}

// Names returns the backend's names of the models that the options name.
func (b *Backend) Names() []string {
	if b.Models == nil && b.Deployment != "" {
		return []string{b.Deployment}
	}
	return slices.Compact(slices.Sorted(maps.Values(b.Models)))
}

// NameOf returns the backend's name for the model that a client named.
func (b *Backend) NameOf(model string) string {
	if model == "" {
		return ""
	}
	return cmp.Or(b.Models[model], b.Deployment, model)
}

// ModelsOf lists the models of all backends, in the order of the config. It is
// nil if a backend serves any model.
func ModelsOf(backends []*Backend) []string {
	var models []string
	for _, b := range backends {
		if len(b.Model) == 0 {
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

// Dial returns the backend's network address.
func (b *Backend) Dial() string { return openaiapi.DialAddress(b.Origin) }

// HasCredential reports whether the backend gets a credential of its own.
func (b *Backend) HasCredential() bool {
	return b.Credentials.Source != nil || b.Credentials.InHeaders != nil
}

// Key returns the API key of the options, or nil if requests are authenticated otherwise.
func (b *Backend) Key() *keys.Key {
	key, _ := b.Credentials.Source.(*keys.Key)
	return key
}

// NameForReplicas names the backend to other replicas. A key in a file counts as it is
// now: elsewhere, a file of this name may hold another one.
func (b *Backend) NameForReplicas() string {
	if key := b.Key(); key != nil {
		return b.base + " " + b.Credentials.Fingerprint(key.Digest(), b.header)
	}
	return b.HealthKey
}
