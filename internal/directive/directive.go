// Package directive reads blocks of a Caddyfile, and writes words of one. A
// block is described by its options, and each option by where its value goes:
//
//	func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
//	    return directive.Unmarshal(d, directive.Options{
//	        "name":          directive.String(&h.Name),
//	        "api_key":       directive.Secret(&h.APIKey),
//	        "fail_duration": directive.Duration(&h.FailDuration),
//	        "header":        directive.Args("a name and a value", 2, 2, h.addHeader).Repeatable(),
//	    })
//	}
//
// The package refuses unknown options, options that are given twice, missing
// and spare arguments, blocks where none belongs, and values that are not
// allowed. Every error says the file, the line, the option, and what is
// allowed. It shows the value, unless that may be a secret.
package directive

import (
	"maps"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// Options are the options of a block by their names.
type Options map[string]Option

// Option reads what follows the name of an option. The functions of this
// package that return an Option make one.
type Option struct {
	read       func(*caddyfile.Dispenser) error
	repeatable bool
	secret     bool // the arguments must not be shown
	refused    bool // an error lists the options without it
}

// Func makes an option of a function that reads it. The function starts at the
// name of the option. It reads the arguments, and the block if there is one.
func Func(read func(d *caddyfile.Dispenser) error) Option { return Option{read: read} }

// Refused makes an option that is always an error, which says what to write
// instead.
func Refused(instead string) Option {
	return Option{refused: true, read: func(d *caddyfile.Dispenser) error {
		return d.Errf("%s is not an option here: %s", d.Val(), instead)
	}}
}

// Unavailable makes an option that is always an error, because of the build.
func Unavailable(why error) Option {
	return Option{refused: true, read: func(d *caddyfile.Dispenser) error { return d.WrapErr(why) }}
}

// Repeatable allows the option to be given more than once.
func (o Option) Repeatable() Option {
	o.repeatable = true
	return o
}

// Check adds a check that runs after the option was read. Its error gets the
// file and the line where the option begins.
func (o Option) Check(check func() error) Option {
	read := o.read
	o.read = func(d *caddyfile.Dispenser) error {
		begin := *d
		if err := read(d); err != nil {
			return err
		}
		if err := check(); err != nil {
			return begin.WrapErr(err)
		}
		return nil
	}
	return o
}

// whole is the name under which options have their Check.
const whole = ""

// Check adds a check that runs when the whole block was read. Its error begins
// with the name of an option, and its first argument in single quotes if it is
// repeatable. It gets the file and the line of that option or, if the block
// does not have it, of the block.
func (o Options) Check(check func() error) Options {
	o[whole] = Func(func(*caddyfile.Dispenser) error { return check() })
	return o
}

// Unmarshal reads a directive, or the segment of a module, that has options in
// a block and no arguments. The next token is its name. The options may come in
// several parts.
func Unmarshal(d *caddyfile.Dispenser, parts ...Options) error {
	d.Next() // the directive's name
	name := d.Val()
	if d.NextArg() {
		return d.Errf("unexpected argument '%s': the options of %s belong in a block", d.Val(), name)
	}
	return Block(d, parts...)
}

// Block reads the block that follows, if there is one. The arguments before it
// have been read.
func Block(d *caddyfile.Dispenser, parts ...Options) error {
	options, checks := make(Options), []Option(nil)
	for _, part := range parts {
		maps.Copy(options, part)
		if check, ok := options[whole]; ok {
			checks = append(checks, check)
			delete(options, whole)
		}
	}
	begin, seen := *d, make(map[string]caddyfile.Dispenser)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name := d.Val()
		option, ok := options[name]
		if !ok {
			maps.DeleteFunc(options, func(_ string, o Option) bool { return o.refused })
			return d.Errf("unrecognized option '%s': expected one of %s",
				name, strings.Join(slices.Sorted(maps.Keys(options)), ", "))
		}
		if _, again := seen[name]; again && !option.repeatable {
			return d.Errf("%s is given twice", name)
		}
		seen[name] = *d
		if first := *d; option.repeatable && first.NextArg() {
			seen[name+" '"+first.Val()+"'"] = *d
		}
		if err := option.read(d); err != nil {
			return err
		}
		if d.NextArg() {
			if option.secret {
				return d.Errf("%s has too many arguments: quote a value that contains spaces", name)
			}
			return d.Errf("unexpected argument '%s' after %s", d.Val(), name)
		}
		if d.NextBlock(d.Nesting()) {
			return d.Errf("%s does not take a block", name)
		}
	}
	for _, check := range checks {
		if err := check.read(d); err != nil {
			words := strings.FieldsFunc(err.Error(), func(r rune) bool { return r == ' ' || r == ':' })
			at, ok := seen[strings.Join(words[:min(2, len(words))], " ")]
			if !ok {
				at, ok = seen[words[0]]
			}
			if !ok {
				at = begin
			}
			return at.WrapErr(err)
		}
	}
	return nil
}

// emptyVariable says why an argument that is in the file may be missing: Caddy
// replaces {$X} before it reads the line.
const emptyVariable = "an environment variable in {$...} may be empty"

// Argument reads the one argument of an option that has a block as well. It is
// used in a Func, before Block.
func Argument(d *caddyfile.Dispenser, into *string) error {
	name := d.Val()
	if !d.NextArg() || d.Val() == "" {
		return d.Errf("%s requires an argument (%s)", name, emptyVariable)
	}
	*into = d.Val()
	return nil
}
