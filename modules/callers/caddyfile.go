package callers

import (
	"fmt"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// directives returns the options about callers in a Caddyfile. Check must be
// called after the whole block was read.
//
//	caller <name>|* deny
//	caller <name>|* {
//	    requests      <n>/<unit> [<model>] [then <tier>]
//	    tokens        <n>/<unit> [<model>] [then <tier>]
//	    max_requests  <n>
//	    models        <name...>
//	    backends      <name...>
//	    service_tiers <tier...>
//	    tier          <name>
//	}
//	callers_file <path>
//	tier <name> [default]
//	tier <name> [default] {
//	    reserve <percent>%
//	    <as for caller, but tier...>
//	}
//	timezone <name>
func (c *Config) directives() directive.Options {
	return directive.Options{
		"caller": directive.Func(c.unmarshalCaller).Repeatable(),
		"tier":   directive.Func(c.unmarshalTier).Repeatable(),

		"callers_file": directive.TextPointer(&c.CallersFile),
		"timezone": directive.String(&c.Timezone).Check(func() error {
			_, err := c.Location()
			return err
		}),
	}
}

func (c *Config) unmarshalCaller(d *caddyfile.Dispenser) error {
	var caller Caller
	if err := directive.Argument(d, &caller.Name); err != nil {
		return err
	}
	if caller.Deny = d.NextArg() && d.Val() == "deny"; d.Val() != caller.Name && !caller.Deny {
		return d.Errf("caller '%s': unexpected argument '%s', expected deny or a block", caller.Name, d.Val())
	}
	err := directive.Block(d, optionsOf(&caller.Allowance, callerNamed(caller.Name)), directive.Options{
		"tier": directive.String(&caller.Tier),
	})
	c.Callers = append(c.Callers, caller)
	return err
}

// optionsOf returns the options in the block of a caller or a tier. holder is
// its name in errors.
func optionsOf(a *Allowance, holder string) directive.Options {
	most := new(int)
	return directive.Options{
		"requests": limitOption(a, holder, ratelimit.Requests, &a.Requests),
		"tokens":   limitOption(a, holder, ratelimit.Tokens, &a.Tokens),
		"max_requests": directive.Int(most, 1, directive.MaxInt).Check(func() error {
			a.MaxRequests = most
			return nil
		}),
		"models":        directive.Strings(&a.Models),
		"backends":      directive.Strings(&a.Backends),
		"service_tiers": directive.Strings(&a.ServiceTiers),
	}
}

func limitOption(a *Allowance, holder string, kind ratelimit.Kind, into *[]Limit) directive.Option {
	text := "a limit such as 600/minute, an optional model and an optional 'then <tier>'"
	return directive.Args(text, 1, 4, func(args []string) error {
		l, rest := Limit{Limit: args[0]}, args[1:]
		if len(rest) > 0 && rest[0] != "then" {
			l.Model, rest = rest[0], rest[1:]
		}
		switch {
		case len(rest) == 0:
		case rest[0] != "then":
			return fmt.Errorf("%s '%s': unexpected argument '%s' after the model '%s', expected 'then <tier>'",
				kind, l.Limit, rest[0], l.Model)
		case len(rest) == 1 || rest[1] == "":
			return fmt.Errorf("%s '%s': expected the name of a tier after then", kind, l.Limit)
		default:
			l.Then = rest[1]
		}
		*into = append(*into, l)
		_, err := parseLimits(*a, holder)
		return err
	}).Repeatable()
}

func (c *Config) unmarshalTier(d *caddyfile.Dispenser) error {
	var t Tier
	if err := directive.Argument(d, &t.Name); err != nil {
		return err
	}
	holder := tierNamed(t.Name)
	for _, word := range d.RemainingArgs() {
		if word != "default" || t.Default {
			return d.Errf("%s: unexpected argument '%s', expected [default]", holder, word)
		}
		t.Default = true
	}
	c.Tiers = append(c.Tiers, t)
	if len(c.Tiers) > maxTiers {
		return d.Errf("%s: expected at most %d tiers", holder, maxTiers)
	}
	if err := c.checkLastTier(); err != nil {
		return d.WrapErr(err)
	}
	return directive.Block(d, optionsOf(&c.Tiers[len(c.Tiers)-1].Allowance, holder), directive.Options{
		"reserve": directive.Args("a percentage such as 50%", 1, 1, c.reserve),
	})
}

// reserve sets the share of the last tier.
func (c *Config) reserve(args []string) error {
	last := len(c.Tiers) - 1
	percent, err := parsePercent(args[0])
	if err != nil {
		return fmt.Errorf("%s: reserve %w", tierNamed(c.Tiers[last].Name), err)
	}
	c.Tiers[last].Reserve = &percent
	return c.checkLastTier()
}

func (c *Config) checkLastTier() error {
	last := len(c.Tiers) - 1
	return c.checkTier(last, c.Tiers[last])
}
