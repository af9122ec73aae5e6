package tools

import (
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// litellm reads the configuration of LiteLLM's proxy:
// https://docs.litellm.ai/docs/proxy/config_settings
type litellm struct {
	yamlReader
	*site
	// deployments are the entries of model_list that carry over.
	deployments []*deployment
	// credentials are those of credential_list, by their names.
	credentials map[string]*yaml.Node
	// unweighted reports whether the routing strategy ignores weights.
	unweighted bool
	// keysInDatabase reports whether LiteLLM has a database, with virtual keys.
	keysInDatabase bool
	// release is nil if the file is not the values of a chart.
	release *release
}

// LiteLLM makes a Caddyfile of a file of LiteLLM's proxy, or of the values of
// one of its charts.
func LiteLLM(text []byte) (string, error) {
	return importLiteLLM(text, func(l *litellm) (string, error) { return l.caddyfile(), nil })
}

// LiteLLMValues makes values of this module's chart instead.
func LiteLLMValues(text []byte) (string, error) { return importLiteLLM(text, (*litellm).values) }

// importLiteLLM reads a file, and writes what it says.
func importLiteLLM(text []byte, write func(*litellm) (string, error)) (string, error) {
	l := &litellm{site: newSite("LiteLLM", ":4000"), credentials: make(map[string]*yaml.Node)}
	for _, match := range environmentName.FindAllSubmatch(text, -1) {
		l.taken[string(match[1])] = true
	}
	root := l.readChart(l.file(text))
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
		l.fail(at, "expected model_list, or the values of LiteLLM's chart with proxy_config: models in LiteLLM's database are not read")
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
	return write(l)
}

// hints say what to do about settings that do not carry over. Each begins with
// their names.
var hints = []string{
	"finetune_settings, files_settings: these requests go to the same backends",
	"include: import the included files one by one",
	"rpm, tpm: only the shares of a model's deployments carry over, as weight; there is no limit, only the backend's own 429 counts",
	"input_cost_per_token, output_cost_per_token, input_cost_per_second, output_cost_per_second, cache_read_input_token_cost: nothing is chosen by price, and the access log has the tokens of each request",
	"max_budget, budget_duration, provider_budget_config: no budgets of money; a client_key can have limits of tokens",
	"tags, enable_tag_filtering: backends are not chosen by tags; write a site or a route with its own openai_lb for each tag",
	"access_groups, team_id: every client may use the model; name those of a caller in its block `caller`",
	"hidden: an alias is in the list of models",
	"guardrails, prompt_injection_params: contents are not checked",
	"custom_auth, enable_jwt_auth, litellm_jwtauth: client_key is the one way to authenticate callers here; put another one before openai_lb",
	"alerting, alerting_threshold, alert_types: alert on the metrics",
	"pass_through_endpoints: write a route with reverse_proxy",
	"enable_pre_call_checks, optional_pre_call_checks: a request goes to any backend of its model",
	"allowed_fails: one failure makes a backend a suspect",
	"retry_policy, model_group_retry_policy, allowed_fails_policy: the class of a reply decides, see docs/replies.md",
	"mock_response: use the simulator",
	"ssl_verify: set TLS in the transport of the block, see docs/options.md",
	"api_version: clients send their own, and requests for /v1 need none",
	"max_retries: lb_retries is for all backends",
	"cache, cache_params: replies are not cached",
	"callbacks, success_callback, failure_callback: use the access log, metrics and traces",
	"drop_params, modify_params: bodies are passed on unchanged",
	"redis_host, redis_port, redis_password, redis_url: replicas share state with the option state, or redis of the chart, see docs/replicas.md",
	"retry_after: the next backend is tried immediately",
	"timeout, stream_timeout: the time limits are those of all backends, response_header_timeout and stream_first_event_timeout",
	"context_window_fallbacks: a prompt that is too long goes to a backend that calls the model something else, if there is one",
	"content_policy_fallbacks: refused content is the client's error, and is not sent elsewhere",
	"default_fallbacks: a client gets the model that it asked for",
	"master_key, database_url: virtual keys are in LiteLLM's database: docs/migrate.md has the command that writes them for client_keys_file; limits and models of a key become a caller, and spend stays there",
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

// placeholderOf returns the placeholder of a text like os.environ/X, and
// nothing for any other text.
func placeholderOf(text string) string {
	placeholder, _ := variable(text)
	return placeholder
}
