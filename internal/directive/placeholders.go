package directive

import (
	"regexp"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// file matches a placeholder of a file.
var file = regexp.MustCompile(`\{file\.[^{}]*\}`)

// CheckPlaceholders returns an error if a placeholder of a text cannot be
// resolved at load, whatever its value. No file is read.
func CheckPlaceholders(text string) error {
	_, err := caddy.NewReplacer().ReplaceOrErr(file.ReplaceAllString(text, "-"), false, true)
	return err
}

// Text makes an option of one argument whose placeholders are resolved at load.
func Text(into *string) Option {
	return Func(func(d *caddyfile.Dispenser) error {
		name := d.Val()
		if err := Argument(d, into); err != nil {
			return err
		}
		if err := CheckPlaceholders(*into); err != nil {
			return d.Errf("%s: %w", name, err)
		}
		return nil
	})
}
