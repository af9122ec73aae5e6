package metrics

import (
	"math"
	"sync/atomic"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// lastSeen has the latest values of a backend's limits.
type lastSeen struct{ requests, tokens, utilization number }

// number is a number that may not be known yet.
type number struct {
	bits  atomic.Uint64
	known atomic.Bool
}

func (n *number) set(value float64) {
	n.bits.Store(math.Float64bits(value))
	n.known.Store(true)
}

func (n *number) value() float64 { return math.Float64frombits(n.bits.Load()) }

// Saw records the backend's limits from a reply.
func (b *Backend) Saw(deployment string, rates verdict.Rates) {
	requests, hasRequests := rates.Requests.Remaining.Number()
	tokens, hasTokens := rates.Tokens.Remaining.Number()
	used, hasUsed := rates.Utilization.Number()
	if !hasRequests && !hasTokens && !hasUsed {
		return
	}
	last := b.last.getOrAdd(deployment)
	if hasRequests {
		last.requests.set(requests)
	}
	if hasTokens {
		last.tokens.set(tokens)
	}
	if hasUsed {
		last.utilization.set(used / 100)
	}
}
