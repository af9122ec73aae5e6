package tools

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// readSettings reads what is not about a single model.
func (l *litellm) readSettings(root *mapping) {
	router := l.mapping(root.take("router_settings"), "router_settings")
	lite := l.mapping(root.take("litellm_settings"), "litellm_settings")
	general := l.mapping(root.take("general_settings"), "general_settings")
	aliases := l.mapping(router.take("model_group_alias"), "model_group_alias")
	for _, alias := range aliases.left() {
		at, from, field := aliases.rest[alias].line, aliases, alias
		n := aliases.rest[alias].value
		hasOptions := resolved(n).Kind == yaml.MappingNode
		if hasOptions {
			from, field = l.mapping(n, "an alias"), "model"
		}
		model, _ := from.text(field)
		if hasOptions {
			l.noteLeft(&from)
		}
		l.copyGroup(group(l.deployments, model), model, alias, at, 0)
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

// group returns the deployments of a name for clients.
func group(all []*deployment, model string) []*deployment {
	return slices.DeleteFunc(slices.Clone(all), func(d *deployment) bool { return d.wildcard || d.model != model })
}

// copyGroup adds the deployments of a model under another name. An order above
// 0 replaces theirs.
func (l *litellm) copyGroup(group []*deployment, model, name string, at, order int, comments ...string) {
	if _, ok := directive.Word(name); !ok || strings.Contains(name, "*") {
		l.note(at, "the name "+shown(name)+" cannot be that of a model here")
		return
	}
	if len(group) == 0 {
		l.note(at, "no backend here names the model "+shown(model)+", which "+shown(name)+" would use")
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

// readFallbacks reads entries like {"gpt-4": ["gpt-4o"]}. The backends of
// gpt-4o then serve gpt-4, as the last ones.
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
				l.copyGroup(group(before, n.Value), n.Value, model, at, l.orderAfter(from),
					fmt.Sprintf("Fallback %d of %s.", i+1, model))
			}
		}
	}
}

// orderAfter gives each deployment of a group an order, and returns one that
// comes after all orders.
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

// readRouting reads the options of routing, retries and cooldowns.
func (l *litellm) readRouting(router, lite *mapping) {
	switch strategy, at := router.text("routing_strategy"); strategy {
	case "", "simple-shuffle":
	case "least-busy":
		l.option("lb_policy", "least_conn")
		l.unweighted = true
	case "latency-based-routing":
		l.option("lb_policy", "least_conn")
		l.note(at, "latency-based-routing: least_conn prefers backends with fewer requests in flight, as fast ones have")
		l.unweighted = true
	default:
		l.note(at, "routing_strategy: there is none by use or cost; backends are chosen by priority and weight")
	}
	for _, o := range []struct {
		router, lite string
		option       string
		least, most  float64
		unit         string
	}{
		{"num_retries", "num_retries", "lb_retries", 0, 1000, ""},
		{"cooldown_time", "cooldown_time", "fail_duration", 0.05, 300, "s"},
		{"timeout", "request_timeout", "response_header_timeout", 0.001, longest, "s"},
		{"stream_timeout", "", "stream_first_event_timeout", 0.001, longest, "s"},
	} {
		n, ok := l.number(router, o.router, o.least, o.most)
		if other, found := l.number(lite, o.lite, o.least, o.most); !ok {
			n, ok = other, found
		}
		if o.unit == "" {
			n = math.Trunc(n)
		}
		// LiteLLM counts anew for each order and each fallback; here, each
		// backend is tried once
		if o.router == "num_retries" {
			n = min((n+1)*float64(l.levels()), float64(len(l.deployments))) - 1
		}
		if ok {
			l.option(o.option, decimal(n)+o.unit)
		}
	}
}

// readMasterKey makes a client key of the master key.
func (l *litellm) readMasterKey(general *mapping) {
	_, l.keysInDatabase = general.rest["database_url"]
	l.keysInDatabase = l.keysInDatabase || l.release != nil // both charts have a database
	key, at := general.text("master_key")
	if key == "" && l.release != nil {
		key = "os.environ/" + l.release.masterKey
	}
	if key == "" {
		l.note(0, "there is no master_key: anyone who can reach this address can spend your budget; write a client_key for each caller")
		return
	}
	l.note(at, hintOf("master_key"))
	placeholder, ok := variable(key)
	if !ok {
		placeholder = l.literal(key, "LITELLM_MASTER_KEY")
		l.options = append(l.options, fmt.Sprintf("# The key was on line %d: set the variable.", at))
	}
	l.options = append(l.options, "# A client key has 16 characters or more.")
	l.option("client_key", "litellm", placeholder)
}
