// Package backend describes one backend of a pool.
//
// A [Backend] has the options of a block, or of environment variables, and
// checks them when the configuration is loaded. Everything that follows from
// the options is worked out then: the API that the backend offers at each path,
// its account, and its name for each model. For a request, a Backend only
// answers questions: whether it takes the request, and with which path, headers
// and body the request is sent to it.
//
// The package also calls backends in the background. Health checks ask those
// that have a health_uri. A [Rechecker] tries a backend that could not be
// reached, at growing intervals, until it is reached
// (TestALostBackendIsTriedAtGrowingIntervalsUntilItIsReached). Both end with
// the configuration that started them.
//
// After [Provision], only the credentials of a Backend change, when their file
// does, or their source renews them. A Backend is safe for concurrent use, and
// its options must not be changed any longer.
package backend

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Backend is an OpenAI or Azure OpenAI endpoint with its own credential.
type Backend struct {
	// URL is an http or https URL, with a base path if the API does not start
	// at the root (`https://host/openai/v1`). A host under openai.azure.com,
	// cognitiveservices.azure.com or services.ai.azure.com is Azure, and any
	// other is OpenAI. Placeholders like {env.X} are resolved at load.
	// Required.
	URL string `json:"url"`

	// Name is the backend's name in logs, metrics and placeholders. Default:
	// the URL's host, with its port if it has one, made unique.
	//
	//	name <name>
	Name string `json:"name,omitempty"`

	// Priority is the backend's rank: the lowest number that can serve gets the
	// requests. Default: 1.
	//
	//	priority <n>
	Priority int `json:"priority,omitempty"`

	// Weight is the backend's share of the requests within its priority; 0
	// drains it. Default: by its limits, or 1.
	//
	//	weight <n>
	Weight *int `json:"weight,omitempty"`

	// APIKey is the backend's key. Default: none.
	//
	// Use {env.X} or {file.X}, which are resolved at load and never shown.
	// Anyone who can read the config can read a literal key.
	//
	//	api_key <key>
	APIKey string `json:"api_key,omitempty"`

	// Auth is how the key, or another credential, is sent. Default: `api_key`
	// for Azure, otherwise `bearer` with a key and `none` without.
	//
	// `<module>` is one of the namespace http.openai_lb.credentials, such as
	// `azure_identity`.
	//
	//	auth api_key|bearer|passthrough|none|<module> [{...}]
	Auth string `json:"auth,omitempty"`

	// AuthOptions configures the module that Auth names. Default: the module's
	// defaults.
	AuthOptions json.RawMessage `json:"auth_options,omitempty" caddy:"namespace=http.openai_lb.credentials"`

	// Header is a header that is set on every request to the backend, or
	// removed from each; repeatable. Default: none.
	//
	// In JSON, null instead of values removes it.
	//
	//	header <name> <value>
	//	header -<name>
	Header http.Header `json:"header,omitempty"`

	// Deployment is the deployment or model that the backend gets, whatever the
	// client named. Default: the name that the client used.
	//
	//	deployment <name>
	Deployment string `json:"deployment,omitempty"`

	// Account is a name for backends that share stored objects. Default: its
	// host and credential; for Azure, its host.
	//
	//	account <name>
	Account string `json:"account,omitempty"`

	// Model is a model that the backend serves, and its name there; repeatable.
	// Default: any model.
	//
	//	model <name> [<deployment>]
	Model []Model `json:"model,omitempty"`

	// ServiceTier is the service tier of chats and responses, in place of the
	// client's: `flex`, `default`, `fast` (at most servers `priority`),
	// `ultrafast` or `auto`. Default: the client's.
	//
	// At Azure it is sent as the header x-ms-service-tier, and elsewhere in the
	// body. Backends that differ in it have separate cooldowns.
	//
	//	service_tier <tier>
	ServiceTier string `json:"service_tier,omitempty"`

	// MaxRequests is how many requests the backend gets at a time. Default: no
	// limit.
	//
	//	max_requests <n>
	MaxRequests int `json:"max_requests,omitempty"`

	// Requests is how many requests for inference the backend gets in a second,
	// minute, hour, day or month; repeatable. Default: no quota.
	//
	// It is a number and a unit, such as `600/minute`, as in a caller's limit.
	// A request over the quota goes to another backend.
	//
	//	requests <n>/<unit>
	Requests []string `json:"requests,omitempty"`

	// Tokens is how many tokens the backend gets in a second, minute, hour, day
	// or month, such as `200k/minute`; repeatable. Default: no quota.
	//
	//	tokens <n>/<unit>
	Tokens []string `json:"tokens,omitempty"`

	// SharedLimits is whether all models of the backend draw on the same rate
	// limits. Default: each model has its own.
	//
	// The balancer then keeps one account of what is left, for all models
	// together: for the shares of tiers and callers, for weights, and for
	// backends without room. A cooldown is still of one model.
	//
	//	shared_limits
	SharedLimits bool `json:"shared_limits,omitempty"`

	// HealthURI is the path of the backend's health checks, for a self-hosted
	// server. Default: no health checks.
	//
	// A check is a GET at the backend's address, with its headers and without
	// its key. From a check that fails until one that passes, the backend is a
	// suspect: it gets requests only if no other backend is left.
	//
	//	health_uri <path>
	HealthURI string `json:"health_uri,omitempty"`

	// HealthInterval is the time between two health checks. Default: 30s.
	//
	//	health_interval <duration>
	HealthInterval caddy.Duration `json:"health_interval,omitempty"`

	// HealthStatus is the status that passes a health check, such as 200; 2 in
	// JSON is any of 2xx. Default: 2xx.
	//
	//	health_status <status>
	HealthStatus int `json:"health_status,omitempty"`

	// StreamUsage is whether the balancer may ask the backend for the usage of
	// streams. Default: on.
	//
	//	stream_usage off
	StreamUsage *bool `json:"stream_usage,omitempty"`

	// TraceContext is whether the backend gets the context of the request's
	// trace. Default: off.
	//
	//	trace_context
	TraceContext bool `json:"trace_context,omitempty"`

	Resolved `json:"-"`
}

