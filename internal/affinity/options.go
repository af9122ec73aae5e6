// Package affinity sends related requests to one account. A stored response, a
// conversation, a file or a batch exists only in the account that created it,
// and only that account can serve requests for it.
//
// An [Affinity] belongs to a pool. It learns the ids of objects from replies as
// they pass, and remembers their owners in a store that outlives a reload. A
// [Placement] belongs to one request: it defines which accounts may get the
// request, and reads the reply. Bytes to and from clients stay unchanged.
//
// In addition, a [PromptCache] derives the session of a request from its
// headers or its body. Package pool then sends the requests of a session to one
// backend, if the choice is free: see pool.Affinity.
//
// Package ownership defines owners, accounts and callers.
//
// # Concurrent use
//
// An Affinity and a PromptCache are safe for concurrent use. A Placement
// belongs to the goroutine that serves its request, except for [Anywhere],
// which all requests without objects share and nothing changes.
package affinity

import (
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// Options configure how requests are sent to the accounts that store the
// objects which they name.
type Options struct {
	// Callers is `strict` if callers reach only objects that they made; all
	// other ids are a 404. Default: off.
	//
	// It requires client keys. Lists, and requests whose objects cannot be
	// seen, are refused.
	//
	//	callers strict
	Callers string `json:"callers,omitempty"`

	// PromptCache is whether sessions stay where their prompts are cached.
	// Default: on if the pool has several accounts and no `lb_policy`.
	//
	//	prompt_cache [<header...>]|off
	PromptCache *PromptCache `json:"prompt_cache,omitempty"`
}

const (
	// maxIDs is the maximum number of remembered ids, of about 100 bytes each.
	// The least recently seen ids are forgotten first. idTTL is how long an id
	// is remembered after it was last seen in a reply.
	maxIDs = 1_000_000
	idTTL  = 720 * time.Hour
)

// UnmarshalCaddyfile reads the block of the option affinity.
func (o *Options) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	if d.NextArg() {
		return d.Errf("unexpected argument '%s' after affinity, expected a block of callers or prompt_cache", d.Val())
	}
	return directive.Block(d, directive.Options{
		"callers":      directive.OneOf(&o.Callers, Strict),
		"prompt_cache": directive.Func(o.unmarshalPromptCache),
	})
}

func (o *Options) check() error {
	if o.Callers != "" && o.Callers != Strict {
		return fmt.Errorf("callers '%s' is not strict", o.Callers)
	}
	return nil
}
