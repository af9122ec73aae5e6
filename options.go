package openailb

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/dustin/go-humanize"
)

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
