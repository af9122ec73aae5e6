package openailb

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
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

	// StreamUsage, if it is false, overrides the handler's setting: streams of
	// this backend are not asked for their usage. Use it for a backend that
	// refuses stream_options. Default: the handler's setting.
	StreamUsage *bool `json:"stream_usage,omitempty"`

	// TraceContext sends the backend the context of the request's trace
	// (`traceparent`, `tracestate`, `baggage` and similar). With Caddy's
	// tracing, the attempt is then the parent of the backend's spans.
	// Default: false.
	TraceContext bool `json:"trace_context,omitempty"`

	url    *url.URL // without a path
	paths  openaiapi.Paths
	models map[string]string // its names by the clients', nil: it serves any
	auth   keys.Auth
	azure  bool
	header http.Header

	base    string // its URL, with a path
	health  string // the key of its health in healths
	account string // what shares its stored objects
}

// CredentialSource supplies the credentials that authenticate requests to a
// backend. Caddy modules in the namespace http.openai_lb.credentials implement
// it: `auth <name>` uses the module of that name.
type CredentialSource = keys.Source

// Credential authenticates a request: a header and its value, and the secret in
// the value.
type Credential = keys.Credential

// Model is a model that a backend serves.
type Model struct {
	// Name is the model as clients name it: in the body, or as the deployment
	// of a classic Azure path. Required.
	Name string `json:"name"`

	// Deployment is the backend's name for it. Default: the backend's
	// deployment, or else the same name.
	Deployment string `json:"deployment,omitempty"`
}

// maxWeight keeps the sum of all weights far from overflowing.
const maxWeight = 1_000_000

func checkRank(priority, weight int) error {
	if priority < 1 {
		return fmt.Errorf("priority '%d' is not a whole number of 1 or more", priority)
	}
	if weight < 0 || weight > maxWeight {
		return fmt.Errorf("weight '%d' is not a whole number from 0 to %d", weight, maxWeight)
	}
	return nil
}

// provision checks the config of the backend and resolves its placeholders. Its
// errors hold no secret.
func (b *Backend) provision(ctx caddy.Context) error {
	repl := caddy.NewReplacer()
	rawURL, err := repl.ReplaceOrErr(b.URL, true, true)
	if err != nil {
		return fmt.Errorf("url: %w", err)
	}
	if b.url, err = openaiapi.ParseBaseURL(rawURL); err != nil {
		return err
	}
	for _, field := range []struct {
		name  string
		value *string
	}{{"name", &b.Name}, {"deployment", &b.Deployment}, {"account", &b.Account}} {
		if *field.value, err = repl.ReplaceOrErr(*field.value, true, true); err != nil {
			return fmt.Errorf("%s: %w", field.name, err)
		}
	}
	base := strings.TrimRight(b.url.EscapedPath(), "/")
	b.url = &url.URL{Scheme: b.url.Scheme, Host: b.url.Host}
	auth := b.authConfig()
	if err := b.auth.Provision(ctx, auth); err != nil {
		return err
	}
	b.azure = auth.Azure || b.auth.Scheme == keys.SchemeAPIKey || b.auth.Scheme == keys.SchemeAzureIdentity
	b.paths = openaiapi.PathsAt(base, b.azure)
	if err := b.provisionModels(); err != nil {
		return err
	}
	if b.Priority == 0 {
		b.Priority = 1
	}
	if b.Weight == nil {
		b.Weight = new(1)
	}
	if err := checkRank(b.Priority, *b.Weight); err != nil {
		return err
	}
	if b.MaxRequests < 0 {
		return fmt.Errorf("max_requests '%d' is not a whole number of 1 or more", b.MaxRequests)
	}
	b.header = make(http.Header, len(b.Header))
	for name, values := range b.Header {
		for _, value := range values {
			if value, err = repl.ReplaceOrErr(value, true, true); err != nil {
				return fmt.Errorf("header %s: %w", name, err)
			}
			if err := checkHeader(name, value); err != nil {
				return err
			}
			b.header.Add(name, value)
			if keys.MayHoldKey(name) {
				b.auth.InHeaders = append(b.auth.InHeaders, value)
			}
		}
	}
	identity := ""
	if b.auth.Source != nil {
		identity = b.auth.Source.Identity()
		if b.url.Scheme == "http" && (auth.Azure || auth.OpenAI) {
			ctx.Logger().Warn("the backend's key is sent without encryption: use https", zap.String("url", b.url.String()))
		}
	}
	fingerprint := b.auth.Fingerprint(identity, b.header)
	b.base = b.url.String() + base
	b.health = b.base + " " + fingerprint
	b.account = affinity.Account(b.Account, b.url, fingerprint)
	return nil
}

func (b *Backend) authConfig() keys.AuthConfig {
	host := b.url.Hostname()
	return keys.AuthConfig{
		Scheme: b.Auth, APIKey: b.APIKey, Options: b.AuthOptions, Header: b.Header,
		Azure: openaiapi.IsAzure(host), OpenAI: openaiapi.IsOpenAI(host),
	}
}

