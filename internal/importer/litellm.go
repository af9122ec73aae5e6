package importer

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"golang.org/x/net/http/httpguts"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// litellm reads the configuration of LiteLLM's proxy: https://docs.litellm.ai/docs/proxy/config_settings
type litellm struct {
	yamlReader
	*site
	// deployments are the entries of model_list that carry over.
	deployments []*deployment
	// credentials are those of credential_list, by their names.
	credentials map[string]*yaml.Node
	// placeholders are the variables for literal keys, and taken the names of all variables.
	placeholders map[string]string
	taken        map[string]bool
	// unweighted reports whether the routing strategy ignores weights.
	unweighted bool
}

// deployment is an entry of model_list: a model at an endpoint.
type deployment struct {
	line int
	// copied reports whether an alias or a fallback made it.
	copied bool
	// model is the name for clients, and backendModel the name at the endpoint.
	model, backendModel string
	// wildcard reports whether one of the names is a pattern.
	wildcard bool
	// block is its backend, so far without the priority, the weight and the model.
	block
	order   int
	ordered bool
	// shares are the values of the measures, negative where there is none.
	shares [len(measures)]float64
}

// measures are the fields by which LiteLLM shares requests, in the order in which it looks for them.
var measures = [...]string{"weight", "rpm", "tpm"}

// LiteLLM makes a Caddyfile of a file of LiteLLM's proxy.
func LiteLLM(text []byte) (string, error) {
	l := &litellm{
		site:        &site{origin: "LiteLLM", port: "4000"},
		credentials: make(map[string]*yaml.Node), placeholders: make(map[string]string), taken: make(map[string]bool),
	}
	for _, match := range environmentName.FindAllSubmatch(text, -1) {
		l.taken[string(match[1])] = true
	}
	root := l.file(text)
	for _, n := range l.list(root.take("credential_list"), "credential_list") {
		c := l.mapping(n, "an entry of credential_list")
		name, _ := c.text("credential_name")
		l.credentials[name] = c.take("credential_values")
	}
	at := root.rest["model_list"].line
	entries := l.list(root.take("model_list"), "model_list")
	for _, n := range entries {
		l.readModel(l.mapping(n, "an entry of model_list"))
	}
	if len(entries) == 0 {
		l.fail(at, "expected model_list: models in LiteLLM's database are not read")
	} else if len(l.deployments) == 0 {
		l.fail(at, "no entry of model_list can be imported\n%s", strings.Join(l.mergedNotes(), "\n"))
	}
	if l.err == nil {
		l.readSettings(&root)
	}
	if l.err != nil {
		return "", l.err
	}
	l.setBlocks()
	return l.caddyfile(), nil
}

// hints say what to do about settings that do not carry over. Each begins with their names.
var hints = []string{
	"finetune_settings, files_settings: these requests go to the same backends",
	"include: import the included files one by one",
	"rpm, tpm: only the shares of a model's deployments carry over, as weight; there is no limit, only the backend's own 429 counts",
	"input_cost_per_token, output_cost_per_token, input_cost_per_second, output_cost_per_second, cache_read_input_token_cost: nothing is chosen by price, and the access log has the tokens of each request",
	"max_budget, budget_duration, provider_budget_config: no budgets of money; a client_key can have limits of tokens",
	"tags, enable_tag_filtering: backends are not chosen by tags; write a site or a route with its own openai_lb for each tag",
	"guardrails, prompt_injection_params: contents are not checked",
	"custom_auth, enable_jwt_auth, litellm_jwtauth: client_key is the one way to authenticate callers here; put another one before openai_lb",
	"alerting, alerting_threshold, alert_types: alert on the metrics",
	"pass_through_endpoints: write a route with reverse_proxy",
	"enable_pre_call_checks, optional_pre_call_checks: a request goes to any backend of its model",
	"retry_policy, model_group_retry_policy, allowed_fails_policy: the class of a reply decides, see docs/replies.md",
	"mock_response: use the simulator",
	"ssl_verify: set TLS in the transport of the block, see docs/options.md",
	"api_version: clients send their own, and requests for /v1 need none",
	"max_retries: lb_retries is for all backends",
	"cache, cache_params: replies are not cached",
	"callbacks, success_callback, failure_callback: use the access log, metrics and traces",
	"drop_params, modify_params: bodies are passed on unchanged",
	"redis_host, redis_port, redis_password, redis_url: replicas share state with the option state, see docs/replicas.md",
	"retry_after: the next backend is tried immediately",
	"timeout, stream_timeout: the time limits are those of all backends, response_header_timeout and stream_first_event_timeout",
	"context_window_fallbacks: a prompt that is too long goes to a backend that calls the model something else, if there is one",
	"content_policy_fallbacks: refused content is the client's error, and is not sent elsewhere",
	"default_fallbacks: a client gets the model that it asked for",
	"database_url: virtual keys, their limits and spend stay in LiteLLM's database; write a client_key for each caller",
	"store_model_in_db: models in LiteLLM's database are not read",
}

