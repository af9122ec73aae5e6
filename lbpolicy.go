package openailb

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
)

// loadPolicy loads the selection policy in the field LBPolicyRaw of module. It
// returns nil if there is none.
func loadPolicy(ctx caddy.Context, module any, raw json.RawMessage) (reverseproxy.Selector, error) {
	if raw == nil {
		return nil, nil
	}
	if err := checkPolicy(raw); err != nil {
		return nil, err
	}
	if policyName(raw) == firstByte {
		return byFirstByte{}, nil
	}
	value, err := ctx.LoadModule(module, "LBPolicyRaw")
	if err != nil {
		return nil, fmt.Errorf("lb_policy: %w", err)
	}
	return value.(reverseproxy.Selector), nil
}

// weightIgnored is the warning for weights next to a selection policy of
// reverse_proxy. These policies cannot read weights. A weight of 0 still drains a
// backend: the pool does that, not the policy.
const weightIgnored = "weight is ignored by lb_policy: leave one of them out"

// ignoresWeights reports whether it is one of these policies.
func ignoresWeights(policy reverseproxy.Selector) bool {
	return policy != nil && policy != byFirstByte{}
}

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
	name := policyName(policy.Fallback)
	return name == "least_conn" || name == "random_choose" || hasCountingFallback(policy.Fallback)
}

// use has a policy, if there is one, choose among the backends of a priority.
func (b *balancer) use(policy reverseproxy.Selector) {
	switch policy := policy.(type) {
	case nil:
	case byFirstByte:
		b.firstBytes, b.Pool.Policy = true, b.chooseByFirstByte
	case *reverseproxy.LeastConnSelection:
		b.Pool.Policy = func(_ pool.Request, tier []*pool.Member) *pool.Member { return leastBusy(tier, len(tier)) }
	case *reverseproxy.RandomChoiceSelection:
		b.Pool.Policy = func(_ pool.Request, tier []*pool.Member) *pool.Member { return leastBusy(tier, policy.Choose) }
	default:
		b.Pool.Policy = func(r pool.Request, tier []*pool.Member) *pool.Member {
			return b.chooseByPolicy(policy, r.(*exchange), tier)
		}
	}
}

// leastBusy returns the member with the fewest requests in flight, which the pool counts, among n that are picked at
// random. It does what least_conn and random_choose of reverse_proxy do with its own counts: it counts only
// requests of upstreams that it chooses itself.
func leastBusy(tier []*pool.Member, n int) *pool.Member {
	tier = slices.Clone(tier)
	var least *pool.Member
	for i := range min(n, len(tier)) {
		picked := i + int(pool.Random()*float64(len(tier)-i))
		tier[i], tier[picked] = tier[picked], tier[i]
		if least == nil || tier[i].InFlight() < least.InFlight() {
			least = tier[i] // of equals, the first of a random order
		}
	}
	return least
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

// firstByte is the name of a policy that is not one of reverse_proxy's. byFirstByte
// stands for it: only the balancer knows the times that it needs.
const firstByte = "first_byte"

type byFirstByte struct{ reverseproxy.Selector }

// chooseByFirstByte chooses by the times to the first byte of streams, and by the
// requests in flight. A reply that is not streamed takes longer the longer it is, so
// its time says nothing of the backend.
func (b *balancer) chooseByFirstByte(r pool.Request, tier []*pool.Member) *pool.Member {
	ex, now := r.(*exchange), time.Now()
	choices := make([]pulse.Choice, len(tier))
	for i, m := range tier {
		choices[i] = pulse.Choice{Weight: float64(max(1, m.Weight)), InFlight: m.InFlight()}
		if ex.api.Body.Stream {
			choices[i].FirstByte = b.targets[m.Index].firstByte(ex).At(now)
		}
	}
	return tier[pulse.Choose(choices, pool.Random)]
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

// policyOption reads a selection policy.
func policyOption(into *json.RawMessage) directive.Option {
	const namespace = "http.reverse_proxy.selection_policies"
	return directive.Module[reverseproxy.Selector](into, namespace, "policy", firstByte).
		Check(func() error { return checkPolicy(*into) })
}

// checkPolicy refuses selection policies that cannot choose among the backends
// of a priority.
func checkPolicy(raw json.RawMessage) error {
	switch policyName(raw) {
	case "openai_lb":
		return errors.New("lb_policy 'openai_lb' is not available here: expected one of reverse_proxy's own selection policies")
	case "weighted_round_robin":
		// Its weights belong to positions, which change: it sees only the
		// backends that are available now.
		return errors.New("lb_policy 'weighted_round_robin' is not available here: use the option weight of each backend or upstream instead")
	}
	return nil
}

// policyName returns the name of a policy. It is empty if there is none.
func policyName(raw json.RawMessage) string {
	var policy struct {
		Name string `json:"policy"`
	}
	_ = json.Unmarshal(raw, &policy) // LoadModule reports the error
	return policy.Name
}
