package model

import (
	"crypto/sha256"
	"slices"
	"sync"
	"time"
)

// "Prompt caching" in OpenAI's documentation: prompts of 1,024 tokens or more
// are cached, and what is found is counted in steps of 128 tokens. It reduces
// latency by up to 80 %.
const (
	shortestCached = 1024
	cachedStep     = 128
	latencySaved   = 0.8
)

// PromptCache remembers the prompts of a deployment that were used last.
type PromptCache struct {
	mu    sync.Mutex
	known []digest // the latest last
}

type digest [sha256.Size]byte

// Prefix is the beginning of a prompt up to the end of a message.
type Prefix struct {
	digest
	tokens int64
}

// Prefixes are the beginnings of the prompt, the shortest first, if the cache
// is for the operation. The last one is all of the prompt.
func (r Request) Prefixes(op Operation) (all []Prefix) {
	if op != OpChat && op != OpResponse {
		return nil
	}
	var sum digest
	var chars int64
	for part, n := range r.parts() {
		sum = sha256.Sum256(append(sum[:], encode(part)...))
		chars += n
		all = append(all, Prefix{sum, chars / 4})
	}
	return all
}

// Find returns how many tokens of the prompt are in the cache.
func (c *PromptCache) Find(prompt []Prefix) (cached int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, cached = c.longest(prompt)
	return cached
}

// longest finds the longest beginning of the prompt that is in the cache. Its
// place is -1 if there is none.
func (c *PromptCache) longest(prompt []Prefix) (place int, cached int64) {
	for _, p := range slices.Backward(prompt) {
		if p.tokens < shortestCached {
			break
		}
		if place = slices.Index(c.known, p.digest); place >= 0 {
			return place, p.tokens / cachedStep * cachedStep
		}
	}
	return -1, 0
}

// Use puts the prompt of an admitted request into the cache, which holds at
// most limit prompts.
func (c *PromptCache) Use(prompt []Prefix, limit int) {
	if len(prompt) == 0 || prompt[len(prompt)-1].tokens < shortestCached {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if place, _ := c.longest(prompt); place >= 0 {
		used := c.known[place]
		c.known = append(slices.Delete(c.known, place, place+1), used)
	}
	if whole := prompt[len(prompt)-1].digest; !slices.Contains(c.known, whole) {
		c.known = append(c.known, whole)
	}
	c.known = c.known[max(0, len(c.known)-limit):]
}

// FirstTokenLatency is the time before the first token, of which it takes less
// if some of the prompt was cached.
func FirstTokenLatency(latency time.Duration, prompt, cached int64) time.Duration {
	if cached > 0 {
		latency -= time.Duration(latencySaved * float64(latency) * float64(cached) / float64(prompt))
	}
	return latency
}
