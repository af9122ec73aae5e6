package model

import (
	"container/list"
	"crypto/sha256"
	"encoding/json"
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
	mu     sync.Mutex
	known  map[digest]*list.Element
	latest list.List // of digests, the latest first
}

type digest [sha256.Size]byte

// Prefix is the beginning of a prompt up to the end of a message.
type Prefix struct {
	digest
	tokens int64
}

// Prefixes are the beginnings of the prompt, the shortest first, if the cache is for
// the operation. The last one is all of the prompt.
func (r Request) Prefixes(op Operation) (all []Prefix) {
	if op != OpChat && op != OpCompletion && op != OpResponse {
		return nil
	}
	var sum digest
	var chars int64
	for part, n := range r.parts() {
		text, _ := json.Marshal(part) // it was JSON before
		sum = sha256.Sum256(append(sum[:], text...))
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

// longest finds the longest beginning of the prompt that is in the cache.
func (c *PromptCache) longest(prompt []Prefix) (place *list.Element, cached int64) {
	for _, p := range slices.Backward(prompt) {
		if p.tokens < shortestCached {
			break
		}
		if place, ok := c.known[p.digest]; ok {
			return place, p.tokens / cachedStep * cachedStep
		}
	}
	return nil, 0
}

// Use puts the prompt of an admitted request into the cache, which holds at most
// limit prompts.
func (c *PromptCache) Use(prompt []Prefix, limit int) {
	if len(prompt) == 0 || prompt[len(prompt)-1].tokens < shortestCached {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if place, _ := c.longest(prompt); place != nil {
		c.latest.MoveToFront(place)
	}
	whole := prompt[len(prompt)-1].digest
	if _, ok := c.known[whole]; ok {
		return
	}
	if c.known == nil {
		c.known = make(map[digest]*list.Element)
	}
	c.known[whole] = c.latest.PushFront(whole)
	if len(c.known) > limit {
		delete(c.known, c.latest.Remove(c.latest.Back()).(digest))
	}
}

// FirstTokenLatency is the time before the first token, of which it takes less if
// some of the prompt was cached.
func FirstTokenLatency(latency time.Duration, prompt, cached int64) time.Duration {
	if cached > 0 {
		latency -= time.Duration(latencySaved * float64(latency) * float64(cached) / float64(prompt))
	}
	return latency
}
