// Package clientkeys knows the keys with which callers may use the balancer,
// and whose they are. The keys come from the config and from a file. Both are
// read again when files change, see [Store.Read].
//
// Nobody must learn a key from how long a lookup takes. So the store mixes a
// random number of its own into what it looks up.
package clientkeys

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

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/callerkeys"
	"github.com/openai-lb/caddy-openai-lb/internal/secret"
)

const (
	// digestPrefix marks a key of which only the digest is known.
	digestPrefix = "sha256:"
	// maxName is how long a caller's name may be, in bytes.
	maxName = 64
)

// Key is a key and the name of its caller. It may have placeholders, or be the
// digest of a key.
type Key struct{ Name, Key string }

// Caller is somebody with a key.
type Caller struct {
	Name string
	// Label stands for the caller in metrics.
	Label string
}

// Config says where the keys are.
type Config struct {
	Keys []Key
	// File is the path of a file with more keys. If empty, there is none.
	File string
	// Label gives the label of a caller in metrics. Required.
	Label func(name string) string
	// Logger is told when the keys change. Required.
	Logger *zap.Logger
}

// Store finds out whose a key is. Many requests use it at once.
type Store struct {
	config Config

	mu   sync.Mutex        // guards the reading
	last [sha256.Size]byte // the digest of all that was read last

	blind [32]byte
	known atomic.Pointer[map[blinded]Caller]
}

// blinded is the digest of a random number and a key's digest.
type blinded [sha256.Size]byte

// New reads the keys. Its errors hold no key.
func New(config Config) (*Store, error) {
	s := &Store{config: config}
	rand.Read(s.blind[:])
	return s, s.Read()
}

// InFiles reports whether any key comes from a file.
func (s *Store) InFiles() bool {
	for _, k := range s.config.Keys {
		if secret.InFile(k.Key) {
			return true
		}
	}
	return s.config.File != ""
}

// Read reads the keys again. If that fails, those from before stay. Its errors
// hold no key.
func (s *Store) Read() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	found, err := s.config.find()
	if err != nil {
		return err
	}
	digest := sha256.Sum256(fmt.Appendf(nil, "%q", found))
	if digest == s.last {
		return nil
	}
	known := make(map[blinded]Caller)
	for _, k := range found {
		if err := s.add(known, k); err != nil {
			return fmt.Errorf("%s: %w", k.where, err)
		}
	}
	if s.known.Swap(&known) != nil {
		s.config.Logger.Info("client keys changed", zap.Int("keys", len(known)))
	}
	s.last = digest
	return nil
}

// foundKey is a key and, for errors, where it was found.
type foundKey struct{ where, name, key string }

// find collects the keys of the config and the file.
func (c *Config) find() ([]foundKey, error) {
	var found []foundKey
	for _, k := range c.Keys {
		where := fmt.Sprintf("client_key %q", k.Name)
		key, err := secret.ResolveKey(k.Key)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		found = append(found, foundKey{where, k.Name, key})
	}
	if c.File == "" {
		return found, nil
	}
	text, err := os.ReadFile(c.File)
	if err != nil {
		return nil, fmt.Errorf("client_keys_file: %w", err)
	}
	text = bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")) // the byte order mark of some editors
	for i, line := range strings.Split(string(text), "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		where := fmt.Sprintf("client_keys_file %s: line %d", c.File, i+1)
		if len(fields) != 2 {
			return nil, fmt.Errorf("%s: expected a name and a key, found %d words", where, len(fields))
		}
		found = append(found, foundKey{where, fields[0], fields[1]})
	}
	return found, nil
}

// add adds a key, or the digest of one, to those that are known.
func (s *Store) add(known map[blinded]Caller, k foundKey) error {
	if k.name == "" || len(k.name) > maxName {
		return fmt.Errorf("expected a name of 1 to %d bytes, found %d", maxName, len(k.name))
	}
	if !utf8.ValidString(k.name) || strings.ContainsFunc(k.name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("expected a name of printable characters, found %q", k.name)
	}
	digest := sha256.Sum256([]byte(k.key))
	if text, ok := strings.CutPrefix(k.key, digestPrefix); ok {
		raw, err := hex.DecodeString(text)
		if err != nil || len(raw) != len(digest) {
			return fmt.Errorf("expected %d hexadecimal digits after %s", 2*len(digest), digestPrefix)
		}
		digest = [sha256.Size]byte(raw)
	}
	b := s.blinded(digest)
	if other, ok := known[b]; ok && other.Name != k.name {
		return fmt.Errorf("it is also the key of %q", other.Name)
	}
	known[b] = Caller{Name: k.name, Label: s.config.Label(k.name)}
	return nil
}

func (s *Store) blinded(digest [sha256.Size]byte) blinded {
	return sha256.Sum256(append(s.blind[:len(s.blind):len(s.blind)], digest[:]...))
}

// Identify finds out who presented the keys, and removes those that it knows:
// they must not reach a backend. sent tells whether there was any key at all.
func (s *Store) Identify(presented *callerkeys.Presented) (who Caller, sent, ok bool) {
	known := *s.known.Load()
	presented.Remove(func(key string) bool {
		sent = true
		caller, found := known[s.blinded(sha256.Sum256([]byte(key)))]
		if found {
			who, ok = caller, true
		}
		return found
	})
	return who, sent, ok
}
