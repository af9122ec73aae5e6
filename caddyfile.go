package openailb

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/dustin/go-humanize"
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
	return h, nil
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	openai_lb [<matcher>] {
//	    backend <url> {
//	        name         <name>
//	        priority     <n>
//	        weight       <n>
//	        api_key      <key>
//	        auth         api_key|bearer|passthrough|none
//	        header       <name> <value>
//	        deployment   <name>
//	        model        <name> [<deployment>]
//	        max_requests <n>
//	    }
//
//	    lb_policy       <name> [<args...>]
//	    lb_retries      <n>
//	    lb_try_duration <duration>
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
//	    stream_first_event_timeout <duration>
//	    stream_idle_timeout        <duration>
//	    stream_require_end
//
//	    reverse_proxy {
//	        <options of reverse_proxy...>
//	    }
//	}
//
// Every option but backend, header and model may be given once.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the directive's name
	if d.NextArg() {
		return d.Errf("openai_lb takes no argument but a matcher: unexpected '%s'", d.Val())
	}
	err := parseBlock(d, h.Failover.options(), options{
		"backend": repeatable(func(d *caddyfile.Dispenser) error {
			b, err := parseBackend(d)
			h.Backends = append(h.Backends, b)
			return err
		}),
		"lb_policy": once(func(d *caddyfile.Dispenser) error {
			return parsePolicy(d, &h.LBPolicyRaw)
		}),
		"lb_retries": once(func(d *caddyfile.Dispenser) error {
			h.LBRetries = new(int)
			return parseInt(d, h.LBRetries, 0, maxInt)
		}),
		"lb_try_duration": once(func(d *caddyfile.Dispenser) error {
			return parseDuration(d, &h.LBTryDuration)
		}),
		"reverse_proxy": once(func(d *caddyfile.Dispenser) error {
			h.ReverseProxy = new(reverseproxy.Handler)
			if err := h.ReverseProxy.UnmarshalCaddyfile(d.NewFromNextSegment()); err != nil {
				return err
			}
			if err := refuseOwnOptions(h.ReverseProxy); err != nil {
				return d.WrapErr(err)
			}
			return nil
		}),
	})
	if err != nil {
		return err
	}
	if len(h.Backends) == 0 {
		return d.Err("no backend: expected at least one 'backend <url>' in openai_lb")
	}
	return nil
}

