package openailb

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"
)

// Backend is an OpenAI or Azure OpenAI endpoint with a credential of its own.
type Backend struct {
	// URL is where the backend is: an http or https URL, with a base path if
	// its API does not begin at the root (`https://host/openai/v1`). The host
	// tells the dialect: one under openai.azure.com,
	// cognitiveservices.azure.com or services.ai.azure.com is Azure, any
	// other is OpenAI. Placeholders like {env.X} are resolved at load.
	// Required.
	URL string `json:"url"`

	// Name stands for the backend in logs, metrics and the admin API.
	// Default: the URL's host, made unique.
	Name string `json:"name,omitempty"`

	// Priority ranks the backend: those with the lowest number that can serve
	// get the requests, the others wait. 1 or more. Default: 1.
	Priority int `json:"priority,omitempty"`

	// Weight is the backend's share of the requests within its priority. 0
	// drains it: it is used only when no other is left. Default: 1.
	Weight *int `json:"weight,omitempty"`

	// APIKey is the backend's key. Use {env.X} or {file.X}: they are resolved
	// at load and never shown, where a literal key stands in the config for
	// everybody who can read it. A file is read again when it changes.
	// Default: none.
	APIKey string `json:"api_key,omitempty"`

	// Auth is how the backend is told who we are: `api_key` (an api-key
	// header; makes the backend an Azure one whatever its host), `bearer`
	// (an Authorization header), `passthrough` (the caller's own credential
	// goes to this backend), `none`, or the name of a module in the namespace
	// http.openai_lb.credentials, such as `azure_identity` (makes the backend
	// an Azure one, too). Default: `api_key` for Azure, `bearer` for others
	// with a key, `none` for others without one.
	Auth string `json:"auth,omitempty"`

	// AuthOptions configures that module. Default: its own defaults.
	AuthOptions json.RawMessage `json:"auth_options,omitempty"`

	// Header is set on every request to this backend. Placeholders are
	// resolved at load. Default: none.
	Header http.Header `json:"header,omitempty"`

	// Deployment replaces the deployment or model that the client named,
	// unless Model has another for it. Default: the client's is kept.
	Deployment string `json:"deployment,omitempty"`

	// Model lists the models that the backend serves. Requests for others go
	// to other backends. Default: it serves any.
	Model []Model `json:"model,omitempty"`

	// MaxRequests is how many requests the backend gets at a time. Further
	// ones go to other backends. Default: no limit.
	MaxRequests int `json:"max_requests,omitempty"`

	url    *url.URL // without a path
	paths  paths
	models map[string]string // what Model says, nil: any
	auth   string
	source CredentialSource // nil: there is none of ours
	azure  bool
	header http.Header
	// secretHeaders are the values of those that may hold a key.
	secretHeaders []string
	health        string // the key of its health
}

// Model is a model that a backend serves.
type Model struct {
	// Name is the model as clients name it: in the body, or as the deployment
	// of a classic Azure path. Required.
	Name string `json:"name"`

	// Deployment is what the backend calls it. Default: the backend's
	// deployment, or else the same.
	Deployment string `json:"deployment,omitempty"`
}

// azureDomains are the domains under which Azure OpenAI resources live.
var azureDomains = []string{"openai.azure.com", "cognitiveservices.azure.com", "services.ai.azure.com"}

func isAzureHost(host string) bool {
	for _, domain := range azureDomains {
		if strings.HasSuffix(strings.ToLower(host), "."+domain) {
			return true
		}
	}
	return false
}

func isOpenAIHost(host string) bool {
	return strings.EqualFold(host, "api.openai.com")
}

// maxWeight keeps the sum of all weights far from overflowing.
const maxWeight = 1_000_000

func checkRank(priority, weight int) error {
	if priority < 1 {
		return fmt.Errorf("priority %d: expected 1 or more", priority)
	}
	if weight < 0 || weight > maxWeight {
		return fmt.Errorf("weight %d: expected 0 (drained) to %d", weight, maxWeight)
	}
	return nil
}

