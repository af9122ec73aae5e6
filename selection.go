package openailb

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// Selection is a selection policy for a plain reverse_proxy. It chooses among
// the upstreams by priority and weight.
//
// Together with the openai_lb transport, it skips upstreams that throttle for
// as long as they asked. A throttled request fails over to another upstream.
// lb_retries and lb_try_duration limit that. Without them, a request may try
// every upstream.
type Selection struct {
	// Pool names the pool of upstreams in logs, metrics and the admin API. Two
	// pools may have the same name only if all of their options are the same.
	// Default: reverse_proxy.
	Pool string `json:"pool,omitempty"`

	// Upstreams sets the priority and the weight of upstreams, by dial address.
	// Default: priority 1 and weight 1 for all.
	Upstreams []SelectionUpstream `json:"upstreams,omitempty"`

	// LBPolicyRaw chooses among the upstreams of a priority. Default: at
	// random, by weight.
	LBPolicyRaw json.RawMessage `json:"lb_policy,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	policy      reverseproxy.Selector
	events      *observe.Events
	maxAttempts int
	tryDuration time.Duration
	// transport is the openai_lb transport of the same reverse_proxy. It is nil
	// if the proxy has another transport.
	transport *Transport

	// current is the group of the upstreams that were seen last.
	current atomic.Pointer[upstreamGroup]

	mu        sync.Mutex
	closed    bool
	addresses pools.Addresses
}

// SelectionUpstream is the priority and the weight of an upstream.
type SelectionUpstream struct {
	// Dial is the upstream's address, as in reverse_proxy. Required.
	Dial string `json:"dial"`

	// Priority ranks the upstream. Requests go to the upstreams with the lowest
	// number among those that can serve. It is 1 or more. Default: 1.
	Priority int `json:"priority,omitempty"`

	// Weight is the upstream's share of the requests within its priority. With
	// 0 the upstream is drained: it is used only when no other upstream is
	// left. Default: 1.
	Weight *int `json:"weight,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (*Selection) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.selection_policies.openai_lb",
		New: func() caddy.Module { return new(Selection) },
	}
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	lb_policy openai_lb {
//	    pool <name>
//	    upstream <dial> {
//	        priority <n>
//	        weight   <n>
//	    }
//	    lb_policy <name> [<args...>]
//	}
func (s *Selection) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{
		"pool": directive.String(&s.Pool),
		"upstream": directive.Func(func(d *caddyfile.Dispenser) error {
			var u SelectionUpstream
			if err := directive.Argument(d, &u.Dial); err != nil {
				return err
			}
			if slices.ContainsFunc(s.Upstreams, func(other SelectionUpstream) bool { return other.Dial == u.Dial }) {
				return d.WrapErr(errUpstreamTwice(u.Dial))
			}
			err := directive.Block(d, directive.Options{
				"priority": directive.Int(&u.Priority, 1, directive.MaxInt),
				"weight":   directive.IntPointer(&u.Weight, backend.MaxWeight),
			})
			s.Upstreams = append(s.Upstreams, u)
			return err
		}).Repeatable(),
		"lb_policy": pools.PolicyOption(&s.LBPolicyRaw),
	})
}

func errUpstreamTwice(dial string) error { return fmt.Errorf("upstream %s is given twice", dial) }

// Provision sets up the policy.
func (s *Selection) Provision(ctx caddy.Context) error {
	proxy := proxyAround(ctx.Modules())
	if err := s.provisionUpstreams(proxy); err != nil {
		return err
	}
	s.Pool = cmp.Or(s.Pool, "reverse_proxy")
	s.addresses.Forgotten = func(dial string) { metrics.Forget(s.Pool, dial) }
	err := pools.Default.Claim(ctx, s.Pool, s, proxy)
	if err != nil {
		return err
	}
	if s.events, err = observe.NewEvents(ctx, s.Pool); err != nil {
		return err
	}
	if err := metrics.Register(ctx.GetMetricsRegistry()); err != nil {
		return err
	}
	if s.policy, err = pools.LoadPolicy(ctx, s, s.LBPolicyRaw); err != nil {
		return err
	}
	if s.policy != nil && slices.ContainsFunc(s.Upstreams, func(u SelectionUpstream) bool { return *u.Weight > 1 }) {
		ctx.Logger().Warn(pools.WeightIgnored)
	}
	return s.takeOver(proxy)
}

// provisionUpstreams checks the options of upstreams and sets their defaults.
func (s *Selection) provisionUpstreams(proxy *reverseproxy.Handler) error {
	seen := make(map[string]bool)
	for i := range s.Upstreams {
		u := &s.Upstreams[i]
		u.Priority = cmp.Or(u.Priority, 1)
		if u.Weight == nil {
			u.Weight = new(1)
		}
		switch {
		case u.Dial == "":
			return fmt.Errorf("upstream %d has no dial address", i+1)
		case seen[u.Dial]:
			return errUpstreamTwice(u.Dial)
		}
		seen[u.Dial] = true
		if err := backend.CheckRank(u.Priority, *u.Weight); err != nil {
			return fmt.Errorf("upstream %s: %w", u.Dial, err)
		}
		if err := checkUpstream(proxy, u.Dial); err != nil {
			return err
		}
	}
	return nil
}

