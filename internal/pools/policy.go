package pools

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// PolicyOption reads a selection policy.
func PolicyOption(into *json.RawMessage) directive.Option {
	const namespace = "http.reverse_proxy.selection_policies"
	return directive.Module[reverseproxy.Selector](into, namespace, "policy").
		Check(func() error { return checkPolicy(*into) })
}

// LoadPolicy loads the selection policy in the field LBPolicyRaw of module. It
// returns nil if there is none.
func LoadPolicy(ctx caddy.Context, module any, raw json.RawMessage) (reverseproxy.Selector, error) {
	if raw == nil {
		return nil, nil
	}
	if err := checkPolicy(raw); err != nil {
		return nil, err
	}
	value, err := ctx.LoadModule(module, "LBPolicyRaw")
	if err != nil {
		return nil, fmt.Errorf("lb_policy: %w", err)
	}
	return value.(reverseproxy.Selector), nil
}

// checkPolicy refuses selection policies that cannot choose among the members
// of a priority, and those that need cookies.
func checkPolicy(raw json.RawMessage) error {
	if setsCookies(raw) {
		return errors.New("lb_policy 'cookie' is not available here: clients of the API keep no cookies, so each request would start anew. The option affinity keeps a session at its backend")
	}
	switch name := PolicyName(raw); name {
	case "openai_lb":
		return errors.New("lb_policy 'openai_lb' is not available here: expected one of reverse_proxy's own selection policies")
	case "weighted_round_robin":
		// Its weights belong to positions, which change: it sees only the
		// members that are available now.
		return errors.New("lb_policy 'weighted_round_robin' is not available here: use the option weight of each backend or upstream instead")
	}
	return nil
}

// PolicyName returns the name of a policy. It is empty if there is none.
func PolicyName(raw json.RawMessage) string {
	var policy struct {
		Name string `json:"policy"`
	}
	_ = json.Unmarshal(raw, &policy) // LoadModule reports the error
	return policy.Name
}

// WeightIgnored is the warning for weights next to a selection policy of
// reverse_proxy. These policies cannot read weights. A weight of 0 still drains
// a member: the pool does that, not the policy.
const WeightIgnored = "weight is ignored by lb_policy: leave one of them out"

// FallbackCountsNothing is the warning for a policy with a fallback that counts
// requests in flight.
const FallbackCountsNothing = "the fallback of lb_policy counts no requests of openai_lb, so it chooses at random: use it as the policy itself"

// fallbackOf returns the policy that a policy uses where it cannot choose, or
// nil.
func fallbackOf(raw json.RawMessage) json.RawMessage {
	var policy struct {
		Fallback json.RawMessage `json:"fallback"`
	}
	_ = json.Unmarshal(raw, &policy) // LoadModule reports the error
	return policy.Fallback
}

// setsCookies reports whether a policy, or one that it falls back to, tells
// clients by cookies.
func setsCookies(raw json.RawMessage) bool {
	return raw != nil && (PolicyName(raw) == "cookie" || setsCookies(fallbackOf(raw)))
}

// HasCountingFallback reports whether a policy falls back to one that counts
// requests in flight.
func HasCountingFallback(raw json.RawMessage) bool {
	fallback := fallbackOf(raw)
	if fallback == nil {
		return false
	}
	name := PolicyName(fallback)
	return name == "least_conn" || name == "random_choose" || HasCountingFallback(fallback)
}

// Policy returns a function that chooses among the members of a priority by the
// selection policy. It returns nil for no policy. ask asks a policy that sees
// upstreams.
func Policy(policy reverseproxy.Selector, ask func([]*pool.Member) *pool.Member) func([]*pool.Member) *pool.Member {
	switch policy := policy.(type) {
	case nil:
		return nil
	case *reverseproxy.LeastConnSelection:
		return func(tier []*pool.Member) *pool.Member { return leastBusy(tier, len(tier)) }
	case *reverseproxy.RandomChoiceSelection:
		return func(tier []*pool.Member) *pool.Member { return leastBusy(tier, policy.Choose) }
	}
	return ask
}

// leastBusy returns the member with the fewest requests in flight, which the
// pool counts, among n that are picked at random. It does what least_conn and
// random_choose of reverse_proxy do with its own counts: it counts only
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
