package openailb

import (
	"encoding/json"
	"slices"
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

// use has a policy, if there is one, choose among the backends of a priority.
func (b *balancer) use(policy reverseproxy.Selector) {
	b.firstBytes = pools.IsFirstByte(policy)
	b.Pool.Policy = pools.Policy(policy, func(r pool.Request, tier []*pool.Member) *pool.Member {
		return b.chooseByPolicy(policy, r.(*exchange), tier)
	}, func(r pool.Request, m *pool.Member) time.Duration {
		ex := r.(*exchange)
		if !ex.api.Body.Stream {
			return 0 // a reply that is not streamed takes longer the longer it is
		}
		return b.targets[m.Index].firstByte(ex).At(time.Now())
	})
}

// chooseByPolicy asks a policy of reverse_proxy's to choose.
func (b *balancer) chooseByPolicy(policy reverseproxy.Selector, ex *exchange, tier []*pool.Member) *pool.Member {
	upstreams := make(reverseproxy.UpstreamPool, len(tier))
	for i, m := range tier {
		upstreams[i] = b.targets[m.Index].upstream
	}
	if ex.cookies == nil {
		ex.cookies = &savedCookies{ex.writer.Header()["Set-Cookie"]}
	}
	ex.dropCookies()
	upstream := policy.Select(upstreams, ex.request, ex.writer)
	for i, m := range tier {
		if upstream != nil && upstreams[i] == upstream {
			return m
		}
	}
	return nil
}

// dropCookies takes back the cookies of a policy: that of a backend that did not
// serve is not the client's to keep.
func (ex *exchange) dropCookies() {
	if ex.cookies == nil {
		return
	}
	header := ex.writer.Header()
	if delete(header, "Set-Cookie"); len(ex.cookies.values) > 0 {
		header["Set-Cookie"] = slices.Clone(ex.cookies.values)
	}
}

// firstByte returns the time to the first byte that counts for the request. Models
// that clients made up have one in common.
func (t *target) firstByte(ex *exchange) *pulse.FirstByte {
	model := ex.benchModel(t.backend)
	if !t.Knows(model) {
		model = ""
	}
	if known, ok := t.firstBytes.Load(model); ok {
		return known.(*pulse.FirstByte)
	}
	added, _ := t.firstBytes.LoadOrStore(model, new(pulse.FirstByte))
	return added.(*pulse.FirstByte)
}
