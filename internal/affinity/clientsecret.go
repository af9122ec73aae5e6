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

// A client secret is what a server gives to a browser, to begin one realtime
// session without a key. Only the account that has made it accepts it. So it is
// remembered like an object: its digest, with that account, until it expires.
// In place of the caller, there is a digest of the caller's name and key, so
// that the secret ends with that key.

// Secret is what is known about a client secret.
type Secret struct {
	// Account has made it.
	Account string
	// By stands for the key of the caller that it was made for, as MinterOf
	// returns it. It is 0 if callers have no keys.
	By ownership.Caller
	// TokenOf is the name of the caller if that has sent a token. Otherwise, it
	// is empty.
	TokenOf string
}

// MinterOf returns what stands for a caller's key in what is remembered of its
// client secrets. A caller by a token has no id of a key.
func MinterOf(name, keyID string) ownership.Caller {
	if name == "" {
		return 0
	}
	return ownership.CallerNamed("key " + keyID + "\x00" + name)
}

// maxTokenHolders is how many callers with tokens are remembered. An identity
// provider may have any number of them.
const maxTokenHolders = 10_000

// tokenHolders are the names of callers that have made client secrets with a
// token. If there are too many, all are forgotten, and their client secrets are
// refused.
type tokenHolders struct {
	mu    sync.Mutex
	names map[ownership.Caller]string
}

func (h *tokenHolders) set(c ownership.Caller, name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.names == nil || len(h.names) >= maxTokenHolders {
		h.names = make(map[ownership.Caller]string)
	}
	h.names[c] = name
}

// get returns the name, or nothing.
func (h *tokenHolders) get(c ownership.Caller) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.names[c]
}

func keyOfSecret(secret string) ownership.Key {
	sum := sha256.Sum256([]byte("client secret\x00" + secret)) // all of it counts
	return ownership.KeyOf(sum[:])
}

// seekers are all who ask for secrets that this replica does not know. They are
// not identified, so they are one caller to the other replicas.
var seekers = ownership.CallerNamed("\x00client secrets")

// Secret returns what is known about a client secret that is still good.
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

// longestSecret is how long a client secret is good at most, whatever its reply
// says. OpenAI's are for 2 hours at most.
const longestSecret = 24 * time.Hour

// learnSecret records the client secret in a reply.
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
	a.owners.others.Load().Send(key, o, ttl)
	a.owners.saveIfDue(now)
}
