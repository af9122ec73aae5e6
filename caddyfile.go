package openailb

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/acaenv"
	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/state"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("openai_lb", parseCaddyfile)
	httpcaddyfile.RegisterDirectiveOrder("openai_lb", httpcaddyfile.Before, "reverse_proxy")
}

func parseCaddyfile(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h := new(Handler)
	if err := h.UnmarshalCaddyfile(helper.Dispenser); err != nil {
		return nil, err
	}
	if h.ReverseProxy != nil {
		if err := h.ReverseProxy.FinalizeUnmarshalCaddyfile(helper); err != nil {
			return nil, err
		}
	}
	h.Pool = pools.NameInFile(helper.State, h.Pool, defaultPool)
	return h, nil
}

// defaultPool is the name of a pool without one.
const defaultPool = "openai_lb"

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	openai_lb [<matcher>] {
//	    pool <name>
//
//	    backend <url> {
//	        name         <name>
//	        priority     <n>
//	        weight       <n>
//	        api_key      <key>
//	        auth         api_key|bearer|passthrough|none|<module> [{...}]
//	        header       <name> <value>
//	        deployment   <name>
//	        model        <name> [<deployment>]
//	        max_requests <n>
//	        stream_usage off
//	        trace_context
//	        account      <name>
//	    }
//	    backends_from_env [<prefix>]
//
//	    ready_path <path>
//
//	    lb_policy       <name> [<args...>]
//	    lb_retries      <n>
//	    lb_try_duration <duration>
//
//	    affinity {
//	        ids            <n>
//	        ids_ttl        <duration>
//	        lookup_timeout <duration>
//	        save
//	        callers        strict
//	        prompt_cache   [<header...>]
//	    }
//
//	    unhealthy_status    <code...>
//	    fail_duration       <duration>
//	    max_fails           <n>
//	    retry_after_default <duration>
//	    retry_after_min     <duration>
//	    retry_after_max     <duration>
//	    all_throttled       respond|forward
//
//	    request_buffers            <size>
//	    response_header_timeout    <duration>
//	    handshake_timeout          <duration>
//	    stream_first_event_timeout <duration>
//	    stream_idle_timeout        <duration>
//	    stream_require_end
//	    stream_usage
//
//	    client_key       <name> <key>
//	    client_keys_file <path>
//
//	    state <engine> [{...}]
//
//	    reverse_proxy {
//	        <options of reverse_proxy...>
//	    }
//	}
//
// Every option but backend, header, model and client_key may be given once.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	err := directive.Unmarshal(d, h.PassiveHealth.options(), h.Options.Directives(), directive.Options{
		"pool": directive.String(&h.Pool),
		"backend": directive.Func(func(d *caddyfile.Dispenser) error {
			b, begin := new(Backend), *d
			h.Backends = append(h.Backends, b)
			err := b.unmarshalCaddyfile(d)
			if err == nil && b.Name != "" && slices.ContainsFunc(h.Backends[:len(h.Backends)-1], func(other *Backend) bool { return other.Name == b.Name }) {
				err = begin.WrapErr(errTakenName)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", b.label(len(h.Backends)-1), err)
			}
			return nil
		}).Repeatable(),
		"backends_from_env": directive.Func(func(d *caddyfile.Dispenser) error {
			h.BackendsFromEnv = acaenv.DefaultPrefix
			if d.NextArg() {
				h.BackendsFromEnv = d.Val()
			}
			return nil
		}).Check(func() error { return acaenv.CheckPrefix(h.BackendsFromEnv) }),
		"affinity": directive.Func(func(d *caddyfile.Dispenser) error {
			h.Affinity = new(affinity.Options)
			return h.Affinity.UnmarshalCaddyfile(d)
		}),
		"ready_path":       directive.String(&h.ReadyPath).Check(func() error { return checkReadyPath(h.ReadyPath) }),
		"lb_policy":        policyOption(&h.LBPolicyRaw),
		"lb_retries":       directive.IntPointer(&h.LBRetries, maxInt),
		"lb_try_duration":  directive.Duration(&h.LBTryDuration),
		"stream_usage":     directive.Flag(&h.StreamUsage),
		"client_key":       directive.Args("a name and a key", 2, 2, h.addClientKey).Repeatable(),
		"client_keys_file": directive.StringPointer(&h.ClientKeysFile),
		"state":            directive.Module[state.Engine](&h.StateRaw, "http.openai_lb.state", "engine"),
		"reverse_proxy": directive.Func(func(d *caddyfile.Dispenser) error {
			h.ReverseProxy = new(reverseproxy.Handler)
			return h.ReverseProxy.UnmarshalCaddyfile(d.NewFromNextSegment())
		}).Check(func() error { return refuseOwnOptions(h.ReverseProxy) }),
	}.Check(func() error { return h.checkAffinity(h.StateRaw != nil) }))
	if err != nil {
		return err
	}
	if len(h.Backends) == 0 && h.BackendsFromEnv == "" {
		return d.Err("no backend: expected at least one 'backend <url>' in openai_lb, or backends_from_env")
	}
	return nil
}

