package directive

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/dustin/go-humanize"
)

// String makes an option of one argument.
func String(into *string) Option {
	return Func(func(d *caddyfile.Dispenser) error { return Argument(d, into) })
}

// TextPointer is Text, where nil means that it is not there.
func TextPointer(into **string) Option {
	return Func(func(d *caddyfile.Dispenser) error {
		*into = new(string)
		return Text(*into).read(d)
	})
}

// Secret makes an option of one argument that no error shows.
func Secret(into *string) Option {
	o := String(into)
	o.secret = true
	return o
}

// Strings makes an option of one argument or more. It adds them to those that
// were there. No error shows any: they may be secrets.
func Strings(into *[]string) Option {
	return Func(func(d *caddyfile.Dispenser) error {
		name, args := d.Val(), d.RemainingArgs()
		if len(args) == 0 || slices.Contains(args, "") {
			return d.Errf("%s requires at least one argument, and none that is empty (%s)", name, emptyVariable)
		}
		*into = append(*into, args...)
		return nil
	})
}

// Args makes an option of several arguments, at least fewest and at most most.
// The text names them, such as "a name and a value". No error of this package
// shows them: one may be a secret. An error of read gets the file and the line.
func Args(text string, fewest, most int, read func(args []string) error) Option {
	return Func(func(d *caddyfile.Dispenser) error {
		name, args := d.Val(), d.RemainingArgs()
		switch n := len(args); {
		case n < fewest:
			return d.Errf("%s requires %s, and has %s (%s)", name, text, count(n), emptyVariable)
		case n > most:
			return d.Errf("%s requires %s, and has %s", name, text, count(n))
		}
		if err := read(args); err != nil {
			return d.WrapErr(err)
		}
		return nil
	})
}

func count(args int) string {
	if args == 1 {
		return "1 argument"
	}
	return fmt.Sprintf("%d arguments", args)
}

// OneOf makes an option whose argument is one of the words that are allowed.
func OneOf(into *string, allowed ...string) Option {
	return value(into, "one of "+strings.Join(allowed, ", "), func(word string) (string, bool) {
		return word, slices.Contains(allowed, word)
	})
}

// Flag makes an option without arguments, which is set by being there.
func Flag(into *bool) Option {
	return Func(func(*caddyfile.Dispenser) error {
		*into = true
		return nil
	})
}

// Off makes an option whose argument is the word off, and which is not set
// otherwise.
func Off(into **bool) Option {
	return value(into, "allowed: expected off", func(word string) (*bool, bool) { return new(false), word == "off" })
}

// MaxInt is the highest number that Int allows. It is the same on every
// platform.
const MaxInt = math.MaxInt32

// Int makes an option of one whole number from lowest to highest.
func Int(into *int, lowest, highest int) Option {
	allowed := fmt.Sprintf("a whole number from %d to %d", lowest, highest)
	if highest == MaxInt {
		allowed = fmt.Sprintf("a whole number of %d or more", lowest)
	}
	return value(into, allowed, func(word string) (int, bool) {
		n, err := strconv.Atoi(word)
		return n, err == nil && n >= lowest && n <= highest
	})
}

// IntPointer is Int from 0 on, for a field where 0 is not the same as no value.
func IntPointer(into **int, highest int) Option {
	n := new(int)
	return Int(n, 0, highest).Check(func() error {
		*into = n
		return nil
	})
}

// Float makes an option of one number above 0.
func Float(into *float64) Option {
	return value(into, "a number above 0", func(word string) (float64, bool) {
		n, err := strconv.ParseFloat(word, 64)
		return n, err == nil && n > 0 && !math.IsInf(n, 1)
	})
}

// Duration makes an option of one duration above 0.
func Duration(into *caddy.Duration) Option {
	return duration(into, 1, "a duration above 0, such as 500ms, 10s or 2m")
}

// DurationOrZero makes an option of one duration, which may be 0.
func DurationOrZero(into *caddy.Duration) Option {
	return duration(into, 0, "a duration, such as 0, 500ms or 10s")
}

func duration(into *caddy.Duration, least caddy.Duration, allowed string) Option {
	return value(into, allowed, func(word string) (caddy.Duration, bool) {
		d, err := caddy.ParseDuration(word)
		return caddy.Duration(d), err == nil && caddy.Duration(d) >= least
	})
}

// DefaultDuration puts the fallback in the place of a duration that the config
// does not have. It refuses one below 0, which only JSON may have.
func DefaultDuration(name string, d *caddy.Duration, fallback time.Duration) error {
	if *d < 0 {
		return fmt.Errorf("%s '%s' is not a duration above 0", name, time.Duration(*d))
	}
	*d = cmp.Or(*d, caddy.Duration(fallback))
	return nil
}

