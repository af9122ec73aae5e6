package affinity

import (
	"fmt"
	"net/http"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/cespare/xxhash/v2"
	"golang.org/x/net/http/httpguts"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// PromptCache sends requests of one key to one backend, within the priority and
// the weights that the other options give. Backends that cool down, are full or
// do not have the model stay excluded: keys only change the order of the
// others. No backend gets more than 1.25 times its fair share of the requests
// in flight (rounded up, and one more; while there are few, three more than its
// share). If a session has to move to another backend, it stays there until it
// was idle for 10 minutes, or a better priority is back. If it moved because of
// a throttle, it returns while the other backend gets more than its share of
// the last minute's requests.
//
// The key is the first of these that a request has: a header named here, the
// body's prompt_cache_key, its conversation, and a digest of the part that
// stays the same from turn to turn: the model, the instructions, the tools and
// the messages up to the user's first one, or the beginning of a prompt of
// completions. The digest requires a request of at least 4 KiB: providers cache
// no prompts of less than 1,024 tokens. lb_policy applies to requests without a
// key.
type PromptCache struct {
	// Off turns it off where it is on by default. Default: false.
	Off bool `json:"off,omitempty"`

	// Headers are the names of headers whose value is a key, such as a
	// session's id. The first one that a request has counts. Default: none.
	Headers []string `json:"headers,omitempty"`

	// name is the key of relocations in the usage pool.
	name        string
	relocations *pool.Relocations
}

func (o *Options) unmarshalPromptCache(d *caddyfile.Dispenser) error {
	c := &PromptCache{Headers: d.RemainingArgs()}
	if slices.Equal(c.Headers, []string{"off"}) {
		c = &PromptCache{Off: true}
	}
	o.PromptCache = c
	if err := c.check(); err != nil {
		return d.WrapErr(err)
	}
	return nil
}

func (c *PromptCache) check() error {
	for i, name := range c.Headers {
		if !httpguts.ValidHeaderFieldName(name) {
			return fmt.Errorf("prompt_cache '%s' is not the name of a header, such as X-Session-Id", name)
		}
		if slices.ContainsFunc(c.Headers[:i], func(other string) bool {
			return http.CanonicalHeaderKey(other) == http.CanonicalHeaderKey(name)
		}) {
			return fmt.Errorf("prompt_cache: header '%s' is given twice", name)
		}
	}
	return nil
}

// relocations keeps the relocations of each pool through config reloads.
var relocations = caddy.NewUsagePool()

// OpenPromptCache turns on the prompt cache of the pool with this name.
// fallback applies if the options do not set a prompt cache. It may be nil. The
// result must be closed. It is nil if there is no prompt cache.
func (o *Options) OpenPromptCache(name string, p *pool.Pool, fallback *PromptCache) (*PromptCache, error) {
	options := fallback
	if o != nil && o.PromptCache != nil {
		options = o.PromptCache
	}
	if options == nil || options.Off {
		return nil, nil
	}
	if err := options.check(); err != nil {
		return nil, fmt.Errorf("affinity: %w", err)
	}
	c := &PromptCache{name: name}
	for _, header := range options.Headers {
		c.Headers = append(c.Headers, http.CanonicalHeaderKey(header))
	}
	value, _, _ := relocations.LoadOrNew(name, func() (caddy.Destructor, error) { return new(pool.Relocations), nil })
	c.relocations = value.(*pool.Relocations)
	p.Relocations = c.relocations
	return c, nil
}

// Close releases the resources that OpenPromptCache acquired.
func (c *PromptCache) Close() error {
	if c == nil {
		return nil
	}
	_, err := relocations.Delete(c.name)
	return err
}

// Key returns the key of a request for a model. It returns 0 if the request has
// none.
func (c *PromptCache) Key(header http.Header, operation, model string, p *openaiapi.Prompt, bodyLength int64) uint64 {
	if c == nil || !openaiapi.CachesPrompts(operation) {
		return 0
	}
	key := p.Key(bodyLength)
	for _, name := range c.Headers {
		if values := header[name]; len(values) > 0 && values[0] != "" {
			key = xxhash.Sum64String(values[0])
			break
		}
	}
	if key == 0 {
		return 0
	}
	return max(1, key^xxhash.Sum64String(model)) // no model knows what another one has cached
}
