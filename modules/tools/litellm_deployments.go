package tools

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// deployment is an entry of model_list: a model at an endpoint.
type deployment struct {
	line int
	// copied reports whether an alias or a fallback made it.
	copied bool
	// model is the name for clients, and backendModel the name at the endpoint.
	model, backendModel string
	// wildcard reports whether one of the names is a pattern.
	wildcard bool
	// block is its backend, so far without the priority, the weight and the
	// model.
	block
	order   int
	ordered bool
	// shares are the values of the measures, negative where there is none.
	shares [len(measures)]float64
}

// readModel reads an entry of model_list.
func (l *litellm) readModel(e mapping) {
	name, _ := e.text("model_name")
	if name == "" {
		l.fail(e.line, "model_name is required")
	}
	p := l.mapping(e.take("litellm_params"), "litellm_params")
	p.line = max(p.line, e.line)
	if credential, at := p.text("litellm_credential_name"); credential != "" {
		if values := resolved(l.credentials[credential]); values != nil {
			p.add(values, "credential_values", make(map[*yaml.Node]bool))
		} else {
			l.note(at, "the credential of this name is not in credential_list")
		}
	}
	d := &deployment{line: e.line, model: name}
	info := l.mapping(e.take("model_info"), "model_info") // else descriptions, and prices
	for _, name := range []string{"access_groups", "team_id"} {
		if e, ok := info.rest[name]; ok {
			l.note(e.line, hintOf(name))
		}
	}
	if p.rest["order"].value == nil && info.rest["order"].value != nil {
		p.names, p.rest["order"] = append(p.names, "order"), info.rest["order"]
	}
	if err := l.readDeployment(d, &p); err != nil {
		l.note(e.line, "model "+shown(name)+": "+err.Error())
		return
	}
	l.deployments = append(l.deployments, d)
	l.noteLeft(&p)
	l.noteLeft(&e)
}

// providers are those of LiteLLM that have OpenAI's API, and what their
// variables begin with.
var providers = map[string]string{
	"openai": "OPENAI", "text-completion-openai": "OPENAI", "custom_openai": "OPENAI", "openai_like": "OPENAI",
	"azure": "AZURE", "azure_text": "AZURE", "azure_ai": "AZURE_AI",
	"hosted_vllm": "HOSTED_VLLM", "litellm_proxy": "LITELLM_PROXY", "lm_studio": "LM_STUDIO", "xinference": "XINFERENCE", "llamafile": "LLAMAFILE",
}

// openAINames matches OpenAI's models, for which LiteLLM needs no provider.
var openAINames = regexp.MustCompile(`^(ft:|gpt-|chatgpt-|codex-|computer-use|o[1-9]|dall-e|sora|text-embedding-|tts-|whisper-|text-moderation|omni-moderation|davinci-|babbage-)`)

// readModelName reads the provider and the model at the endpoint. It returns
// what the provider's variables begin with.
func (l *litellm) readModelName(d *deployment, p *mapping) (prefix string, err error) {
	model, _ := p.text("model")
	if model == "" {
		l.fail(p.line, "model is required in litellm_params")
	}
	custom, _ := p.text("custom_llm_provider")
	provider, name, found := strings.Cut(model, "/")
	switch {
	case custom != "":
		provider, name = custom, strings.TrimPrefix(model, custom+"/")
	case !found && openAINames.MatchString(model):
		provider, name = "openai", model
	case !found:
		return "", errors.New("its provider is not named; write openai/ or azure/ before the model if it has OpenAI's API")
	}
	prefix = providers[provider]
	if prefix == "" {
		return "", fmt.Errorf("the provider %s is not imported; if it has an API like OpenAI's, write a backend with its URL",
			shown(provider))
	}
	for _, mode := range []string{"responses/", "o_series/", "gpt5_series/"} {
		name = strings.TrimPrefix(name, mode)
	}
	d.backendModel = cmp.Or(name, d.model)
	for _, text := range []string{d.model, d.backendModel} {
		if _, ok := directive.Word(text); !ok {
			return "", errors.New("names must not contain control characters, braces or backslashes")
		}
	}
	if d.wildcard = strings.Contains(d.model+d.backendModel, "*"); d.wildcard && d.model+d.backendModel != "**" {
		l.note(d.line, "model "+shown(d.model)+": a backend cannot have a pattern, so this one serves any model, by the name that the client sends")
	}
	return prefix, nil
}

