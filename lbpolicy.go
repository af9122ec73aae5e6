package openailb

import (
	"encoding/json"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
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
	})
}
