package keys

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"sync"
	"sync/atomic"
)

// Key is the [Source] of a key in the config. Many requests use it concurrently.
type Key struct {
	// Changed is called with the new digest when the key has changed.
	Changed func(digest string)

	raw     string
	as      func(key string) Credential
	current atomic.Pointer[Credential] // made once, and not for each request

	mu sync.Mutex // guards the reading
}

// newKey reads a key, which becomes a credential by [apiKey] or [Bearer].
func newKey(raw string, as func(key string) Credential) (*Key, error) {
	k := &Key{raw: raw, as: as}
	return k, k.Read()
}

// Read resolves the key again. If that fails, the credential stays as it was.
func (k *Key) Read() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	key, err := ResolveKey(k.raw)
	if err != nil {
		return err
	}
	before, now := k.current.Load(), k.as(key)
	if before != nil && *before == now {
		return nil
	}
	k.current.Store(&now)
	if before != nil && k.Changed != nil {
		k.Changed(k.Digest())
	}
	return nil
}

// Credential implements Source.
func (k *Key) Credential(context.Context) (Credential, error) { return *k.current.Load(), nil }

// Renew implements Source.
func (k *Key) Renew(_ context.Context, refused Credential) (Credential, error) {
	if k.InFile() {
		if err := k.Read(); err != nil {
			return refused, err
		}
	}
	return *k.current.Load(), nil
}

// InFile reports whether the key comes from a file.
func (k *Key) InFile() bool { return InFile(k.raw) }

// Identity implements Source. A key in a file keeps its identity when it changes.
func (k *Key) Identity() string {
	if k.InFile() {
		return k.raw
	}
	return k.Digest()
}

// Digest identifies the key of the moment, and does not contain it.
func (k *Key) Digest() string {
	sum := sha256.Sum256([]byte(k.current.Load().Value))
	return hex.EncodeToString(sum[:16])
}
