package keys

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// InFile reports whether a key comes from a file, because it has a placeholder
// for one.
func InFile(raw string) bool { return strings.Contains(raw, "{file.") }

// longest is the maximum length of a key. Tokens have a few kilobytes.
const longest = 8 << 10

// Resolve replaces the placeholders of a key, and trims it.
func Resolve(raw string) (string, error) {
	switch {
	case strings.Count(raw, "{") != strings.Count(raw, "}"):
		return "", errUnpaired
	case withoutBraces.MatchString(raw):
		return "", errNoBraces
	}
	resolved, err := caddy.NewReplacer().ReplaceOrErr(raw, true, true)
	if err != nil {
		return "", whyUnresolved(raw, err)
	}
	resolved = strings.TrimSpace(resolved)
	switch {
	case resolved == "":
		return "", errors.New("it is empty")
	case len(resolved) > longest:
		return "", fmt.Errorf("it must not be longer than %d bytes", longest)
	case strings.ContainsFunc(resolved, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return "", errors.New("it must not contain white space or control characters")
	}
	return resolved, nil
}

var (
	errUnpaired = errors.New("it has an unpaired brace: expected {env.X} or {file./path}")
	errNoBraces = errors.New("it looks like a placeholder without its braces: expected {env.X} or {file./path}")
	errNeither  = errors.New("it has a placeholder that is neither {env.X} nor {file./path}")
)

// CheckWritten returns an error if an API key is not valid as it is written.
// The values of placeholders are known only at load.
func CheckWritten(raw string) error {
	switch {
	case !strings.ContainsAny(raw, "{}"):
		_, err := ResolveKey(raw)
		return err
	case strings.Count(raw, "{") != strings.Count(raw, "}"):
		return errUnpaired
	case directive.CheckPlaceholders(raw) != nil:
		return errNeither // the placeholder may be a part of the key
	}
	return nil
}

// withoutBraces matches a placeholder whose braces were forgotten.
var withoutBraces = regexp.MustCompile(`^\$?(env\.\w+|file\./?\w[\w./-]*)$`)

// shellVariable matches a variable that a shell would replace, but Caddy does
// not.
var shellVariable = regexp.MustCompile(`^\$\w+$`)

// ResolveKey replaces the placeholders of an API key, and trims it. The key
// must have only visible ASCII characters. ResolveKey rejects a shell variable,
// and a key in quotes, which `docker --env-file` does not remove.
func ResolveKey(raw string) (string, error) {
	if shellVariable.MatchString(raw) {
		return "", errors.New("it looks like a shell variable, which is not replaced here: expected {env.X}")
	}
	key, err := Resolve(raw)
	switch {
	case err != nil:
		return "", err
	case strings.ContainsFunc(key, func(r rune) bool { return r > '~' }):
		return "", errors.New("it must contain only visible ASCII characters, and no byte order mark")
	case quoted.MatchString(key):
		return "", errors.New("it must not be in quotes")
	}
	return key, nil
}

var quoted = regexp.MustCompile(`^(".*"|'.*')$`)

// whyUnresolved returns the reason why a placeholder in a key has no value. It
// is needed because Caddy's error is the same for an unreadable and an empty
// file. The error does not repeat an unknown placeholder, because it may be a
// part of the key.
func whyUnresolved(raw string, err error) error {
	for _, match := range placeholder.FindAllStringSubmatch(raw, -1) {
		switch name, path, _ := strings.Cut(match[1], "."); name {
		case "file":
			file, err := os.Open(path)
			if err != nil {
				return err
			}
			file.Close()
		case "env":
		default:
			return errNeither
		}
	}
	return err
}

var placeholder = regexp.MustCompile(`\{([^{}]*)\}`)
