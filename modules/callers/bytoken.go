package callers

import (
	"maps"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

// byToken holds the tiers that the tokens of callers name. There may be many
// callers, and new ones come at any time.
type byToken struct {
	mu         sync.RWMutex
	placements map[string]placement
	// swept is when old entries were last removed.
	swept time.Time
	// placing is held while a caller is placed in a tier.
	placing sync.Mutex
}

// placement is the content of a caller's newest token.
type placement struct {
	// tier is the tier that the token names. It may be empty. It has no effect
	// if the caller's own block names a tier.
	tier   string
	issued time.Time
}

// maxPlacements is the maximum number of remembered callers. If a caller is
// forgotten, its next token sets its tier again.
const maxPlacements = 100_000

// maxAge is the age at which a token is forgotten. Tokens are seldom valid for
// a day. If an older one is still used, the next request with it is remembered
// again.
const maxAge = 48 * time.Hour

func (b *byToken) of(name string) placement {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.placements[name]
}

func (b *byToken) set(name string, p placement) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.placements == nil {
		b.placements = make(map[string]placement)
	}
	if now := time.Now(); now.Sub(b.swept) > time.Hour {
		b.swept = now
		maps.DeleteFunc(b.placements, func(_ string, p placement) bool { return now.Sub(p.issued) > maxAge })
	}
	if _, known := b.placements[name]; !known && len(b.placements) >= maxPlacements {
		for some := range b.placements {
			delete(b.placements, some)
			break
		}
	}
	b.placements[name] = p
}

// placeByToken places a caller in the tier that its token names, unless the
// caller's own block or its line in client_keys_file names one, or a newer
// token is known. If the token names no tier, the caller is in the tier of
// callers that nothing else places. token is nil for a request without a token.
func (c *Callers) placeByToken(token *keys.Identity) {
	if token == nil || len(c.blocks.Load().others.inTier) == 0 {
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
	before, latest := tokens.of(token.Name), placement{tier: token.Tier, issued: token.Issued}
	if !token.Issued.After(before.issued) {
		return
	}
	if tokens.set(token.Name, latest); latest.tier != before.tier && c.started.Load() { // what was used stays
		c.kept.limiters.Apply(time.Now(), token.Name)
	}
}
