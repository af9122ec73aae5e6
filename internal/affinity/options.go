// Package affinity keeps together what belongs together.
package affinity

import (
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// Options say which requests are kept together.
type Options struct {
	// PromptCache sends the requests of a session to the backend whose cache has
	// the beginning of their prompts. Default: off.
	PromptCache *PromptCache `json:"prompt_cache,omitempty"`
}

// UnmarshalCaddyfile reads the block of the option affinity. Syntax:
//
//	affinity {
//	    prompt_cache [<header...>]
//	}
func (o *Options) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Block(d, directive.Options{
		"prompt_cache": directive.Func(o.unmarshalPromptCache),
	})
}
