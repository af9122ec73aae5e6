package lbtest

import (
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// EntryOf returns a pool in use, as operators see it.
func EntryOf(pool string) *pools.Entry {
	for _, entry := range pools.Default.Entries() {
		if entry.Name == pool {
			return entry
		}
	}
	return nil
}

// LimitersOf returns the limiters of a pool in use.
func LimitersOf(pool string) *limiter.Limiters { return EntryOf(pool).Callers.(limiter.Set).Limiters() }