func (h *Handler) addClientKey(args []string) error {
	h.ClientKeys = append(h.ClientKeys, ClientKey{Name: args[0], Key: args[1]})
	if hasPlaceholder(args[1]) {
		return nil
	}
	return keys.ClientKey{Name: args[0], Key: args[1]}.Check()
}

// hasPlaceholder reports whether a value is known only at load.
func hasPlaceholder(value string) bool { return strings.Contains(value, "{") }

// unmarshalCaddyfile reads the URL of a backend and its block.
func (b *Backend) unmarshalCaddyfile(d *caddyfile.Dispenser) error {
	if err := directive.Argument(d, &b.URL); err != nil {
		return err
	}
	// What has placeholders is checked when they are resolved, at load.
	if !hasPlaceholder(b.URL) {
		var err error
		if b.url, err = openaiapi.ParseBaseURL(b.URL); err != nil {
			return d.WrapErr(err)
		}
	}
	return directive.Block(d, directive.Options{
		"name":         directive.String(&b.Name),
		"priority":     directive.Int(&b.Priority, 1, maxInt),
		"weight":       directive.IntPointer(&b.Weight, maxWeight),
		"api_key":      directive.Secret(&b.APIKey).Check(b.checkKey),
		"auth":         directive.Func(b.unmarshalAuth),
		"header":       directive.Args("a name and a value", 2, 2, b.addHeader).Repeatable(),
		"deployment":   directive.String(&b.Deployment),
		"model":        directive.Args("a name and an optional deployment", 1, 2, b.addModel).Repeatable(),
		"max_requests": directive.Int(&b.MaxRequests, 1, maxInt),
		"stream_usage": directive.Off(&b.StreamUsage),
		"account":      directive.String(&b.Account),

		"trace_context": directive.Flag(&b.TraceContext),
	}.Check(b.checkTogether))
}

// checkKey checks a key that is in the Caddyfile itself.
func (b *Backend) checkKey() error {
	if hasPlaceholder(b.APIKey) {
		return nil
	}
	if _, err := keys.ResolveKey(b.APIKey); err != nil {
		return fmt.Errorf("api_key: %w", err)
	}
	return nil
}

// checkTogether checks options that depend on each other.
func (b *Backend) checkTogether() error {
	if b.url == nil {
		return nil
	}
	return b.authConfig().Check()
}

func (b *Backend) addHeader(args []string) error {
	if b.Header == nil {
		b.Header = make(http.Header)
	}
	b.Header.Add(args[0], args[1])
	if hasPlaceholder(args[1]) {
		return checkHeader(args[0], "")
	}
	return checkHeader(args[0], args[1])
}

func (b *Backend) addModel(args []string) error {
	m := Model{Name: args[0]}
	if len(args) == 2 {
		m.Deployment = args[1]
	}
	if slices.ContainsFunc(b.Model, func(other Model) bool { return other.Name == m.Name }) {
		return fmt.Errorf("model '%s' is given twice", m.Name)
	}
	b.Model = append(b.Model, m)
	return m.check()
}

