package openailb

import (
	"encoding/json"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
)

// fallbackCountsNothing is the warning for a policy with a fallback that counts requests in flight.
const fallbackCountsNothing = "the fallback of lb_policy counts no requests of openai_lb, so it chooses at random: use it as the policy itself"

// hasCountingFallback reports whether a policy falls back to one that counts requests in flight.
func hasCountingFallback(raw json.RawMessage) bool {
	var policy struct {
		Fallback json.RawMessage `json:"fallback"`
	}
	if json.Unmarshal(raw, &policy) != nil || policy.Fallback == nil {
		return false
	}
	name := pools.PolicyName(policy.Fallback)
	return name == "least_conn" || name == "random_choose" || hasCountingFallback(policy.Fallback)
}

// policyOf has a policy choose among the backends of a priority for a request.
func policyOf(policy reverseproxy.Selector, ex *exchange) func([]*pool.Member) *pool.Member {
	return pools.Policy(policy, func(tier []*pool.Member) *pool.Member {
		return ex.cookies.Ask(policy, ex.intent.request, ex.writer, tier, func(m *pool.Member) *reverseproxy.Upstream { return ex.targets[m.Index].upstream })
	}, func(m *pool.Member) time.Duration {
		if !ex.intent.Body.Stream {
			return 0 // a reply that is not streamed takes longer the longer it is
		}
		t := ex.targets[m.Index]
		return t.firstByte(ex.intent.benchModel(t.backend)).At(time.Now())
	})
}

// firstByte returns the time to the first byte that counts for requests for a model. Models
// that clients made up have one in common.
func (t *target) firstByte(model string) *pulse.FirstByte {
	if !t.Knows(model) {
		model = ""
	}
	if known, ok := t.firstBytes.Load(model); ok {
		return known.(*pulse.FirstByte)
	}
	added, _ := t.firstBytes.LoadOrStore(model, new(pulse.FirstByte))
	return added.(*pulse.FirstByte)
}