// Size makes an option of one number of bytes, from 1 to MaxInt.
func Size(into *int64) Option {
	return value(into, "a size with a unit, from 1B to 2GiB, such as 512KiB or 32MiB", func(word string) (int64, bool) {
		n, err := humanize.ParseBytes(word)
		unit := strings.TrimRight(word, "0123456789., ") == word
		return int64(n), err == nil && unit && n >= 1 && n <= MaxInt //nolint:gosec // within bounds, or not used
	})
}

// Status makes an option of one HTTP status: a code, or the first digit of a
// class such as 2xx.
func Status(into *int) Option {
	return value(into, "a status code or a class of them, such as 200 or 2xx", func(word string) (int, bool) {
		class, isClass := strings.CutSuffix(word, "xx")
		n, err := strconv.Atoi(class)
		return n, err == nil && IsStatus(n) && isClass == (n < 100)
	})
}

// IsStatus reports whether n is an HTTP status code (RFC 9110 section 15), or
// the first digit of a class of them.
func IsStatus(n int) bool { return n >= 1 && n <= 5 || n >= 100 && n <= 599 }

// value makes an option of one argument that parse understands. The text says
// what is allowed.
func value[T any](into *T, allowed string, parse func(word string) (T, bool)) Option {
	return Func(func(d *caddyfile.Dispenser) error {
		name, word := d.Val(), ""
		if err := Argument(d, &word); err != nil {
			return err
		}
		v, ok := parse(word)
		if !ok {
			return d.Errf("%s '%s' is not %s", name, word, allowed)
		}
		*into = v
		return nil
	})
}

// packages are our modules in packages of their own, and these packages.
var packages = map[string]string{
	"http.openai_lb.caller_identity.oidc": "github.com/openai-lb/caddy-openai-lb/oidc",
	"http.openai_lb.state.redis":          "github.com/openai-lb/caddy-openai-lb/redis",
	"http.openai_lb.state.regions":        "github.com/openai-lb/caddy-openai-lb/redis",
}

// NotInBuild returns the error about an option whose value names a module that
// is not in this build.
func NotInBuild(option, namespace, name string) error {
	if path := packages[namespace+"."+name]; path != "" {
		return fmt.Errorf("%s '%s' is not in this build: add it with xcaddy build --with %s", option, name, path)
	}
	return fmt.Errorf("%s '%s' is not in this build: %s", option, name, modulesIn(namespace))
}

// modulesIn lists the modules that an option may name.
func modulesIn(namespace string) string {
	var names []string
	for _, module := range caddy.GetModules(namespace) {
		names = append(names, module.ID.Name())
	}
	if names == nil {
		return "add one with `xcaddy build --with`, there is no module " + namespace + ".*"
	}
	return "there are " + strings.Join(names, ", ")
}

// Module makes an option that is the name of a Caddy module in a namespace,
// followed by that module's own arguments and block. It becomes the module's
// JSON with the name in it under inlineKey. The module must be a T.
func Module[T any](into *json.RawMessage, namespace, inlineKey string) Option {
	return Func(func(d *caddyfile.Dispenser) error {
		option, name := d.Val(), ""
		if err := Argument(d, &name); err != nil {
			return err
		}
		if _, err := caddy.GetModule(namespace + "." + name); err != nil {
			return d.WrapErr(NotInBuild(option, namespace, name))
		}
		module, err := caddyfile.UnmarshalModule(d, namespace+"."+name)
		if err != nil {
			return err
		}
		if _, ok := module.(T); !ok {
			return d.Errf("%s '%s' is not allowed: a module of type %T cannot be used here", option, name, module)
		}
		*into = caddyconfig.JSONModuleObject(module, inlineKey, name, nil)
		return nil
	})
}

// Load loads the module of an option that was read by Module: what is raw in a
// field of owner, of which the tags say the name of the option, the namespace
// and the inline key. Without any, it returns the zero T.
func Load[T any](ctx caddy.Context, owner any, field string, raw json.RawMessage) (module T, err error) {
	if raw == nil {
		return module, nil
	}
	at, _ := reflect.TypeOf(owner).Elem().FieldByName(field)
	option, _, _ := strings.Cut(at.Tag.Get("json"), ",")
	tags, _ := caddy.ParseStructTag(at.Tag.Get("caddy")) // LoadModule complains
	named := make(map[string]any)
	if json.Unmarshal(raw, &named) == nil {
		name, _ := named[tags["inline_key"]].(string)
		if _, err := caddy.GetModule(tags["namespace"] + "." + name); err != nil && name != "" {
			return module, NotInBuild(option, tags["namespace"], name)
		}
	}
	loaded, err := ctx.LoadModule(owner, field)
	if err != nil {
		return module, fmt.Errorf("%s: %w", option, err)
	}
	module, ok := loaded.(T)
	if !ok {
		return module, fmt.Errorf("%s: a module of type %T cannot be used here", option, loaded)
	}
	return module, nil
}