// unmarshalAuth reads a scheme. A scheme that is a module has options.
func (b *Backend) unmarshalAuth(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.Errf("auth requires an argument: expected one of %s", strings.Join(keys.Schemes(), ", "))
	}
	b.Auth = d.Val()
	if err := keys.CheckScheme(b.Auth); err != nil {
		return d.WrapErr(err)
	}
	if !keys.IsModule(b.Auth) {
		if spare := len(d.RemainingArgs()); spare > 0 {
			return d.Errf("auth %s does not take another argument, and has %d", b.Auth, spare) // one may be a key
		}
		return nil
	}
	module, err := caddyfile.UnmarshalModule(d, keys.SourceNamespace+"."+b.Auth)
	if err != nil {
		return err
	}
	if options := caddyconfig.JSON(module, nil); string(options) != "{}" {
		b.AuthOptions = options
	}
	return nil
}

// UnmarshalCaddyfile sets up the transport from Caddyfile tokens. Syntax:
//
//	transport openai_lb {
//	    unhealthy_status    <code...>
//	    fail_duration       <duration>
//	    max_fails           <n>
//	    retry_after_default <duration>
//	    retry_after_min     <duration>
//	    retry_after_max     <duration>
//	    all_throttled       respond|forward
//
//	    request_buffers            <size>
//	    response_header_timeout    <duration>
//	    handshake_timeout          <duration>
//	    stream_first_event_timeout <duration>
//	    stream_idle_timeout        <duration>
//	    stream_require_end
//
//	    http {
//	        <options of the http transport...>
//	    }
//	}
func (t *Transport) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, t.PassiveHealth.options(), t.Options.Directives(), directive.Options{
		"http": directive.Func(func(d *caddyfile.Dispenser) error {
			t.HTTP = new(reverseproxy.HTTPTransport)
			return t.HTTP.UnmarshalCaddyfile(d.NewFromNextSegment())
		}),
	})
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	lb_policy openai_lb {
//	    pool <name>
//	    upstream <dial> {
//	        priority <n>
//	        weight   <n>
//	    }
//	    lb_policy <name> [<args...>]
//	}
func (s *Selection) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{
		"pool": directive.String(&s.Pool),
		"upstream": directive.Func(func(d *caddyfile.Dispenser) error {
			var u SelectionUpstream
			if err := directive.Argument(d, &u.Dial); err != nil {
				return err
			}
			err := directive.Block(d, directive.Options{
				"priority": directive.Int(&u.Priority, 1, maxInt),
				"weight":   directive.IntPointer(&u.Weight, maxWeight),
			})
			s.Upstreams = append(s.Upstreams, u)
			return err
		}).Repeatable(),
		"lb_policy": policyOption(&s.LBPolicyRaw),
	})
}

// options are the options of passive health in a Caddyfile.
func (p *PassiveHealth) options() directive.Options {
	return directive.Options{
		"unhealthy_status":    directive.Args("at least one status", 1, maxInt, p.addUnhealthyStatus),
		"fail_duration":       directive.Duration(&p.FailDuration),
		"max_fails":           directive.Int(&p.MaxFails, 1, maxInt),
		"retry_after_default": directive.Duration(&p.RetryAfterDefault),
		"retry_after_min":     directive.Duration(&p.RetryAfterMin),
		"retry_after_max":     directive.Duration(&p.RetryAfterMax),
		"all_throttled":       directive.OneOf(&p.AllThrottled, respondThrottled, forwardThrottled),
	}.Check(func() error {
		checked := *p
		return checked.provision()
	})
}

func (p *PassiveHealth) addUnhealthyStatus(args []string) error {
	for _, arg := range args {
		status, err := parseStatus(arg)
		if err != nil {
			return fmt.Errorf("unhealthy_status %w", err)
		}
		p.UnhealthyStatus = append(p.UnhealthyStatus, status)
	}
	return nil
}

// maxInt is the highest number that an option allows.
const maxInt = directive.MaxInt