// Resolved has the options with their placeholders resolved.
type Resolved struct {
	// Origin is the URL without a path.
	Origin *url.URL
	// Models maps the clients' names of models to the backend's. It is nil if
	// the backend serves any model.
	Models map[string]string
	// Credentials authenticates requests to the backend.
	Credentials keys.Auth
	Azure       bool
	// Provider reports whether the host is a known provider's, which never
	// sends a request back.
	Provider bool
	// HealthKey identifies the stored health of the backend, and AccountKey the
	// account with its stored objects.
	HealthKey, AccountKey string
	// Quotas are the limits of Requests and Tokens. Backends with the same
	// HealthKey have the same.
	Quotas []ratelimit.Limit

	tierInHeader  bool // the service tier is in a header, not in the body
	followsLimits bool // no weight was given

	base   string // the URL with its path
	paths  openaiapi.Paths
	header http.Header // without values: the field is removed
	host   string      // that of the header
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

// Takes reports whether the request can be sent to the backend: the backend
// understands it, and the caller has sent a credential if the backend needs the
// caller's. anonymous reports whether the caller has sent none.
func (b *Backend) Takes(r *openaiapi.Request, anonymous bool) bool {
	return (!anonymous || !b.Credentials.Passthrough) && b.Understands(r)
}

// Understands reports whether the backend has the model, and whether the body
// can be read and changed as far as this backend needs it.
func (b *Backend) Understands(r *openaiapi.Request) bool {
	switch {
	case r.ModelInPath():
		if (r.Clarity != openaiapi.Clear || r.CutOff()) && !b.paths.HasClassic() {
			return false
		}
	case r.Clarity != openaiapi.Clear && (b.Models != nil || b.Deployment != ""):
		return false
	}
	if b.ServiceTier != "" && !b.tierInHeader && r.TakesServiceTier() &&
		(r.Clarity != openaiapi.Clear || r.Body.IsForm()) {
		return false
	}
	if b.Models == nil {
		return true
	}
	_, listed := b.Models[r.Model]
	return listed || r.Model == "" && !r.NeedsModel
}

// FollowsLimits reports whether the backend's weight follows its limits,
// because the operator gave none.
func (b *Backend) FollowsLimits() bool { return b.followsLimits }

// TierOf returns the service tier of the request at the backend. It is empty if
// the request has none.
func (b *Backend) TierOf(r *openaiapi.Request) string {
	if b.ServiceTier == "" {
		return r.ServiceTier()
	}
	return r.TierIfTaken(b.ServiceTier)
}

// tellsTier returns the service tier that replaces the one in the body. It is
// empty if that stays.
func (b *Backend) tellsTier(r *openaiapi.Request) string {
	return r.TierIfTaken(cmp.Or(b.ServiceTier, r.HeaderTier))
}

// Direct sets the address, the path and the backend's own headers of an
// outgoing request. It returns the Host, and the changes of the body. route is
// the client's path.
func (b *Backend) Direct(to *url.URL, header http.Header, r *openaiapi.Request,
	route openaiapi.Route) (host string, c openaiapi.Changes) {
	maps.Copy(header, b.header)
	if tier := b.tellsTier(r); tier != "" && b.tierInHeader {
		header[openaiapi.TierHeader] = []string{tier}
	} else {
		c.ServiceTier = tier
	}
	to.Scheme, to.Host = b.Origin.Scheme, b.Origin.Host
	model := b.NameOf(r.Model)
	place := b.paths.Rewrite(to, route, r.Model, model)
	replaced := model != r.Model || b.Models != nil && r.Body.NamesSeveral()
	if place == openaiapi.ModelInBody || place == openaiapi.ModelAsNamed && replaced && r.Body.HasModel {
		c.Model = model
	}
	return b.host, c
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
	if len(b.Models) > 0 {
		if name := b.Models[model]; name != "" {
			return name
		}
	}
	if b.Deployment != "" {
		return b.Deployment
	}
	return model
}

// ModelsOf lists the models of all backends, in the order of the config. It is
// nil if a backend serves any model.
func ModelsOf(backends []*Backend) []string {
	var models []string
	known := make(map[string]bool)
	for _, b := range backends {
		if len(b.Model) == 0 {
			return nil
		}
		for _, m := range b.Model {
			if !known[m.Name] {
				models, known[m.Name] = append(models, m.Name), true
			}
		}
	}
	return models
}

// Dial returns the backend's network address.
func (b *Backend) Dial() string { return openaiapi.DialAddress(b.Origin) }

// HasCredential reports whether the backend has its own credential.
func (b *Backend) HasCredential() bool {
	return b.Credentials.Source != nil || b.Credentials.InHeaders != nil
}

// Key returns the API key of the options, or nil if requests are authenticated
// otherwise.
func (b *Backend) Key() *keys.Key {
	key, _ := b.Credentials.Source.(*keys.Key)
	return key
}

// KeyDigests returns digests of the current keys, by the names of the backends.
func KeyDigests(backends []*Backend) map[string]string {
	digests := make(map[string]string)
	for _, b := range backends {
		if key := b.Key(); key != nil {
			digests[b.Name] = key.Digest()
		}
	}
	return digests
}

// NameForReplicas returns the backend's name for other replicas. It depends on
// the current content of a key file, because a file of the same name may have
// another key elsewhere.
func (b *Backend) NameForReplicas() string {
	if key := b.Key(); key != nil {
		return b.base + " " + b.Credentials.Fingerprint(key.Digest(), b.header)
	}
	return b.HealthKey
}