// noteLeft adds a note for each entry that was not taken.
func (l *litellm) noteLeft(m *mapping) {
	for _, name := range m.left() {
		l.note(m.rest[name].line, hintOf(name))
	}
}

// hintOf returns the note for a setting that does not carry over.
func hintOf(name string) string {
	for _, hint := range hints {
		names, _, _ := strings.Cut(hint, ":")
		if slices.Contains(strings.Split(names, ", "), name) {
			return hint
		}
	}
	return shown(name) + " does not carry over"
}

// environmentName matches the name of a variable in LiteLLM's form.
var environmentName = regexp.MustCompile(`os\.environ/([A-Za-z_][A-Za-z0-9_]*)`)

// variable returns the placeholder of a text like os.environ/X.
func variable(text string) (string, bool) {
	match := environmentName.FindStringSubmatch(text)
	if match == nil || match[0] != text {
		return "", false
	}
	return "{env." + match[1] + "}", true
}

var notOfName = regexp.MustCompile(`[^A-Z0-9]+`)

// variableName makes the name of a variable.
func variableName(text string) string {
	return strings.Trim(notOfName.ReplaceAllString(strings.ToUpper(text), "_"), "_")
}

// literal returns the placeholder for a literal key. Its name is not used otherwise.
func (l *litellm) literal(key, name string) string {
	if l.placeholders[key] == "" {
		free := name
		for i := 2; l.taken[free]; i++ {
			free = name + "_" + strconv.Itoa(i)
		}
		l.taken[free] = true
		l.placeholders[key] = "{env." + free + "}"
	}
	return l.placeholders[key]
}

// keyName names the variable for the key of a backend, such as CONTOSO_EAST_KEY.
func keyName(rawURL string) string {
	u, err := url.Parse(rawURL)
	if err != nil || u.Hostname() == "" {
		return variableName(strings.TrimPrefix(rawURL, "{env.")) + "_KEY"
	}
	if openaiapi.IsOpenAI(u.Hostname()) {
		return "OPENAI_API_KEY"
	}
	first, _, _ := strings.Cut(u.Hostname(), ".")
	name := variableName(first + " key")
	if name[0] <= '9' {
		name = "BACKEND_" + name
	}
	return name
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

// providers are those of LiteLLM that have OpenAI's API, and what their variables begin with.
var providers = map[string]string{
	"openai": "OPENAI", "text-completion-openai": "OPENAI", "custom_openai": "OPENAI", "openai_like": "OPENAI",
	"azure": "AZURE", "azure_text": "AZURE", "azure_ai": "AZURE_AI",
	"hosted_vllm": "HOSTED_VLLM", "litellm_proxy": "LITELLM_PROXY", "lm_studio": "LM_STUDIO", "xinference": "XINFERENCE", "llamafile": "LLAMAFILE",
}

// openAINames matches OpenAI's models, for which LiteLLM needs no provider.
var openAINames = regexp.MustCompile(`^(ft:|gpt-|chatgpt-|codex-|computer-use|o[1-9]|dall-e|sora|text-embedding-|tts-|whisper-|text-moderation|omni-moderation|davinci-|babbage-)`)

// readModelName reads the provider and the model at the endpoint. It returns what the provider's variables begin with.
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
		return "", fmt.Errorf("the provider %s is not imported; if it has an API like OpenAI's, write a backend with its URL", shown(provider))
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

// readDeployment reads litellm_params. It returns an error if they cannot be imported.
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
		l.addHeader(d, "OpenAI-Organization", organization, at)
	}
	for _, field := range []string{"extra_headers", "headers"} {
		headers := l.mapping(p.take(field), field)
		for _, name := range headers.left() {
			value, at := headers.text(name)
			l.addHeader(d, name, value, at)
		}
	}
	return nil
}

// The highest order, the highest limit per minute, and the longest duration in seconds, that are imported.
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