// maxDynamicAttempts limits the attempts if upstreams are dynamic, so that
// their number is not known.
const maxDynamicAttempts = 64

// takeOver makes the policy count the retries instead of its reverse_proxy, if
// that has an openai_lb transport. reverse_proxy would end the retries with its
// own error although the policy has kept an upstream's reply, and would not
// retry without lb_retries.
func (s *Selection) takeOver(proxy *reverseproxy.Handler) error {
	if !hasSelection(proxy) {
		return nil // this one is part of another policy
	}
	var ok bool
	if s.transport, ok = proxy.Transport.(*Transport); !ok {
		return nil
	}
	if err := checkRetries(proxy); err != nil {
		return err
	}
	lb := proxy.LoadBalancing
	if s.maxAttempts = lb.Retries + 1; lb.Retries <= 0 {
		s.maxAttempts = max(len(proxy.Upstreams), maxDynamicAttempts)
	}
	s.tryDuration = time.Duration(lb.TryDuration)
	lb.Retries, lb.TryDuration = s.maxAttempts, 0
	return nil
}

// Cleanup releases the health of the upstreams.
func (s *Selection) Cleanup() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if current := s.current.Load(); current != nil {
		current.close()
	}
	metrics.Left()
	s.closed = true
	return s.addresses.Close()
}

// Select implements reverseproxy.Selector.
func (s *Selection) Select(upstreams reverseproxy.UpstreamPool, r *http.Request,
	w http.ResponseWriter) *reverseproxy.Upstream {
	if len(upstreams) == 0 {
		return nil
	}
	p := s.requestOf(upstreams, r, w)
	next := p.next()
	if next == nil && s.transport == nil { // reverse_proxy decides whether to go on
		p.search.attempts = p.search.attempts[:0]
		next = p.next()
	}
	switch {
	case next != nil:
		return next.target.upstream
	case s.transport != nil:
		return answering
	}
	return nil
}

// upstreamGroup is a list of upstreams that reverse_proxy passes to the policy,
// and their pool.
type upstreamGroup struct {
	*balancer
	upstreams reverseproxy.UpstreamPool
	entitled  *affinity.Entitlement // to all of them
}

// countedUpstream is an upstream whose open requests reverse_proxy counts.
type countedUpstream struct{ *reverseproxy.Upstream }

// InFlight returns the number of requests that the upstream serves.
func (u countedUpstream) InFlight() int64 { return int64(u.Host.NumRequests()) }

// groupOf returns the group of the upstreams. reverse_proxy passes the same
// slice every time, unless the upstreams are dynamic.
func (s *Selection) groupOf(upstreams reverseproxy.UpstreamPool) *upstreamGroup {
	current := s.current.Load()
	if current != nil && len(current.upstreams) == len(upstreams) && &current.upstreams[0] == &upstreams[0] {
		return current
	}
	var targets []*target
	var backends []*backend.Backend
	for i, health := range s.addresses.Use(upstreams) {
		upstream := upstreams[i]
		m := pool.NewMember(upstream.Dial, health)
		m.Checks = countedUpstream{upstream}
		for _, u := range s.Upstreams {
			if u.Dial == upstream.Dial {
				m.Priority, m.Weight = u.Priority, *u.Weight
			}
		}
		b := &backend.Backend{Name: upstream.Dial} // that takes any request
		targets = append(targets, &target{Member: m, upstream: upstream, backend: b})
		backends = append(backends, b)
	}
	b := newBalancer(s.Pool, targets, nil, s.events)
	b.settings = settings{policy: s.policy, fields: attempt.All{}}
	if s.transport != nil {
		b.sender = s.transport.sender
	}
	g := &upstreamGroup{balancer: b, upstreams: upstreams, entitled: affinity.Entitle(nil, backends, nil)}
	s.replace(g)
	return g
}

func (g *upstreamGroup) close() {
	pools.Default.Remove(&g.Entry)
	g.Pool.Close()
}

// replace makes the group the current one. A group that is made after Cleanup
// serves only the request that it was made for.
func (s *Selection) replace(by *upstreamGroup) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		by.close()
		return
	}
	pools.Default.Add(&by.Entry)
	if current := s.current.Swap(by); current != nil {
		current.close()
	}
}

// Interface guards
var (
	_ caddyfile.Unmarshaler = (*Selection)(nil)
	_ caddy.Provisioner     = (*Selection)(nil)
	_ caddy.CleanerUpper    = (*Selection)(nil)
	_ reverseproxy.Selector = (*Selection)(nil)
)
