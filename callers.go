package openailb

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"unicode"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

// ClientKey is a key with which a caller may use the balancer.
type ClientKey struct {
	// Name stands for the caller in logs, metrics and placeholders. A caller
	// may have several keys. Required.
	Name string `json:"name"`

	// Key is the key itself, or `sha256:` and its SHA-256 digest in hex, as
	// `printf %s "$KEY" | sha256sum` prints it. {env.X} and {file.X} are
	// resolved at load; a file is read again when it changes. Required.
	Key string `json:"key"`
}

const (
	// digestPrefix marks a key of which only the digest is known.
	digestPrefix = "sha256:"
	// maxCallerName is how long a caller's name may be, in bytes.
	maxCallerName = 64
)

// callers are those who may use the balancer.
type callers struct {
	keys   []ClientKey
	file   string
	logger *zap.Logger

	mu   sync.Mutex        // guards the reading
	last [sha256.Size]byte // the digest of all that was read last

	// blind makes what is looked up unpredictable, so that the time that
	// takes tells nothing about the keys.
	blind [32]byte
	known atomic.Pointer[map[blinded]caller]
}

type blinded [sha256.Size]byte

// caller is somebody with a key.
type caller struct {
	name string
	// label is the name in metrics.
	label string
}

func newCallers(keys []ClientKey, file string, logger *zap.Logger) (*callers, error) {
	c := &callers{keys: keys, file: file, logger: logger}
	rand.Read(c.blind[:])
	return c, c.read()
}

// inFiles reports whether any key comes from a file.
func (c *callers) inFiles() bool {
	for _, k := range c.keys {
		if strings.Contains(k.Key, "{file.") {
			return true
		}
	}
	return c.file != ""
}

// read resolves the keys. If that fails, those before stay. Its errors hold no
// key.
func (c *callers) read() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	given, err := c.given()
	if err != nil {
		return err
	}
	digest := sha256.Sum256(fmt.Appendf(nil, "%q", given))
	if digest == c.last {
		return nil
	}
	known := make(map[blinded]caller)
	for _, k := range given {
		if err := c.add(known, k); err != nil {
			return fmt.Errorf("%s: %w", k.where, err)
		}
	}
	if c.known.Swap(&known) != nil {
		c.logger.Info("client keys changed", zap.Int("keys", len(known)))
	}
	c.last = digest
	return nil
}

// givenKey is a key and where it stands.
type givenKey struct{ where, name, key string }

// given collects the keys.
func (c *callers) given() ([]givenKey, error) {
	var given []givenKey
	for _, k := range c.keys {
		where := fmt.Sprintf("client_key %q", k.Name)
		key, err := resolveSecret(k.Key)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		given = append(given, givenKey{where, k.Name, key})
	}
	if c.file == "" {
		return given, nil
	}
	text, err := os.ReadFile(c.file)
	if err != nil {
		return nil, fmt.Errorf("client_keys_file: %w", err)
	}
	text = bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")) // the byte order mark of some editors
	for i, line := range strings.Split(string(text), "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		where := fmt.Sprintf("client_keys_file %s: line %d", c.file, i+1)
		if len(fields) != 2 {
			return nil, fmt.Errorf("%s: expected a name and a key, found %d words", where, len(fields))
		}
		given = append(given, givenKey{where, fields[0], fields[1]})
	}
	if len(given) == len(c.keys) {
		return nil, fmt.Errorf("client_keys_file %s: expected at least one line with a name and a key", c.file)
	}
	return given, nil
}

// add makes a key, or the digest of one, known as the named caller's.
func (c *callers) add(known map[blinded]caller, k givenKey) error {
	name := k.name
	if name == "" || len(name) > maxCallerName {
		return fmt.Errorf("expected a name of 1 to %d bytes, found %d", maxCallerName, len(name))
	}
	if !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("expected a name of printable characters, found %q", name)
	}
	digest := sha256.Sum256([]byte(k.key))
	if text, ok := strings.CutPrefix(k.key, digestPrefix); ok {
		raw, err := hex.DecodeString(text)
		if err != nil || len(raw) != len(digest) {
			return fmt.Errorf("expected %d hexadecimal digits after %s", 2*len(digest), digestPrefix)
		}
		digest = [sha256.Size]byte(raw)
	}
	b := c.blinded(digest)
	if other, ok := known[b]; ok && other.name != name {
		return fmt.Errorf("it is the key of %q, too", other.name)
	}
	known[b] = caller{name: name, label: callerLabels.of(name)}
	return nil
}

func (c *callers) blinded(digest [sha256.Size]byte) blinded {
	return sha256.Sum256(append(c.blind[:len(c.blind):len(c.blind)], digest[:]...))
}

// identify finds whose keys are among the credentials, and takes those out:
// they are for us alone.
func (c *callers) identify(presented *credentials) (who caller, anyKey, ok bool) {
	known := *c.known.Load()
	presented.withdraw(func(key string) bool {
		anyKey = true
		found, its := known[c.blinded(sha256.Sum256([]byte(key)))]
		if its {
			who, ok = found, true
		}
		return its
	})
	return who, anyKey, ok
}

// provisionCallers sets up who may use the balancer, if not everybody may.
func (h *Handler) provisionCallers() error {
	if len(h.ClientKeys) == 0 && h.ClientKeysFile == "" {
		return nil
	}
	file, err := caddy.NewReplacer().ReplaceOrErr(h.ClientKeysFile, true, true)
	if err != nil {
		return fmt.Errorf("client_keys_file: %w", err)
	}
	if h.callers, err = newCallers(h.ClientKeys, file, h.logger); err != nil {
		return err
	}
	if h.callers.inFiles() {
		h.secretFiles.add("client keys", h.callers.read)
	}
	return nil
}

// admit finds out who sent the request, and refuses somebody who may not use
// the balancer.
func (h *Handler) admit(ex *exchange) (refusal apiError, refused bool) {
	if h.callers == nil {
		return apiError{}, false
	}
	who, anyKey, ok := h.callers.identify(&ex.credentials)
	switch ex.refused = !ok; {
	case !anyKey:
		return missingKey, true
	case !ok:
		return wrongKey, true
	}
	ex.caller = who
	if extra, ok := ex.request.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
		extra.Set(ex.callerField())
	}
	return apiError{}, false
}

// callerField names the caller in a log, if callers have names.
func (ex *exchange) callerField() zap.Field {
	if ex.caller.name == "" {
		return zap.Skip()
	}
	return zap.String("caller", ex.caller.name)
}
