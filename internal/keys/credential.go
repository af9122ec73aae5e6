package keys

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"sync"
	"sync/atomic"
)

// Source supplies the credentials that authenticate requests to a
// backend. Caddy modules in the namespace http.openai_lb.credentials implement
// it: `auth <name>` uses the module of that name. Many requests use a source
// concurrently.
type Source interface {
	// Credential returns the credential for one attempt. If the source has a
	// valid one, or if the context is done, it must return immediately. After
	// an error, the request fails over to another backend, and this backend
	// gets a cooldown of a minute, or less if the error has a method
	// RetryAfter() time.Duration that returns less. The error must not contain
	// a secret.
	Credential(ctx context.Context) (Credential, error)

	// Renew returns another credential after the backend refused this one with
	// status 401. It returns the same one if there is no other.
	Renew(ctx context.Context, refused Credential) (Credential, error)

	// Identity identifies the account, and contains no secret. Backend state
	// survives a reload as long as the backend's URL and its Identity stay the
	// same.
	Identity() string
}

// Credential authenticates a request: a header and its value.
type Credential struct {
	Header string
	Value  string

	// Secret is the key or token in Value, which no reply or log may repeat.
	// Default: Value without its scheme, such as Bearer.
	Secret string
}

func apiKey(key string) Credential {
	return Credential{Header: "Api-Key", Value: key, Secret: key}
}

// Bearer returns the credential with a token in an Authorization header (RFC
// 6750).
func Bearer(token string) Credential {
	return Credential{Header: "Authorization", Value: "Bearer " + token, Secret: token}
}

func (c Credential) secret() string {
	if c.Secret == "" {
		return KeyIn(c.Value) // of a source that sets only the value
	}
	return c.Secret
}

// Key is the [Source] of a key in the config. Many requests use it
// concurrently.
type Key struct {
	// Changed is called with the new digest when the key has changed.
	Changed func(digest string)

	raw           string
	newCredential func(key string) Credential
	current       atomic.Pointer[Credential] // made once, and not for each request

	mu sync.Mutex // guards the reading
}

// newKey reads a key. newCredential, which is [apiKey] or [Bearer], makes a
// credential of it.
func newKey(raw string, newCredential func(key string) Credential) (*Key, error) {
	k := &Key{raw: raw, newCredential: newCredential}
	return k, k.Read()
}

// Read reloads the key. If that fails, the credential does not change.
func (k *Key) Read() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	key, err := ResolveKey(k.raw)
	if err != nil {
		return err
	}
	before, now := k.current.Load(), k.newCredential(key)
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

// Identity implements Source. A key in a file keeps its identity when it
// changes.
func (k *Key) Identity() string {
	if k.InFile() {
		return k.raw
	}
	return k.Digest()
}

// Digest returns a digest of the current key.
func (k *Key) Digest() string {
	sum := sha256.Sum256([]byte(k.current.Load().Value))
	return hex.EncodeToString(sum[:16])
}