// baseURL returns the URL of a backend. The variables of its provider begin with prefix.
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
	base, _, _ = strings.Cut(base, "?") // portals show URLs with an api-version
	for _, operation := range []string{"/chat/completions", "/completions", "/embeddings", "/responses"} {
		base = strings.TrimSuffix(base, operation)
	}
	base = strings.TrimRight(base, "/")
	u, err := url.Parse(base)
	azure := err == nil && (prefix == "AZURE" || openaiapi.IsAzure(u.Hostname()))
	if azure {
		for _, mark := range []string{"/openai/", "/models/"} { // the balancer adds these paths
			if i := strings.LastIndex(u.Path+"/", mark); i >= 0 {
				u.Path, u.RawPath = u.Path[:i], ""
			}
		}
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
		d.comments = append(d.comments, fmt.Sprintf("The key was on line %d: set the variable.", at))
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

// addHeader adds a header of a backend. A value that may be a key becomes a variable.
func (l *litellm) addHeader(d *deployment, name, value string, at int) {
	placeholder, isVariable := variable(value)
	_, ok := directive.Word(value)
	switch {
	case !httpguts.ValidHeaderFieldName(name) || strings.EqualFold(name, "Authorization") || strings.EqualFold(name, "Host"):
		l.note(at, "the header "+shown(name)+" cannot be set by the option header")
		return
	case isVariable:
		value = placeholder
	case keys.MayHoldKey(name):
		value = l.literal(value, "HEADER_"+variableName(name))
		d.comments = append(d.comments, fmt.Sprintf("The header's value was on line %d: set the variable.", at))
	case !ok:
		l.note(at, "the value of the header "+shown(name)+" must not be empty, or contain control characters, braces or backslashes")
		return
	}
	d.header = append(d.header, [2]string{name, value})
}

// setBlocks makes a backend of each endpoint, key and priority.
func (l *litellm) setBlocks() {
	ranks := l.ranks()
	l.setWeights(ranks)
	slices.SortStableFunc(l.deployments, func(a, b *deployment) int { return cmp.Compare(ranks[a], ranks[b]) })
	for _, d := range l.deployments {
		if ranks[l.deployments[len(l.deployments)-1]] > 1 {
			d.priority = ranks[d]
		}
		i := slices.IndexFunc(l.blocks, func(b *block) bool { return b.canServe(d) })
		if i < 0 {
			i = len(l.blocks)
			l.blocks = append(l.blocks, new(d.block))
		}
		b, model := l.blocks[i], [2]string{d.model, d.backendModel}
		switch {
		case d.wildcard:
		case !slices.Contains(b.models, model):
			b.models = append(b.models, model)
		case !d.copied:
			l.note(d.line, "model "+shown(d.model)+" is in the file twice for one endpoint, and here once")
		}
	}
}

// canServe reports whether a backend can also serve a deployment. In LiteLLM, max_parallel_requests is of one model.
func (b *block) canServe(d *deployment) bool {
	return b.url == d.url && b.auth == d.auth && b.key == d.key && slices.Equal(b.header, d.header) &&
		b.priority == d.priority && b.weight == d.weight && b.requests == d.requests && (len(b.models) == 0) == d.wildcard &&
		!slices.ContainsFunc(b.models, func(m [2]string) bool {
			return m[0] == d.model && m[1] != d.backendModel || b.requests > 0 && m[1] != d.backendModel
		})
}

// setWeights sets the weights of all deployments, as LiteLLM's simple-shuffle shares requests among deployments of a
// model and an order:
// https://github.com/BerriAI/litellm/blob/main/litellm/router_strategy/simple_shuffle.py
// The first deployment decides by which measure. Deployments without that get nothing while another one is healthy.
func (l *litellm) setWeights(ranks map[*deployment]int) {
	type level struct {
		model string
		rank  int
	}
	levels := make(map[level][]*deployment)
	for _, d := range l.deployments {
		at := level{d.model, ranks[d]}
		levels[at] = append(levels[at], d)
	}
	for _, d := range l.deployments {
		all := levels[level{d.model, ranks[d]}]
		switch {
		case !l.unweighted && all[0] == d && len(all) > 1:
			l.shareAmong(all)
		case l.unweighted && d.shares[0] >= 0 && !d.copied:
			l.note(d.line, "weight: LiteLLM ignores it with this routing_strategy")
		}
	}
}

// shareAmong sets the weights of deployments that share the requests of a model.
func (l *litellm) shareAmong(all []*deployment) {
	for i, measure := range measures {
		var values []float64
		for _, d := range all {
			values = append(values, max(d.shares[i], 0))
		}
		if all[0].shares[i] < 0 || slices.Max(values) == 0 {
			continue
		}
		for j, n := range wholeWeights(values) {
			d := all[j]
			if d.weight = strconv.Itoa(n); d.shares[i] < 0 && !d.copied {
				l.note(d.line, "model "+shown(d.model)+": it has no "+measure+", as the first one of the model has, so LiteLLM sends it nothing while that one is healthy: weight 0")
			}
		}
		return
	}
}

// wholeWeights returns the smallest whole numbers that have the proportions of values, at most [backend.MaxWeight].
func wholeWeights(values []float64) []int {
	scale := 1.0
	for _, v := range values {
		for scale < 1_000_000 && math.Abs(v*scale-math.Round(v*scale)) > 1e-6 {
			scale *= 10
		}
	}
	divisor := 0
	for _, v := range values {
		for a, b := divisor, int(math.Round(v*scale)); ; a, b = b, a%b {
			if b == 0 {
				divisor = a
				break
			}
		}
	}
	scale = min(scale/float64(max(divisor, 1)), backend.MaxWeight/slices.Max(values))
	weights := make([]int, len(values))
	for i, v := range values {
		if weights[i] = int(math.Round(v * scale)); v > 0 {
			weights[i] = max(weights[i], 1)
		}
	}
	return weights
}

// ranks returns the priorities. As in LiteLLM, deployments without an order come after those of their group that
// have one, and patterns after all names.
func (l *litellm) ranks() map[*deployment]int {
	lowest, highest := maxOrder, 0
	hasOrder := make(map[string]bool)
	for _, d := range l.deployments {
		if d.ordered {
			lowest, highest = min(lowest, d.order), max(highest, d.order)
			hasOrder[d.model] = true
		}
	}
	shift := max(0, 1-lowest)
	ranks, last := make(map[*deployment]int), 0
	for _, d := range l.deployments {
		switch ranks[d] = 1; {
		case d.ordered:
			ranks[d] = d.order + shift
		case hasOrder[d.model]:
			ranks[d] = highest + shift + 1
		}
		if !d.wildcard {
			last = max(last, ranks[d])
		}
	}
	for _, d := range l.deployments {
		if d.wildcard {
			ranks[d] += last
		}
	}
	return ranks
}

// levels returns how many priorities the model with the most has.
func (l *litellm) levels() int {
	ranks := l.ranks()
	most := 1
	seen := make(map[string]map[int]bool)
	for _, d := range l.deployments {
		if seen[d.model] == nil {
			seen[d.model] = make(map[int]bool)
		}
		seen[d.model][ranks[d]] = true
		most = max(most, len(seen[d.model]))
	}
	return most
}

// group returns the deployments of a name for clients.
func group(all []*deployment, model string) []*deployment {
	return slices.DeleteFunc(slices.Clone(all), func(d *deployment) bool { return d.wildcard || d.model != model })
}

// readSettings reads what is not about a single model.
func (l *litellm) readSettings(root *mapping) {
	router := l.mapping(root.take("router_settings"), "router_settings")
	lite := l.mapping(root.take("litellm_settings"), "litellm_settings")
	general := l.mapping(root.take("general_settings"), "general_settings")
	aliases := l.mapping(router.take("model_group_alias"), "model_group_alias")
	for _, alias := range aliases.left() {
		at, from, field := aliases.rest[alias].line, aliases, alias
		if n := aliases.rest[alias].value; resolved(n).Kind == yaml.MappingNode {
			from, field = l.mapping(n, "an alias"), "model"
		}
		model, _ := from.text(field)
		l.copyGroup(group(l.deployments, model), alias, at, 0)
	}
	l.readFallbacks(append(l.list(router.take("fallbacks"), "fallbacks"), l.list(lite.take("fallbacks"), "fallbacks")...))
	l.readRouting(&router, &lite)
	l.readMasterKey(&general)
	if at := root.rest["environment_variables"].line; root.take("environment_variables") != nil {
		l.note(at, "environment_variables: set in the environment of Caddy those that this file names")
	}
	for _, m := range []*mapping{&router, &lite, &general, root} {
		l.noteLeft(m)
	}
}

// copyGroup adds deployments under another name. An order above 0 replaces theirs.
func (l *litellm) copyGroup(group []*deployment, name string, at, order int, comments ...string) {
	if _, ok := directive.Word(name); !ok || strings.Contains(name, "*") || len(group) == 0 {
		l.note(at, "the name "+shown(name)+", or the model that it stands for, is not that of a backend here")
		return
	}
	for _, d := range group {
		c := *d
		c.line, c.copied, c.model, c.comments = at, true, name, append(slices.Clone(comments), d.comments...)
		if order > 0 {
			c.order, c.ordered = order, true
		}
		l.deployments = append(l.deployments, &c)
	}
}

// readFallbacks reads entries like {"gpt-4": ["gpt-4o"]}. The backends of gpt-4o then serve gpt-4, as the last ones.
func (l *litellm) readFallbacks(entries []*yaml.Node) {
	before := slices.Clone(l.deployments)
	for _, n := range entries {
		fallbacks := l.mapping(n, "an entry of fallbacks")
		for _, model := range fallbacks.left() {
			at, from := fallbacks.rest[model].line, group(before, model)
			for i, n := range l.list(fallbacks.take(model), "the fallbacks of a model") {
				if n = resolved(n); n.Kind != yaml.ScalarNode || len(from) == 0 {
					l.note(at, "the fallback of "+shown(model)+" is not from one model of a backend here to another")
					continue
				}
				l.copyGroup(group(before, n.Value), model, at, l.orderAfter(from), fmt.Sprintf("Fallback %d of %s.", i+1, model))
			}
		}
	}
}

// orderAfter gives each deployment of a group an order, and returns one that comes after all orders.
func (l *litellm) orderAfter(group []*deployment) int {
	last := 0
	for _, d := range group {
		last = max(last, d.order)
	}
	for _, d := range group {
		if !d.ordered {
			d.order, d.ordered = last+1, true
		}
	}
	for _, d := range l.deployments {
		last = max(last, d.order)
	}
	return last + 1
}

// readRouting reads how a backend is chosen, retried and benched.
func (l *litellm) readRouting(router, lite *mapping) {
	switch strategy, at := router.text("routing_strategy"); strategy {
	case "", "simple-shuffle":
	case "least-busy":
		l.option("lb_policy", "least_conn")
		l.unweighted = true
	case "latency-based-routing":
		l.option("lb_policy", "first_byte")
		l.note(at, "latency-based-routing: first_byte compares the time to the first byte of streams")
		l.unweighted = true
	default:
		l.note(at, "routing_strategy: there is none by use or cost; backends are chosen by priority and weight")
	}
	for _, o := range []struct {
		router, lite string
		options      []string
		least, most  float64
		unit         string
	}{
		{"num_retries", "num_retries", []string{"lb_retries"}, 0, 1000, ""},
		{"allowed_fails", "allowed_fails", []string{"max_fails"}, 0, 1000, ""},
		{"cooldown_time", "cooldown_time", []string{"fail_duration", "retry_after_default"}, 0.05, 300, "s"},
		{"timeout", "request_timeout", []string{"response_header_timeout"}, 0.001, longest, "s"},
		{"stream_timeout", "", []string{"stream_first_event_timeout"}, 0.001, longest, "s"},
	} {
		n, ok := l.number(router, o.router, o.least, o.most)
		if other, found := l.number(lite, o.lite, o.least, o.most); !ok {
			n, ok = other, found
		}
		if o.unit == "" {
			n = math.Trunc(n)
		}
		switch o.router {
		case "allowed_fails": // LiteLLM benches after more failures than these
			n++
		case "num_retries": // LiteLLM counts anew for each order and each fallback; here, each backend is tried once
			n = min((n+1)*float64(l.levels()), float64(len(l.deployments))) - 1
		}
		for _, option := range o.options {
			if ok {
				l.option(option, decimal(n)+o.unit)
			}
		}
	}
}

// readMasterKey makes a client key of the master key.
func (l *litellm) readMasterKey(general *mapping) {
	key, at := general.text("master_key")
	if key == "" {
		l.note(0, "there is no master_key: anyone who can reach this address can spend your budget; write a client_key for each caller")
		return
	}
	l.note(at, "limits of keys are in LiteLLM's database, with the virtual keys: write a client_key for each caller")
	placeholder, ok := variable(key)
	if !ok {
		placeholder = l.literal(key, "LITELLM_MASTER_KEY")
		l.options = append(l.options, fmt.Sprintf("# The key was on line %d: set the variable.", at))
	}
	l.options = append(l.options, "# A client key has 16 characters or more.")
	l.option("client_key", "litellm", placeholder)
}