// readDeployment reads litellm_params. It returns an error if they cannot be
// imported.
func (l *litellm) readDeployment(d *deployment, p *mapping) error {
	prefix, err := l.readModelName(d, p)
	if err != nil {
		return err
	}
	base, at := p.text("api_base")
	if other, line := p.text("base_url"); base == "" {
		base, at = other, line
	}
	if d.url, err = l.baseURL(base, prefix, at); err != nil {
		return fmt.Errorf("api_base: %w", err)
	}
	l.setAuth(d, p, prefix)
	order, ordered := l.number(p, "order", -maxOrder, maxOrder)
	d.order, d.ordered = int(order), ordered
	for i, measure := range measures {
		at, most := p.rest[measure].line, float64(maxLimit)
		if measure == "weight" {
			most = backend.MaxWeight
		}
		n, ok := l.number(p, measure, 0, most)
		if d.shares[i] = n; !ok {
			d.shares[i] = -1
		} else if measure != "weight" {
			l.note(at, hintOf(measure))
		}
	}
	requests, _ := l.number(p, "max_parallel_requests", 1, math.MaxInt32)
	d.requests = int(requests)
	if organization, at := p.text("organization"); organization != "" {
		l.addHeader(&d.block, "OpenAI-Organization", organization, placeholderOf(organization), at)
	}
	for _, field := range []string{"extra_headers", "headers"} {
		headers := l.mapping(p.take(field), field)
		for _, name := range headers.left() {
			value, at := headers.text(name)
			l.addHeader(&d.block, name, value, placeholderOf(value), at)
		}
	}
	return nil
}

// The highest order, the highest limit per minute, and the longest duration in
// seconds, that are imported.
const maxOrder, maxLimit, longest = 1_000_000, 1_000_000_000_000, 365 * 24 * 60 * 60

// number takes a number. It reports false without one.
func (l *litellm) number(m *mapping, name string, least, most float64) (float64, bool) {
	text, at := m.text(name)
	if text == "" {
		return 0, false
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || !(n >= least && n <= most) {
		l.note(at, fmt.Sprintf("%s: expected a number from %s to %s", name, decimal(least), decimal(most)))
		return 0, false
	}
	return n, true
}

// baseURL returns the URL of a backend. The variables of its provider begin
// with prefix.
func (l *litellm) baseURL(base, prefix string, at int) (string, error) {
	if placeholder, ok := variable(base); ok {
		return placeholder, nil
	}
	switch {
	case base == "" && prefix == "OPENAI":
		return "https://api.openai.com/v1", nil
	case base == "":
		return "{env." + prefix + "_API_BASE}", nil
	}
	if _, ok := directive.Word(base); !ok {
		return "", errors.New("a URL must not contain control characters, braces or backslashes")
	}
	base, query, _ := strings.Cut(base, "?")
	// portals show URLs with an api-version
	if values, err := url.ParseQuery(query); err != nil || len(values) > 1 || len(values) == 1 && !values.Has("api-version") {
		l.note(at, "api_base: its query does not carry over; if it holds a key, write it as api_key or header")
	}
	for _, operation := range []string{"/chat/completions", "/completions", "/embeddings", "/responses"} {
		base = strings.TrimSuffix(base, operation)
	}
	base = strings.TrimRight(base, "/")
	u, err := url.Parse(base)
	azure := err == nil && (prefix == "AZURE" || openaiapi.IsAzure(u.Hostname()))
	if azure {
		withoutAPI(u)
		base = u.String()
	}
	if u, err = openaiapi.ParseBaseURL(base); err != nil {
		return "", err
	}
	if !azure && u.Path == "" {
		l.note(at, "api_base without a path: LiteLLM asks it for /chat/completions, this balancer for /v1/chat/completions")
	}
	return u.String(), nil
}

// setAuth sets how a deployment authenticates.
func (l *litellm) setAuth(d *deployment, p *mapping, prefix string) {
	u, err := url.Parse(d.url)
	azureHost := err == nil && openaiapi.IsAzure(u.Hostname())
	if prefix == "AZURE" && !azureHost {
		d.auth = keys.SchemeAPIKey
	}
	identity := ""
	for _, field := range []string{"tenant_id", "client_id", "client_secret", "azure_ad_token"} {
		text, _ := p.text(field)
		identity += text
	}
	key, at := p.text("api_key")
	placeholder, isVariable := variable(key)
	switch {
	case isVariable:
		d.key = placeholder
	case key != "":
		d.key = l.literal(key, keyName(d.url))
		d.comments = append(d.comments, setVariable("The key", at))
	case identity != "" && keys.CheckScheme(keys.SchemeAzureIdentity) == nil:
		d.auth = keys.SchemeAzureIdentity
		d.comments = append(d.comments, "azure_identity finds AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET in the environment.")
	case prefix == "OPENAI" || prefix == "AZURE" || azureHost:
		d.key = "{env." + prefix + "_API_KEY}"
		if prefix == "AZURE" {
			d.comments = append(d.comments, "LiteLLM reads AZURE_OPENAI_API_KEY first: if you set that, write it here.")
		}
		if identity != "" {
			d.comments = append(d.comments, "LiteLLM used an identity of Azure: for that, build with the module azure, and write auth azure_identity instead.")
		}
	}
}