// parseBackend reads one backend line and its block.
func parseBackend(d *caddyfile.Dispenser) (*Backend, error) {
	b := new(Backend)
	if err := parseString(d, &b.URL); err != nil {
		return b, err
	}
	// a placeholder is resolved, and then checked, where Caddy runs
	if !strings.Contains(b.URL, "{") {
		if _, err := parseBackendURL(b.URL); err != nil {
			return b, d.WrapErr(err)
		}
	}
	err := parseBlock(d, options{
		"name":     once(func(d *caddyfile.Dispenser) error { return parseString(d, &b.Name) }),
		"priority": once(func(d *caddyfile.Dispenser) error { return parseInt(d, &b.Priority, 1, maxInt) }),
		"weight": once(func(d *caddyfile.Dispenser) error {
			b.Weight = new(int)
			return parseInt(d, b.Weight, 0, maxWeight)
		}),
		"api_key": once(func(d *caddyfile.Dispenser) error { return parseSecret(d, &b.APIKey) }),
		"auth":    once(func(d *caddyfile.Dispenser) error { return parseWord(d, &b.Auth, authSchemes...) }),
		"header": repeatable(func(d *caddyfile.Dispenser) error {
			args := d.RemainingArgs()
			if len(args) != 2 {
				return d.Errf("header takes a name and a value, got %d arguments", len(args))
			}
			if b.Header == nil {
				b.Header = make(http.Header)
			}
			b.Header.Add(args[0], args[1])
			return nil
		}),
		"model": repeatable(func(d *caddyfile.Dispenser) error {
			args := d.RemainingArgs()
			if len(args) != 1 && len(args) != 2 {
				return d.Errf("model takes a name and, if need be, a deployment, got %d arguments", len(args))
			}
			m := Model{Name: args[0]}
			if len(args) == 2 {
				m.Deployment = args[1]
			}
			if slices.ContainsFunc(b.Model, func(other Model) bool { return other.Name == m.Name }) {
				return d.Errf("model '%s' is given twice", m.Name)
			}
			b.Model = append(b.Model, m)
			return nil
		}),
		"deployment":   once(func(d *caddyfile.Dispenser) error { return parseString(d, &b.Deployment) }),
		"max_requests": once(func(d *caddyfile.Dispenser) error { return parseInt(d, &b.MaxRequests, 1, maxInt) }),
	})
	return b, err
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
//	    stream_first_event_timeout <duration>
//	    stream_idle_timeout        <duration>
//	    stream_require_end
//	    stream_first_event_timeout <duration>
//	    stream_idle_timeout     <duration>
//	    stream_require_end
//
//	    http {
//	        <options of the http transport...>
//	    }
//	}
func (t *Transport) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the transport's name
	if d.NextArg() {
		return d.Errf("transport openai_lb takes no argument: unexpected '%s'", d.Val())
	}
	return parseBlock(d, t.Failover.options(), options{
		"http": once(func(d *caddyfile.Dispenser) error {
			t.HTTP = new(reverseproxy.HTTPTransport)
			return t.HTTP.UnmarshalCaddyfile(d.NewFromNextSegment())
		}),
	})
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	lb_policy openai_lb {
//	    upstream <dial> {
//	        priority <n>
//	        weight   <n>
//	    }
//	    lb_policy <name> [<args...>]
//	}
func (s *Selection) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the policy's name
	if d.NextArg() {
		return d.Errf("lb_policy openai_lb takes no argument: unexpected '%s'", d.Val())
	}
	return parseBlock(d, options{
		"upstream": repeatable(func(d *caddyfile.Dispenser) error {
			var u SelectionUpstream
			if err := parseString(d, &u.Dial); err != nil {
				return err
			}
			err := parseBlock(d, options{
				"priority": once(func(d *caddyfile.Dispenser) error { return parseInt(d, &u.Priority, 1, maxInt) }),
				"weight": once(func(d *caddyfile.Dispenser) error {
					u.Weight = new(int)
					return parseInt(d, u.Weight, 0, maxWeight)
				}),
			})
			s.Upstreams = append(s.Upstreams, u)
			return err
		}),
		"lb_policy": once(func(d *caddyfile.Dispenser) error { return parsePolicy(d, &s.LBPolicyRaw) }),
	})
}

// options are the options of f's Caddyfile form.
func (f *Failover) options() options {
	return options{
		"unhealthy_status": once(func(d *caddyfile.Dispenser) error {
			words := d.RemainingArgs()
			if len(words) == 0 {
				return d.Err("unhealthy_status: expected at least one status")
			}
			for _, word := range words {
				status, err := parseStatus(word)
				if err != nil {
					return d.Errf("unhealthy_status %v", err)
				}
				f.UnhealthyStatus = append(f.UnhealthyStatus, status)
			}
			return nil
		}),
		"fail_duration":       once(func(d *caddyfile.Dispenser) error { return parseDuration(d, &f.FailDuration) }),
		"max_fails":           once(func(d *caddyfile.Dispenser) error { return parseInt(d, &f.MaxFails, 1, maxInt) }),
		"retry_after_default": once(func(d *caddyfile.Dispenser) error { return parseDuration(d, &f.RetryAfterDefault) }),
		"retry_after_min":     once(func(d *caddyfile.Dispenser) error { return parseDuration(d, &f.RetryAfterMin) }),
		"retry_after_max":     once(func(d *caddyfile.Dispenser) error { return parseDuration(d, &f.RetryAfterMax) }),
		"all_throttled": once(func(d *caddyfile.Dispenser) error {
			return parseWord(d, &f.AllThrottled, respondThrottled, forwardThrottled)
		}),
		"request_buffers":            once(func(d *caddyfile.Dispenser) error { return parseSize(d, &f.RequestBuffers) }),
		"response_header_timeout":    once(func(d *caddyfile.Dispenser) error { return parseDuration(d, &f.ResponseHeaderTimeout) }),
		"stream_first_event_timeout": once(func(d *caddyfile.Dispenser) error { return parseDuration(d, &f.StreamFirstEventTimeout) }),
		"stream_idle_timeout":        once(func(d *caddyfile.Dispenser) error { return parseDuration(d, &f.StreamIdleTimeout) }),
		"stream_require_end": once(func(d *caddyfile.Dispenser) error {
			f.StreamRequireEnd = true
			if d.NextArg() {
				return d.Errf("stream_require_end takes no argument: unexpected '%s'", d.Val())
			}
			return nil
		}),
	}
}

// option reads what follows a word in a block.
type option struct {
	parse      func(*caddyfile.Dispenser) error
	repeatable bool
}

type options map[string]option

func once(parse func(*caddyfile.Dispenser) error) option { return option{parse: parse} }

func repeatable(parse func(*caddyfile.Dispenser) error) option {
	return option{parse: parse, repeatable: true}
}

// parseBlock reads a block of options, if there is one. It refuses words it
// does not know and options given twice.
func parseBlock(d *caddyfile.Dispenser, known ...options) error {
	all := make(options)
	for _, some := range known {
		for word, o := range some {
			all[word] = o
		}
	}
	seen := make(map[string]bool)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		word := d.Val()
		o, ok := all[word]
		if !ok {
			words := make([]string, 0, len(all))
			for w := range all {
				words = append(words, w)
			}
			slices.Sort(words)
			return d.Errf("unrecognized option '%s': expected one of %s", word, strings.Join(words, ", "))
		}
		if seen[word] && !o.repeatable {
			return d.Errf("%s is given twice", word)
		}
		seen[word] = true
		if err := o.parse(d); err != nil {
			return err
		}
	}
	return nil
}

