package openailb

import (
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
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
//	        auth         api_key|bearer|passthrough|none|<module> [{...}]
//	        header       <name> <value>
//	        deployment   <name>
//	        model        <name> [<deployment>]
//	        max_requests <n>
//	    }
//	    backends_from_env [<prefix>]
//
//	    ready_path <path>
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
//	    client_key       <name> <key>
//	    client_keys_file <path>
//
//	    reverse_proxy {
//	        <options of reverse_proxy...>
//	    }
//	}
//
// Every option but backend, header, model and client_key may be given once.
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
		"backends_from_env": once(func(d *caddyfile.Dispenser) error { return parseEnvPrefix(d, &h.BackendsFromEnv) }),
		"ready_path": once(func(d *caddyfile.Dispenser) error {
			if err := parseString(d, &h.ReadyPath); err != nil {
				return err
			}
			return wrap(d, checkReadyPath(h.ReadyPath))
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
		"client_key": repeatable(func(d *caddyfile.Dispenser) error {
			args := d.RemainingArgs()
			if len(args) != 2 {
				return d.Errf("client_key takes a name and a key, got %d arguments", len(args))
			}
			h.ClientKeys = append(h.ClientKeys, ClientKey{Name: args[0], Key: args[1]})
			return nil
		}),
		"client_keys_file": once(func(d *caddyfile.Dispenser) error { return parseString(d, &h.ClientKeysFile) }),
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
	if len(h.Backends) == 0 && h.BackendsFromEnv == "" {
		return d.Err("no backend: expected at least one 'backend <url>' in openai_lb, or backends_from_env")
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
		"auth":    once(func(d *caddyfile.Dispenser) error { return parseAuth(d, b) }),
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

// parseEnvPrefix reads what the names of variables begin with.
func parseEnvPrefix(d *caddyfile.Dispenser, into *string) error {
	*into = defaultEnvPrefix
	if d.NextArg() {
		*into = d.Val()
	}
	if d.NextArg() {
		return d.Errf("backends_from_env takes one argument at most: unexpected '%s'", d.Val())
	}
	return wrap(d, checkEnvPrefix(*into))
}

// wrap adds to an error, if there is one, where it is.
func wrap(d *caddyfile.Dispenser, err error) error {
	if err == nil {
		return nil
	}
	return d.WrapErr(err)
}

// parseAuth reads a scheme, and the options of the module that it may be.
func parseAuth(d *caddyfile.Dispenser, b *Backend) error {
	if !d.NextArg() {
		return d.Errf("auth takes an argument, and has none: expected one of %s", strings.Join(authSchemes(), ", "))
	}
	b.Auth = d.Val()
	if err := checkAuth(b.Auth); err != nil {
		return d.WrapErr(err)
	}
	if slices.Contains(builtInSchemes, b.Auth) {
		if spare := len(d.RemainingArgs()); spare > 0 {
			return d.Errf("auth %s takes no further argument, and has %d", b.Auth, spare) // one may be a key
		}
		return nil
	}
	module, err := caddyfile.UnmarshalModule(d, credentialsNamespace+"."+b.Auth)
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
//	    stream_first_event_timeout <duration>
//	    stream_idle_timeout        <duration>
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
