package backend

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Directive returns the option backend of a Caddyfile. It may be given once for
// each backend.
func Directive(backends *[]*Backend) directive.Option {
	return directive.Func(func(d *caddyfile.Dispenser) error {
		b, begin := new(Backend), *d
		err := b.unmarshalCaddyfile(d)
		if err == nil && b.Name != "" &&
			slices.ContainsFunc(*backends, func(other *Backend) bool { return other.Name == b.Name }) {
			err = begin.WrapErr(errTakenName)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", b.label(len(*backends)), err)
		}
		*backends = append(*backends, b)
		return nil
	}).Repeatable()
}

// hasPlaceholder reports whether a value is known only at load.
func hasPlaceholder(value string) bool { return strings.Contains(value, "{") }

func (b *Backend) unmarshalCaddyfile(d *caddyfile.Dispenser) error {
	if err := directive.Argument(d, &b.URL); err != nil {
		return err
	}
	// The values of placeholders are checked when they are resolved, at load.
	if err := directive.CheckPlaceholders(b.URL); err != nil {
		return d.Errf("url: %w", err)
	}
	if !hasPlaceholder(b.URL) {
		var err error
		if b.Origin, err = openaiapi.ParseBaseURL(b.URL); err != nil {
			return d.WrapErr(err)
		}
	}
	return directive.Block(d, directive.Options{
		"name":         directive.Text(&b.Name),
		"priority":     directive.Int(&b.Priority, 1, directive.MaxInt),
		"weight":       directive.IntPointer(&b.Weight, MaxWeight),
		"api_key":      directive.Secret(&b.APIKey).Check(b.checkKey),
		"auth":         directive.Func(b.unmarshalAuth),
		"header":       directive.Args("a name and a value, or - and a name", 1, 2, b.addHeader).Repeatable(),
		"deployment":   directive.Text(&b.Deployment),
		"model":        directive.Args("a name and an optional deployment", 1, 2, b.addModel(make(map[string]bool))).Repeatable(),
		"max_requests": directive.Int(&b.MaxRequests, 1, directive.MaxInt),
		"requests":     b.quotaOption(&b.Requests),
		"tokens":       b.quotaOption(&b.Tokens),
		"stream_usage": directive.Off(&b.StreamUsage),
		"account":      directive.Text(&b.Account),
		"service_tier": directive.Text(&b.ServiceTier),

		"shared_limits": directive.Flag(&b.SharedLimits),
		"trace_context": directive.Flag(&b.TraceContext),

		"health_uri":      directive.Text(&b.HealthURI),
		"health_interval": directive.Duration(&b.HealthInterval),
		"health_status":   directive.Status(&b.HealthStatus),
	}.Check(b.checkTogether))
}

func (b *Backend) checkKey() error {
	if err := keys.CheckWritten(b.APIKey); err != nil {
		return fmt.Errorf("api_key: %w", err)
	}
	return nil
}

// checkTogether checks options that depend on each other.
func (b *Backend) checkTogether() error {
	if err := checkTier(b.ServiceTier); err != nil {
		return err
	}
	if err := b.checkHealthOptions(); err != nil {
		return err
	}
	switch {
	case b.Origin != nil:
		return b.authConfig().Check()
	case b.Auth != "": // it does not depend on the host
		return keys.AuthConfig{Scheme: b.Auth, APIKey: b.APIKey, Header: b.Header}.Check()
	}
	return nil
}

func (b *Backend) quotaOption(names *[]string) directive.Option {
	return directive.Args("a quota such as 600/minute", 1, 1, func(args []string) error {
		*names = append(*names, args[0])
		_, err := b.parseQuotas()
		return err
	}).Repeatable()
}

// parseQuotas parses the options requests and tokens.
func (b *Backend) parseQuotas() (quotas []ratelimit.Limit, err error) {
	for i, texts := range [][]string{ratelimit.Requests: b.Requests, ratelimit.Tokens: b.Tokens} {
		for _, text := range texts {
			l, err := ratelimit.ParseLimit(ratelimit.Kind(i), text) //nolint:gosec // there are two
			if err != nil {
				return nil, err
			}
			if slices.ContainsFunc(quotas, func(other ratelimit.Limit) bool { return other.ID() == l.ID() }) {
				return nil, fmt.Errorf("%s per %s is given twice: '%s'", l.Kind, l.Unit, text)
			}
			quotas = append(quotas, l)
		}
	}
	slices.SortFunc(quotas, func(x, y ratelimit.Limit) int { return cmp.Compare(x.ID(), y.ID()) })
	return quotas, nil
}

func (b *Backend) addHeader(args []string) error {
	if b.Header == nil {
		b.Header = make(http.Header)
	}
	name, removes := strings.CutPrefix(args[0], "-")
	switch before, known := b.Header[http.CanonicalHeaderKey(name)]; {
	case removes && len(args) == 2:
		return fmt.Errorf("header -%s does not take a value", name)
	case !removes && len(args) == 1:
		// the argument is not quoted, because it may be a key
		return errors.New("header requires a name and a value, or - and a name to remove it, and has 1 argument")
	case known && removes != (before == nil):
		return errSetAndRemoved(name)
	case removes:
		b.Header[http.CanonicalHeaderKey(name)] = nil
		return CheckRemoved(name)
	}
	b.Header.Add(name, args[1])
	if err := directive.CheckPlaceholders(args[1]); err != nil {
		return fmt.Errorf("header %s: %w", args[0], err)
	}
	if hasPlaceholder(args[1]) {
		return checkHeader(args[0], "")
	}
	return checkHeader(args[0], args[1])
}

// addModel returns the function that adds a model. given has the names of
// earlier ones.
func (b *Backend) addModel(given map[string]bool) func(args []string) error {
	return func(args []string) error {
		for _, arg := range args {
			if err := directive.CheckPlaceholders(arg); err != nil {
				return fmt.Errorf("model: %w", err)
			}
		}
		m := Model{Name: args[0]}
		if len(args) == 2 {
			m.Deployment = args[1]
		}
		if given[m.Name] {
			return fmt.Errorf("model '%s' is given twice", m.Name)
		}
		b.Model, given[m.Name] = append(b.Model, m), true
		return m.check()
	}
}

// unmarshalAuth parses a scheme, and its options if it is a module.
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
