package metrics

import (
	"math"
	"net/http"
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

// Headers with the rest of a backend's limits: OpenAI's and Azure's, and Anthropic's.
// Azure has spelled its own in two ways.
var (
	remainingRequests = []string{"X-Ratelimit-Remaining-Requests", "X-Rate-Limit-Remaining-Requests", "Anthropic-Ratelimit-Requests-Remaining"}
	remainingTokens   = []string{"X-Ratelimit-Remaining-Tokens", "X-Rate-Limit-Remaining-Tokens", "Anthropic-Ratelimit-Tokens-Remaining"}
)

// utilization is Azure's header for provisioned throughput: `89.3%`, which may
// be over 100.
const utilization = "Azure-Openai-Deployment-Utilization"

// Saw records the limits of the backend in the header of a reply.
func (b *Backend) Saw(deployment string, header http.Header) {
	requests, hasRequests := verdict.HeaderNumber(header, remainingRequests...)
	tokens, hasTokens := verdict.HeaderNumber(header, remainingTokens...)
	used, hasUsed := verdict.HeaderNumber(header, utilization)
	if !hasRequests && !hasTokens && !hasUsed {
		return
	}
	last := b.last.of(deployment)
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
