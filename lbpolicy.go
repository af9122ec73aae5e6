package openailb

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

// loadPolicy loads the selection policy in the field LBPolicyRaw of module. It
// returns nil if there is none.
func loadPolicy(ctx caddy.Context, module any, raw json.RawMessage) (reverseproxy.Selector, error) {
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

// weightIgnored is the warning for weights next to a selection policy of
// reverse_proxy. These policies cannot read weights. A weight of 0 still drains a
// backend: the pool does that, not the policy.
const weightIgnored = "weight is ignored by lb_policy: leave one of them out"

// use has a policy of reverse_proxy's, if there is one, choose among the backends of
// a priority.
func (b *balancer) use(policy reverseproxy.Selector) {
	if policy != nil {
		b.Pool.Policy = func(r pool.Request, tier []*pool.Member) *pool.Member {
			return b.chooseByPolicy(policy, r.(*exchange), tier)
		}
	}
}

// chooseByPolicy asks a policy of reverse_proxy's to choose.
func (b *balancer) chooseByPolicy(policy reverseproxy.Selector, ex *exchange, tier []*pool.Member) *pool.Member {
	upstreams := make(reverseproxy.UpstreamPool, len(tier))
	for i, m := range tier {
		upstreams[i] = b.targets[m.Index].upstream
	}
	// the cookie of a backend that did not serve is not the client's to keep
	header := ex.writer.Header()
	if ex.cookies == nil {
		ex.cookies = &savedCookies{header["Set-Cookie"]}
	}
	if delete(header, "Set-Cookie"); len(ex.cookies.values) > 0 {
		header["Set-Cookie"] = slices.Clone(ex.cookies.values)
	}
	upstream := policy.Select(upstreams, ex.request, ex.writer)
	for i, m := range tier {
		if upstream != nil && upstreams[i] == upstream {
			return m
		}
	}
	return nil
}

// policyOption reads a selection policy of reverse_proxy.
func policyOption(into *json.RawMessage) directive.Option {
	const namespace = "http.reverse_proxy.selection_policies"
	return directive.Module[reverseproxy.Selector](into, namespace, "policy").
		Check(func() error { return checkPolicy(*into) })
}

// checkPolicy refuses selection policies that cannot choose among the backends
// of a priority.
func checkPolicy(raw json.RawMessage) error {
	var policy struct {
		Name string `json:"policy"`
	}
	if err := json.Unmarshal(raw, &policy); err != nil {
		return fmt.Errorf("lb_policy: %w", err)
	}
	switch policy.Name {
	case "openai_lb":
		return errors.New("lb_policy 'openai_lb' is not available here: expected one of reverse_proxy's own selection policies")
	case "weighted_round_robin":
		// Its weights belong to positions, which change: it sees only the
		// backends that are available now.
		return errors.New("lb_policy 'weighted_round_robin' is not available here: use the option weight of each backend or upstream instead")
	}
	return nil
}
