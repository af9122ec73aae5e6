package affinity

import (
	"crypto/sha256"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
)

// A client secret is a credential that a server gives to a browser to start one
// realtime session without a key. Only the account that made it accepts it. So
// it is remembered like an object: the digest of the secret, with that account,
// until it expires. In place of the caller, a digest of the caller's name and
// key is stored, so that the secret becomes invalid with that key.

// Secret is the origin of a client secret.
type Secret struct {
	// Account is the account that made it.
	Account string
	// By is a digest of the name and the key of the caller that it was made
	// for: see MinterOf. It is 0 if callers have no keys.
	By ownership.CallerDigest
	// TokenOf is the caller's name if the caller sent a token instead of a key.
	// Otherwise it is empty.
	TokenOf string
}

// MinterOf returns the digest of a caller's name and key for Secret.By. keyID
// is empty for a caller with a token.
func MinterOf(name, keyID string) ownership.CallerDigest {
	if name == "" {
		return 0
	}
	return ownership.CallerNamed("key " + keyID + "\x00" + name)
}

// maxTokenHolders is the maximum number of callers with tokens that are
// remembered, because an identity provider may have any number of them.
const maxTokenHolders = 10_000

// tokenHolders holds the names of callers that have made client secrets with a
// token. If there are too many, all are forgotten, and their client secrets are
// refused.
type tokenHolders struct {
	mu    sync.Mutex
	names map[ownership.CallerDigest]string
}

func (h *tokenHolders) set(c ownership.CallerDigest, name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.names == nil || len(h.names) >= maxTokenHolders {
		h.names = make(map[ownership.CallerDigest]string)
	}
	h.names[c] = name
}

// get returns the name, or "" if it is not known.
func (h *tokenHolders) get(c ownership.CallerDigest) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.names[c]
}

func keyOfSecret(secret string) ownership.Key {
	sum := sha256.Sum256([]byte("client secret\x00" + secret)) // all of it counts
	return ownership.KeyOf(sum[:])
}

// seekers is the caller of lookups for secrets that this replica does not know.
// The clients are not identified yet, so all of them count as one caller.
var seekers = ownership.CallerNamed("\x00client secrets")

// Secret returns the origin of a client secret. ok is false if the secret is
// unknown or has expired.
func (a *Affinity) Secret(secret string) (s Secret, ok bool) {
	key, now := keyOfSecret(secret), time.Now()
	o, ok := a.owners.loaded().Get(key, now)
	if !ok && a.others != nil {
		found, err := a.others.Lookup(seekers, []ownership.Key{key})
		if err != nil || found[0].TTL <= 0 {
			return s, false
		}
		o, ok = ownership.Owner{Account: found[0].Account, Caller: found[0].Caller}, true
		if slices.Contains(a.all, o.Account) {
			a.owners.memory.Put(key, o, now, found[0].TTL)
		}
	}
	if !ok || !slices.Contains(a.all, o.Account) {
		return s, false
	}
	s = Secret{Account: o.Account, By: o.Caller}
	if !s.By.Named() {
		s.By = 0
	}
	s.TokenOf = a.owners.byToken.get(s.By)
	return s, true
}

// longestSecret is the longest time for which a client secret is remembered,
// even if the reply names a longer one. OpenAI's secrets are valid for at most
// 2 hours.
const longestSecret = 24 * time.Hour

// learnSecret remembers the client secret in a reply.
func (p *Placement) learnSecret(account string, reply []byte) {
	a, now := p.affinity, time.Now()
	secret, until, ok := openaiapi.ClientSecretIn(reply)
	ttl := min(until.Sub(now), longestSecret)
	if !ok || ttl <= 0 || !strings.HasPrefix(secret, "ek_") {
		return
	}
	key, o := keyOfSecret(secret), ownership.Owner{Account: account, Caller: p.minter.By}
	if p.minter.TokenOf != "" {
		a.owners.byToken.set(p.minter.By, p.minter.TokenOf)
	}
	if _, known := a.owners.loaded().Get(key, now); known {
		return
	}
	a.owners.memory.Put(key, o, now, ttl)
	a.owners.secrets.add(a.owners.memory, p.caller, key)
	a.owners.tell(key, o, ttl)
	a.owners.saveIfDue(now)
}