// parseString reads the one argument of an option.
func parseString(d *caddyfile.Dispenser, into *string) error {
	word := d.Val()
	if args := d.RemainingArgs(); len(args) == 1 {
		*into = args[0]
		return nil
	} else if len(args) > 1 {
		return d.Errf("%s takes one argument: unexpected '%s'", word, args[1])
	}
	return d.Errf("%s takes an argument, and has none", word)
}

// parseSecret is parseString without a word of what it read in its errors.
func parseSecret(d *caddyfile.Dispenser, into *string) error {
	word := d.Val()
	args := d.RemainingArgs()
	if len(args) != 1 {
		return d.Errf("%s takes one argument, and has %d", word, len(args))
	}
	*into = args[0]
	return nil
}

// parseWord reads one of the words that are allowed.
func parseWord(d *caddyfile.Dispenser, into *string, allowed ...string) error {
	option := d.Val()
	if err := parseString(d, into); err != nil {
		return err
	}
	if !slices.Contains(allowed, *into) {
		return d.Errf("%s '%s': expected one of %s", option, *into, strings.Join(allowed, ", "))
	}
	return nil
}

const maxInt = 1<<31 - 1

// parseInt reads a whole number from lowest to highest.
func parseInt(d *caddyfile.Dispenser, into *int, lowest, highest int) error {
	var word string
	option := d.Val()
	if err := parseString(d, &word); err != nil {
		return err
	}
	n, err := strconv.Atoi(word)
	if err != nil || n < lowest || n > highest {
		allowed := fmt.Sprintf("from %d to %d", lowest, highest)
		if highest == maxInt {
			allowed = fmt.Sprintf("of %d or more", lowest)
		}
		return d.Errf("%s '%s': expected a whole number %s", option, word, allowed)
	}
	*into = n
	return nil
}

func parseDuration(d *caddyfile.Dispenser, into *caddy.Duration) error {
	var word string
	option := d.Val()
	if err := parseString(d, &word); err != nil {
		return err
	}
	duration, err := caddy.ParseDuration(word)
	if err != nil || duration <= 0 {
		return d.Errf("%s '%s': expected a duration above 0, like 500ms, 10s or 2m", option, word)
	}
	*into = caddy.Duration(duration)
	return nil
}

func parseSize(d *caddyfile.Dispenser, into *int64) error {
	var word string
	option := d.Val()
	if err := parseString(d, &word); err != nil {
		return err
	}
	size, err := humanize.ParseBytes(word)
	if err != nil || size == 0 || size > maxInt {
		return d.Errf("%s '%s': expected a size from 1B to 2GiB, like 512KiB or 32MiB", option, word)
	}
	*into = int64(size)
	return nil
}

// parsePolicy reads a selection policy of reverse_proxy's.
func parsePolicy(d *caddyfile.Dispenser, into *json.RawMessage) error {
	if !d.NextArg() {
		return d.Err("lb_policy takes the name of a selection policy, and has none")
	}
	name := d.Val()
	module, err := caddyfile.UnmarshalModule(d, "http.reverse_proxy.selection_policies."+name)
	if err != nil {
		return err
	}
	policy, ok := module.(reverseproxy.Selector)
	if !ok || name == "openai_lb" {
		return d.Errf("lb_policy '%s': expected a selection policy of reverse_proxy's", name)
	}
	*into = caddyconfig.JSONModuleObject(policy, "policy", name, nil)
	return nil
}
