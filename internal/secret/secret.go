// Package secret reads the keys of a config. A key is written there as it is,
// or as a placeholder, {env.NAME} or {file./path}. A key in a file may change
// while Caddy runs: [Reloader] reads it again.
//
// No error of this package holds a key, or what a placeholder stands for.
package secret

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
)

// InFile reports whether a key comes from a file, because it has a placeholder
// for one.
func InFile(raw string) bool { return strings.Contains(raw, "{file.") }

// InHeader reports whether a header holds a key, judging by its name, such as
// Authorization, Api-Key or Cf-Aig-Authorization.
func InHeader(name string) bool {
	name = strings.ToLower(name)
	return slices.ContainsFunc([]string{"auth", "key", "token", "secret", "cookie", "credential", "password"}, func(word string) bool {
		return strings.Contains(name, word)
	})
}

// longest is how long a key may be. Tokens have a few kilobytes.
const longest = 8 << 10

// Resolve replaces the placeholders of a key and trims it.
func Resolve(raw string) (string, error) {
	if strings.Count(raw, "{") != strings.Count(raw, "}") {
		return "", errors.New("it has an unpaired brace: expected {env.X} or {file./path}")
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

// shellVariable is what a shell would replace, and Caddy does not.
var shellVariable = regexp.MustCompile(`^\$\w+$`)

// ResolveKey is Resolve for the key of an API, which has only visible ASCII
// characters. It refuses what is no key: a variable of a shell, and a key in
// quotes, which `docker --env-file` does not remove.
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

// whyUnresolved says why a key has a placeholder without a value. Caddy itself
// does not tell a file that cannot be read from an empty one. The error does
// not repeat an unknown placeholder, because it may be a part of the key.
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
			return errors.New("it has a placeholder that is neither {env.X} nor {file./path}")
		}
	}
	return err
}

var placeholder = regexp.MustCompile(`\{([^{}]*)\}`)

// Key is a key of the config and its current value. Many requests use it at
// once.
type Key struct {
	// Changed is called with the new digest when the value has changed.
	Changed func(digest string)

	raw, prefix string
	value       atomic.Pointer[string]

	mu sync.Mutex // guards the reading
}

// NewKey reads a key. The prefix comes before it in the value, so that no
// request has to join the two.
func NewKey(raw, prefix string) (*Key, error) {
	k := &Key{raw: raw, prefix: prefix}
	return k, k.Read()
}

// Read resolves the key again. If that fails, the value stays as it was.
func (k *Key) Read() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	key, err := ResolveKey(k.raw)
	if err != nil {
		return err
	}
	before, now := k.value.Load(), k.prefix+key
	if before != nil && *before == now {
		return nil
	}
	k.value.Store(&now)
	if before != nil && k.Changed != nil {
		k.Changed(k.Digest())
	}
	return nil
}

// Value is the prefix and the key, as it is now.
func (k *Key) Value() string { return *k.value.Load() }

// InFile reports whether the key comes from a file.
func (k *Key) InFile() bool { return InFile(k.raw) }

// Identity tells keys apart without holding them. A key in a file keeps its
// identity when it changes.
func (k *Key) Identity() string {
	if k.InFile() {
		return k.raw
	}
	return k.Digest()
}

// Digest tells values apart without holding them.
func (k *Key) Digest() string {
	sum := sha256.Sum256([]byte(k.Value()))
	return hex.EncodeToString(sum[:16])
}
