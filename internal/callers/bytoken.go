package callers

import (
	"maps"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

// byToken are the callers whose tokens say what tier they have. There may be
// many, and a new one comes at any time.
type byToken struct {
	mu   sync.RWMutex
	said map[string]saidByToken
	// swept is when old ones were forgotten.
	swept time.Time
	// placing is held by who places a caller.
	placing sync.Mutex
}

// saidByToken is what the newest token of a caller says.
type saidByToken struct {
	// tier is the one that the token names, or empty. It does not count if the
	// caller's own block names one.
	tier   string
	issued time.Time
}

// maxSaid is of how many callers it is known. Of others, each token says it
// again.
const maxSaid = 100_000

// maxAge is for how long it is known what a token says: tokens seldom last a
// day. The next request with an older one that is still valid says it again.
const maxAge = 48 * time.Hour

func (b *byToken) of(name string) saidByToken {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.said[name]
}

func (b *byToken) set(name string, said saidByToken) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.said == nil {
		b.said = make(map[string]saidByToken)
	}
	if now := time.Now(); now.Sub(b.swept) > time.Hour {
		b.swept = now
		maps.DeleteFunc(b.said, func(_ string, said saidByToken) bool { return now.Sub(said.issued) > maxAge })
	}
	if _, known := b.said[name]; !known && len(b.said) >= maxSaid {
		for some := range b.said {
			delete(b.said, some)
			break
		}
	}
	b.said[name] = said
}

// PlaceByToken places a caller in the tier that its token names, unless its own
// block or its line in client_keys_file names one, or a newer token has come.
// Without a tier, its tier is that of callers for which nothing names one. nil
// is no token.
func (c *Callers) PlaceByToken(token *keys.Identity) {
	if token == nil || c == nil || len(c.blocks.Load().others.inTier) == 0 {
		return
	}
	tokens := c.byToken.Load()
	if tokens == nil {
		c.byToken.CompareAndSwap(nil, new(byToken))
		tokens = c.byToken.Load()
	}
	if !token.Issued.After(tokens.of(token.Name).issued) {
		return
	}
	tokens.placing.Lock()
	defer tokens.placing.Unlock()
	before, said := tokens.of(token.Name), saidByToken{tier: token.Tier, issued: token.Issued}
	if !token.Issued.After(before.issued) {
		return
	}
	if tokens.set(token.Name, said); said.tier != before.tier && c.started.Load() { // what was used stays
		now := time.Now()
		c.kept.limiters.Get(now, token.Name).Change(now, c.of(token.Name).settings)
	}
}
