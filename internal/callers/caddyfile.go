package callers

import (
	"errors"
	"fmt"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
)

// Directives are the options in a Caddyfile. Check has to follow when the whole block was read.
//
//	caller <name>|* deny
//	caller <name>|* {
//	    requests      <n>/<unit> [then <tier>]
//	    tokens        <n>/<unit> [then <tier>]
//	    max_requests  <n>
//	    models        <name...>
//	    backends      <name...>
//	    service_tiers <tier...>
//	    tier          <name>
//	}
//	tier     <name> [<percent>%]
//	timezone <name>
func (c *Config) Directives() directive.Options {
	return directive.Options{
		"caller": directive.Func(c.unmarshalCaller).Repeatable(),
		"tier":   directive.Args("a name and an optional ceiling", 1, 2, c.addTier).Repeatable(),
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
	err := directive.Block(d, caller.options())
	c.Callers = append(c.Callers, caller)
	return err
}

// options are the options of the block.
func (c *Caller) options() directive.Options {
	most := new(int)
	return directive.Options{
		"requests": c.limitOption(meter.Requests, &c.Requests),
		"tokens":   c.limitOption(meter.Tokens, &c.Tokens),
		"max_requests": directive.Int(most, 1, directive.MaxInt).Check(func() error {
			c.MaxRequests = most
			return nil
		}),
		"models":        directive.Strings(&c.Models),
		"backends":      directive.Strings(&c.Backends),
		"service_tiers": directive.Strings(&c.ServiceTiers),
		"tier":          directive.String(&c.Tier),
	}
}

func (c *Caller) limitOption(kind meter.Kind, into *[]Limit) directive.Option {
	text := "a limit such as 600/minute and an optional 'then <tier>'"
	return directive.Args(text, 1, 3, func(args []string) error {
		l := Limit{Limit: args[0]}
		if len(args) > 1 {
			if args[1] != "then" {
				return fmt.Errorf("%s '%s': unexpected argument '%s', expected 'then <tier>'", kind, l.Limit, args[1])
			}
			if len(args) == 2 || args[2] == "" {
				return fmt.Errorf("%s '%s': expected the name of a tier after then", kind, l.Limit)
			}
			l.Then = args[2]
		}
		*into = append(*into, l)
		if _, err := c.limits(); err != nil {
			return fmt.Errorf("caller '%s'%w", c.Name, err)
		}
		return nil
	}).Repeatable()
}

func (c *Config) addTier(args []string) error {
	t := Tier{Name: args[0]}
	if len(args) == 2 {
		ceiling, err := ParseCeiling(args[1])
		if err != nil {
			return fmt.Errorf("tier '%s': %w", t.Name, err)
		}
		t.Ceiling = &ceiling
	}
	if t.Name == "" {
		return errors.New("tier requires a name")
	}
	c.Tiers = append(c.Tiers, t)
	if len(c.Tiers) > maxTiers {
		return fmt.Errorf("tier '%s': expected at most %d tiers", t.Name, maxTiers)
	}
	return c.checkLastTier()
}

func (c *Config) checkLastTier() error {
	last := len(c.Tiers) - 1
	if err := c.checkTier(last, c.Tiers[last]); err != nil {
		return fmt.Errorf("tier '%s'%w", c.Tiers[last].Name, err)
	}
	return nil
}