func checkHeader(name, value string) error {
	if !httpguts.ValidHeaderFieldName(name) {
		return fmt.Errorf("header name %q is not valid", name)
	}
	if !httpguts.ValidHeaderFieldValue(value) {
		return fmt.Errorf("header %s: the value must not contain control characters", name)
	}
	return nil
}

// toOthers names the backend to other replicas. A key in a file counts as it is
// now: elsewhere, a file of this name may hold another one.
func (b *Backend) toOthers() string {
	if key, ok := b.auth.Source.(*keys.Key); ok {
		return b.base + " " + b.auth.Fingerprint(key.Digest(), b.header)
	}
	return b.health
}

func (b *Backend) provisionModels() error {
	repl := caddy.NewReplacer()
	for _, m := range b.Model {
		for _, name := range []*string{&m.Name, &m.Deployment} {
			var err error
			if *name, err = repl.ReplaceOrErr(*name, true, true); err != nil {
				return fmt.Errorf("model: %w", err)
			}
		}
		if m.Name == "" {
			return errors.New("model requires a name")
		}
		if err := m.check(); err != nil {
			return err
		}
		if _, ok := b.models[m.Name]; ok {
			return fmt.Errorf("model '%s' is given twice", m.Name)
		}
		if b.models == nil {
			b.models = make(map[string]string)
		}
		b.models[m.Name] = cmp.Or(m.Deployment, b.Deployment, m.Name)
	}
	return nil
}

func (m Model) check() error {
	if strings.Contains(m.Name, "*") {
		return fmt.Errorf("model '%s' must not contain *: leave out model to serve any model", m.Name)
	}
	return nil
}

// serves reports whether the backend has the model, if the request names one.
func (b *Backend) serves(model string) bool {
	_, ok := b.models[model]
	return ok || model == "" || b.models == nil
}

// modelNames are the backend's names of the models that the config names.
func (b *Backend) modelNames() []string {
	if b.models == nil && b.Deployment != "" {
		return []string{b.Deployment}
	}
	return slices.Compact(slices.Sorted(maps.Values(b.models)))
}

// nameOf is the backend's name for the model that a client named.
func (b *Backend) nameOf(model string) string {
	if model == "" {
		return ""
	}
	return cmp.Or(b.models[model], b.Deployment, model)
}

// errTakenName reports that two backends have the same name.
var errTakenName = errors.New("another backend has this name")

// label names the backend, the ith of the config, in an error. It has no part
// of a URL that is not valid, because that may hold a password.
func (b *Backend) label(i int) string {
	switch {
	case b.Name != "":
		return fmt.Sprintf("backend %d %q", i+1, b.Name)
	case b.url != nil:
		return fmt.Sprintf("backend %d (%s)", i+1, b.url.Host)
	}
	return fmt.Sprintf("backend %d", i+1)
}

// dial is the backend's network address.
func (b *Backend) dial() string { return openaiapi.DialAddress(b.url) }

// takes reports whether the request can be sent to the backend: the backend
// understands it, and there is a credential of the caller's if the backend gets
// that one.
func (b *Backend) takes(a *apiRequest) bool {
	return (!a.anonymous || !b.auth.Passthrough) && b.understands(a)
}

// understands reports whether the backend has the model, and the body need not be
// read or changed if it cannot be.
func (b *Backend) understands(a *apiRequest) bool {
	switch {
	case a.ModelInPath():
		if (a.Clarity != openaiapi.Clear || a.CutOff()) && !b.paths.HasClassic() {
			return false
		}
	case a.Clarity != openaiapi.Clear && (b.models != nil || b.Deployment != ""):
		return false
	}
	return b.serves(a.Model) && (a.Model != "" || !a.NeedsModel || b.models == nil)
}

// hasCredential reports whether the backend gets a credential of its own.
func (b *Backend) hasCredential() bool { return b.auth.Source != nil || b.auth.InHeaders != nil }

// target makes the backend a member of a pool. The caller gives its health
// back to healths.
func (b *Backend) target() *target {
	m := pool.NewMember(b.Name, loadHealth(b.health))
	m.Priority, m.Weight, m.MaxRequests = b.Priority, *b.Weight, int64(b.MaxRequests)
	m.Models, m.AnyModel = b.modelNames(), b.models == nil && b.Deployment == ""
	m.Names, m.Deployment = b.models, b.Deployment
	return &target{Member: m, backend: b, upstream: &reverseproxy.Upstream{Dial: b.dial()}}
}

// startFresh forgets what was learned with another key, now and whenever the key
// changes. To other replicas it is then another backend.
func (t *target) startFresh(link *replicas.Link, logger *zap.Logger) {
	key, ok := t.backend.auth.Source.(*keys.Key)
	if !ok {
		return
	}
	t.StartFresh(key.Digest())
	key.Changed = func(digest string) {
		t.StartFresh(digest)
		link.Name(t.Member, t.backend.toOthers())
		logger.Info("api_key changed", zap.String("backend", t.Name))
	}
}

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
