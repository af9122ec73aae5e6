package simulator

import (
	"container/list"
	"crypto/sha256"
	"encoding/json"
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

// promptCache remembers the prompts of a deployment that were used last.
type promptCache struct {
	mu     sync.Mutex
	known  map[digest]*list.Element
	latest list.List // of digests, the latest first
}

type digest [sha256.Size]byte

// prefix is the beginning of a prompt up to the end of a message.
type prefix struct {
	digest
	tokens int64
}

// prefixes are the beginnings of the prompt, the shortest first. The last one is
// all of it. Before the messages come the tools and the instructions.
func (r request) prefixes() (all []prefix) {
	var sum digest
	var chars int64
	add := func(part any) {
		text, _ := json.Marshal(part) // it was JSON before
		sum = sha256.Sum256(append(sum[:], text...))
		chars += textLength(part)
	}
	add(r.Tools)
	add(r.Instructions)
	for _, list := range []any{r.Messages, r.Prompt, r.Input} {
		for _, part := range inputs(list) {
			if part != nil {
				add(part)
				all = append(all, prefix{sum, chars / 4})
			}
		}
	}
	return all
}

// use returns how many tokens of the prompt are in the cache, and puts the whole
// prompt into it. The cache holds at most limit prompts.
func (c *promptCache) use(prompt []prefix, limit int) (cached int64) {
	if len(prompt) == 0 || prompt[len(prompt)-1].tokens < shortestCached {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := len(prompt) - 1; i >= 0 && prompt[i].tokens >= shortestCached; i-- {
		if place, ok := c.known[prompt[i].digest]; ok {
			c.latest.MoveToFront(place)
			cached = prompt[i].tokens / cachedStep * cachedStep
			break
		}
	}
	whole := prompt[len(prompt)-1].digest
	if _, ok := c.known[whole]; ok {
		return cached
	}
	if c.known == nil {
		c.known = make(map[digest]*list.Element)
	}
	c.known[whole] = c.latest.PushFront(whole)
	if len(c.known) > limit {
		delete(c.known, c.latest.Remove(c.latest.Back()).(digest))
	}
	return cached
}

// useCache finds the prompt of an admitted request in the cache.
func (x *exchange) useCache() {
	switch x.route.op {
	case opChat, opCompletion, opResponse:
		if x.h.PromptCache > 0 {
			x.cached = x.limiter.prompts.use(x.request.prefixes(), x.h.PromptCache)
		}
	}
}

// firstTokenLatency is that of the prompt: what is cached takes less time.
func (x *exchange) firstTokenLatency() time.Duration {
	latency := float64(x.h.FirstTokenLatency)
	if x.cached > 0 {
		latency *= 1 - latencySaved*float64(x.cached)/float64(x.cost.prompt)
	}
	return time.Duration(latency)
}