// provision resolves what the config says about the backend. Its errors hold
// no secret.
func (b *Backend) provision(ctx caddy.Context) error {
	repl := caddy.NewReplacer()
	rawURL, err := repl.ReplaceOrErr(b.URL, true, true)
	if err != nil {
		return fmt.Errorf("url: %w", err)
	}
	if b.url, err = parseBackendURL(rawURL); err != nil {
		return err
	}
	base := strings.TrimRight(b.url.EscapedPath(), "/")
	b.url = &url.URL{Scheme: b.url.Scheme, Host: b.url.Host}
	if err := b.provisionAuth(ctx, b.url.Hostname()); err != nil {
		return err
	}
	b.paths = pathsOf(base, b.azure)
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
		return fmt.Errorf("max_requests %d: expected 1 or more", b.MaxRequests)
	}
	b.header = make(http.Header, len(b.Header))
	for name, values := range b.Header {
		if !httpguts.ValidHeaderFieldName(name) {
			return fmt.Errorf("header %q: that is not the name of a header", name)
		}
		for _, value := range values {
			if value, err = repl.ReplaceOrErr(value, true, true); err != nil {
				return fmt.Errorf("header %s: %w", name, err)
			}
			if !httpguts.ValidHeaderFieldValue(value) {
				return fmt.Errorf("header %s: its value holds control characters", name)
			}
			b.header.Add(name, value)
			if namesSecret(name) {
				b.secretHeaders = append(b.secretHeaders, value)
			}
		}
	}
	b.health = b.url.String() + base + " " + b.fingerprint()
	return nil
}

// namesSecret reports whether a header is named like one with a key, as
// Authorization, Api-Key or Cf-Aig-Authorization are.
func namesSecret(header string) bool {
	header = strings.ToLower(header)
	return slices.ContainsFunc([]string{"auth", "key", "token", "secret"}, func(word string) bool {
		return strings.Contains(header, word)
	})
}

func (b *Backend) provisionModels() error {
	for _, m := range b.Model {
		if m.Name == "" {
			return errors.New("model: expected a name")
		}
		if _, ok := b.models[m.Name]; ok {
			return fmt.Errorf("model %s is there twice", m.Name)
		}
		if b.models == nil {
			b.models = make(map[string]string)
		}
		b.models[m.Name] = cmp.Or(m.Deployment, b.Deployment, m.Name)
	}
	return nil
}

// serves reports whether the backend has the model. A request without one may
// go to any backend.
func (b *Backend) serves(model string) bool {
	_, ok := b.models[model]
	return ok || model == "" || b.models == nil
}

// nameOf is what the backend calls the model that a client named.
func (b *Backend) nameOf(model string) string {
	if model == "" {
		return ""
	}
	return cmp.Or(b.models[model], b.Deployment, model)
}

// parseBackendURL accepts what can be a backend's URL. Its errors do not echo
// the URL's user part.
func parseBackendURL(rawURL string) (*url.URL, error) {
	shown := rawURL
	if strings.ContainsAny(rawURL, "@?#") {
		// somebody may have put a secret there
		shown = "…"
	}
	u, err := url.Parse(rawURL)
	switch {
	case strings.Contains(rawURL, "@"):
		return nil, errors.New("url: a user or password is not allowed there, use api_key or header")
	case err != nil:
		return nil, fmt.Errorf("url %q: that is not a URL", shown)
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("url %q: expected it to begin with http:// or https://", shown)
	case u.Hostname() == "":
		return nil, fmt.Errorf("url %q: expected a host", shown)
	case strings.Contains(u.Path+"/", "/openai/deployments/"):
		return nil, fmt.Errorf("url %q: expected it to end before /openai/deployments/: that part comes from the client's request, or from deployment", shown)
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, fmt.Errorf("url %q: a query or fragment is not allowed", shown)
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return nil, fmt.Errorf("url %q: expected a port from 1 to 65535", shown)
		}
	}
	return u, nil
}

// label names the backend, the ith of the config, in an error. It never holds
// a part of the URL, where somebody may have put a password.
func (b *Backend) label(i int) string {
	if b.Name == "" {
		return fmt.Sprintf("backend %d", i+1)
	}
	return fmt.Sprintf("backend %d %q", i+1, b.Name)
}

// dial is the backend's network address.
func (b *Backend) dial() string {
	port := b.url.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[b.url.Scheme]
	}
	return net.JoinHostPort(b.url.Hostname(), port)
}

// member makes the backend part of a pool. The caller gives its health back.
func (b *Backend) member(logger *zap.Logger) *member {
	health := loadHealth(b.health)
	if key, ok := b.source.(*apiKey); ok {
		health.startFresh(key.digest())
		key.changed = func(digest string) {
			health.startFresh(digest)
			logger.Info("api_key changed", zap.String("backend", b.Name))
		}
	}
	return &member{
		name:        b.Name,
		priority:    b.Priority,
		weight:      *b.Weight,
		maxRequests: int64(b.MaxRequests),
		upstream:    &reverseproxy.Upstream{Dial: b.dial()},
		health:      health,
		inFlight:    health.inFlightOf(b.Name),
		logger:      logger,
		backend:     b,
	}
}
