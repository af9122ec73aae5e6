// Package affinity sends related requests to one account. A stored response, a
// conversation, a file or a batch exists only in the account that created it,
// and only that account can serve requests for it.
//
// An [Affinity] belongs to a pool. It learns the ids of objects from replies as
// they pass, and remembers their owners in a store that outlives a reload. A
// [Placement] belongs to one request: it defines which accounts may get the request,
// and reads the reply. Bytes to and from clients stay unchanged.
//
// In addition, a [PromptCache] sends the requests of one session to one backend,
// if the choice is free.
//
// Package owners defines the words.
package affinity

import (
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/owners"
)

// Options configure how requests are sent to the accounts that store the
// objects which they name.
type Options struct {
	// IDs is how many ids of stored objects are remembered. The least recently
	// seen are forgotten first. An id takes about 100 bytes. It is 64 to
	// 100000000, or 0 to remember none: then any backend may get any request.
	// Default: 1000000.
	IDs *int `json:"ids,omitempty"`

	// IDsTTL is how long an id is remembered after it was last seen in a reply.
	// Default: 720h.
	IDsTTL caddy.Duration `json:"ids_ttl,omitempty"`

	// LookupTimeout is how long a request waits at most for the answer of other
	// replicas, if it names an id that this replica does not know. Only a pool
	// with `state` asks. It is 1s at most. Default: 50ms.
	LookupTimeout caddy.Duration `json:"lookup_timeout,omitempty"`

	// Save keeps the ids in Caddy's storage, so that they are still known after
	// a restart. They are written every five minutes and at the end. Only digests
	// of ids, accounts and callers' names are written, and no keys.
	// Default: false.
	Save bool `json:"save,omitempty"`

	// Callers is `strict` if a caller is to reach only the objects that it made
	// through this pool, and to get a 404 for all others. It requires client keys,
	// and `save` or `state`, because callers reach only remembered ids. Lists, and
	// requests whose objects cannot be seen, are refused. Default: a caller
	// reaches all objects except those that are known to be another caller's.
	Callers string `json:"callers,omitempty"`

	// PromptCache sends the requests of a session to the backend whose cache
	// contains the beginning of their prompts. Default: off.
	PromptCache *PromptCache `json:"prompt_cache,omitempty"`
}

const (
	defaultIDs = 1_000_000
	maxIDs     = 100_000_000
	defaultTTL = 720 * time.Hour

	defaultLookupTimeout = 50 * time.Millisecond
	maxLookupTimeout     = time.Second
)

// UnmarshalCaddyfile reads the block of the option affinity, of which the comment of the
// handler's UnmarshalCaddyfile has the syntax.
func (o *Options) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Block(d, directive.Options{
		"ids":     directive.IntPointer(&o.IDs, maxIDs).Check(o.checkIDs),
		"ids_ttl": directive.Duration(&o.IDsTTL),

		"lookup_timeout": directive.Duration(&o.LookupTimeout),

		"save":    directive.Flag(&o.Save),
		"callers": directive.OneOf(&o.Callers, Strict),

		"prompt_cache": directive.Func(o.unmarshalPromptCache),
	}.Check(func() error {
		checked := *o
		return checked.provision()
	}))
}

func (o *Options) checkIDs() error {
	if n := *o.IDs; n != 0 && n < owners.Fewest || n > maxIDs {
		return fmt.Errorf("ids '%d' is not 0, or a whole number from %d to %d", n, owners.Fewest, maxIDs)
	}
	return nil
}

func (o *Options) provision() error {
	if o.IDs == nil {
		o.IDs = new(defaultIDs)
	}
	if err := directive.DefaultDuration("ids_ttl", &o.IDsTTL, defaultTTL); err != nil {
		return err
	}
	if err := directive.DefaultDuration("lookup_timeout", &o.LookupTimeout, defaultLookupTimeout); err != nil {
		return err
	}
	if time.Duration(o.LookupTimeout) > maxLookupTimeout {
		return fmt.Errorf("lookup_timeout '%s' is longer than %s", time.Duration(o.LookupTimeout), maxLookupTimeout)
	}
	if o.Save && *o.IDs == 0 {
		return fmt.Errorf("save has no effect with ids 0")
	}
	switch {
	case o.Callers != "" && o.Callers != Strict:
		return fmt.Errorf("callers '%s' is not strict", o.Callers)
	case o.Callers == Strict && *o.IDs == 0:
		return fmt.Errorf("callers strict has no effect with ids 0")
	}
	return o.checkIDs()
}
