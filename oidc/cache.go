package oidc

import (
	"crypto/sha256"
	"sync"
)

// maxVerified is how many tokens are remembered, at least for a while.
const maxVerified = 10_000

// cache remembers the tokens that were verified, by their digests. If there are
// too many, those go that were not used for the longest time: it begins a new
// half when one is full, and what the older half has moves to the new one when
// it is used.
type cache struct {
	mu         sync.RWMutex
	new, older map[[sha256.Size]byte]*verified
}

func (c *cache) get(digest [sha256.Size]byte) (v *verified, ok bool) {
	c.mu.RLock()
	v, ok = c.new[digest]
	older, again := c.older[digest]
	c.mu.RUnlock()
	if !ok && again {
		c.add(digest, older)
		return older, true
	}
	return v, ok
}

func (c *cache) add(digest [sha256.Size]byte, v *verified) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.new == nil || len(c.new) >= maxVerified/2 {
		c.new, c.older = make(map[[sha256.Size]byte]*verified), c.new
	}
	c.new[digest] = v
}
