package openailb

import (
	"cmp"
	"fmt"
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/state"
)

func init() {
	httpcaddyfile.RegisterDirective("openai_lb", parseRoute)
	httpcaddyfile.RegisterDirectiveOrder("openai_lb", httpcaddyfile.Before, "reverse_proxy")
}

// parseRoute parses the directive with its matcher. It rejects a matcher that
// leaves out all requests.
func parseRoute(helper httpcaddyfile.Helper) ([]httpcaddyfile.ConfigValue, error) {
	if !helper.Next() {
		return nil, helper.ArgErr()
	}
	if path := helper.Dispenser.RemainingArgs(); len(path) > 0 {
		if err := checkMatcher(path[0]); err != nil {
			return nil, helper.WrapErr(err)
		}
	}
	helper.Reset()
	helper.Next()
	matchers, err := helper.ExtractMatcherSet()
	if err != nil {
		return nil, err
	}
	h, err := parseCaddyfile(helper)
	if err != nil {
		return nil, err
	}
	return helper.NewRoute(matchers, h), nil
}

// checkMatcher returns an error if a path matcher matches only the beginning of
// the API's paths, and so no operation.
func checkMatcher(path string) error {
	if !strings.HasPrefix(path, "/") || strings.Contains(path, "*") {
		return nil
	}
	switch operation := openaiapi.ParsePath(path).Operation; strings.TrimSuffix(operation, "/") {
	case "", "/openai", "/openai/deployments":
		return fmt.Errorf("openai_lb %s matches this path alone, and no request of the API: expected %s/*",
			path, strings.TrimSuffix(path, "/"))
	}
	return nil
}

func parseCaddyfile(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h := new(Handler)
	if err := h.UnmarshalCaddyfile(helper.Dispenser); err != nil {
		return nil, err
	}
	h.Pool = pools.NameInFile(helper.State, h.Pool, defaultPool)
	if err := pools.ClaimInFile(helper.State, cmp.Or(h.Pool, defaultPool), h); err != nil {
		helper.Reset()
		helper.Next()
		return nil, helper.WrapErr(err)
	}
	h.rememberPlaces(helper)
	return h, nil
}

// insteadOfProxy names the replacements for a block of reverse_proxy options.
const insteadOfProxy = "'transport http' has the options of connections, 'header' in a backend replaces header_up, " +
	"Caddy's directives 'header' and 'intercept' replace header_down and handle_response, " +
	"and 'health_uri' in a backend replaces active health checks"

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. The comment of
// each option has its syntax, and docs/options.md has all of it. Every option
// but backend, header, model, client_key, caller, tier, and the requests and
// tokens of a caller or a tier may be given once.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	var written keys.WrittenKeys
	embedded := []directive.Options{
		h.PassiveHealth.Directives(), h.Options.Directives(), h.WebSocketOptions.Directives(), h.callerOptions(),
	}
	err := directive.Unmarshal(d, append(embedded, directive.Options{
		"pool":    directive.String(&h.Pool),
		"backend": backend.Directive(&h.Backends),
		"backends_from_env": directive.Func(func(d *caddyfile.Dispenser) error {
			h.BackendsFromEnv = backend.DefaultPrefix
			if d.NextArg() {
				h.BackendsFromEnv = d.Val()
			}
			return nil
		}).Check(func() error { return backend.CheckPrefix(h.BackendsFromEnv) }),
		"affinity": directive.Func(func(d *caddyfile.Dispenser) error {
			h.Affinity = new(affinity.Options)
			return h.Affinity.UnmarshalCaddyfile(d)
		}),
		"ratelimit_headers": directive.OneOf(&h.RatelimitHeaders, rateLimitsOf...),
		"ready_path":        directive.String(&h.ReadyPath).Check(func() error { return checkReadyPath(h.ReadyPath) }),
		"lb_policy":         pools.PolicyOption(&h.LBPolicyRaw),
		"lb_retries":        directive.IntPointer(&h.LBRetries, maxInt),
		"lb_try_duration":   directive.Duration(&h.LBTryDuration),
		"fair_shares":       directive.Flag(&h.FairShares),
		"wait":              directive.Args("a duration", 1, 1, func(args []string) error { return setWait(&h.Wait, args) }),
		"client_key": directive.Args("a name and a key", 2, 2, func(args []string) error {
			h.ClientKeys = append(h.ClientKeys, ClientKey{Name: args[0], Key: args[1]})
			return written.Add(keys.ClientKey{Name: args[0], Key: args[1]})
		}).Repeatable(),
		"client_keys_file": directive.TextPointer(&h.ClientKeysFile),
		"caller_identity":  h.TokenOption.Directive(),
		"state":            directive.Module[state.Engine](&h.StateRaw, "http.openai_lb.state", "engine"),
		"transport": directive.Module[http.RoundTripper](&h.TransportRaw, "http.reverse_proxy.transport",
			"protocol").Check(func() error {
			_, err := attempt.DecodeTransport(h.TransportRaw)
			return err
		}),
		"reverse_proxy": directive.Refused(insteadOfProxy),
	}.Check(func() error {
		return h.checkNamed()
	}))...)
	if err != nil {
		return err
	}
	if len(h.Backends) == 0 && h.BackendsFromEnv == "" {
		return d.Err("no backend: expected at least one 'backend <url>' in openai_lb, or backends_from_env")
	}
	return nil
}

func (h *Handler) callerOptions() directive.Options {
	module := seam.Callers()
	return module.Directives(&h.Config).Check(func() error {
		var backends []seam.NamedBackend
		if h.BackendsFromEnv == "" {
			backends = backendsForCallers(h.Backends)
		}
		return module.Check(&h.Config, h.namesCallers(), backends)
	})
}

// hasPlaceholder reports whether a value contains a placeholder, so that it is
// known only at load.
func hasPlaceholder(value string) bool { return strings.Contains(value, "{") }

// maxInt is the highest number that an option allows.
const maxInt = directive.MaxInt

// Interface guards
var _ caddyfile.Unmarshaler = (*Handler)(nil)
