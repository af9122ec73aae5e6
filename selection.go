package openailb

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

func init() {
	caddy.RegisterModule(new(Selection))
}

// Selection is a selection policy for a plain reverse_proxy. It chooses among
// the upstreams by priority and weight.
//
// Together with the openai_lb transport, it skips upstreams that throttle for
// as long as they asked. A throttled request fails over to another upstream.
// lb_retries and lb_try_duration limit that. Without them, a request may try
// every upstream.
type Selection struct {
	// Pool names the pool of upstreams in logs, metrics and the admin API. No
	// two pools have the same name, unless all of their options are the same.
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
	// if that has another transport.
	transport *Transport

	// current is the balancer of the upstreams that were seen last.
	current atomic.Pointer[upstreamsBalancer]

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

// upstreamsBalancer is the balancer of upstreams.
type upstreamsBalancer struct {
	upstreams reverseproxy.UpstreamPool
	balancer  *balancer
}

// CaddyModule returns the Caddy module information.
func (*Selection) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.selection_policies.openai_lb",
		New: func() caddy.Module { return new(Selection) },
	}
}

func errUpstreamTwice(dial string) error { return fmt.Errorf("upstream %s is given twice", dial) }

// Provision sets up the policy.
func (s *Selection) Provision(ctx caddy.Context) error {
	proxy := proxyAround(ctx.Modules())
	seen := make(map[string]bool)
	for i := range s.Upstreams {
		u := &s.Upstreams[i]
		if u.Priority == 0 {
			u.Priority = 1
		}
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
	if s.policy, err = loadPolicy(ctx, s, s.LBPolicyRaw); err != nil {
		return err
	}
	if ignoresWeights(s.policy) && slices.ContainsFunc(s.Upstreams, func(u SelectionUpstream) bool { return *u.Weight > 1 }) {
		ctx.Logger().Warn(weightIgnored)
	}
	return s.takeOver(proxy)
}

// maxDynamicAttempts limits the attempts if upstreams are dynamic, so that
// their number is unknown.
const maxDynamicAttempts = 64

// takeOver makes this policy count the retries, if the reverse_proxy that it is
// part of has an openai_lb transport. Otherwise reverse_proxy would end them
// with an error of its own, although we have a backend's reply, and would make
// no retry without lb_retries.
func (s *Selection) takeOver(proxy *reverseproxy.Handler) error {
	if !hasSelection(proxy) {
		return nil // this one is part of another policy
	}
	var ok bool
	if s.transport, ok = proxy.Transport.(*Transport); !ok {
		return nil
	}
	lb := proxy.LoadBalancing
	if lb.RetryMatchRaw != nil {
		return errors.New("lb_retry_match is not allowed with the openai_lb transport, which classifies replies itself")
	}
	if option := passiveOption(proxy); option != "" {
		return fmt.Errorf("%s of reverse_proxy is not allowed with the openai_lb transport, because it would count each throttle as a failure: use the transport's own options", option)
	}
	if lb.Retries > 0 {
		s.maxAttempts = lb.Retries + 1
	} else {
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
		current.balancer.close()
		metrics.Left()
	}
	s.closed = true
	return s.addresses.Close()
}

// Select implements reverseproxy.Selector.
func (s *Selection) Select(upstreams reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	if len(upstreams) == 0 {
		return nil
	}
	ex := s.exchange(upstreams, r, w)
	t := ex.choose()
	switch {
	case t != nil:
		return t.upstream
	case s.transport != nil:
		return answering // the transport answers
	}
	// with another transport, reverse_proxy decides whether to go on
	ex.tries.attempts = ex.tries.attempts[:0]
	if t = ex.choose(); t == nil {
		return nil
	}
	return t.upstream
}

// exchange returns the exchange of the request. On the first attempt, it opens
// one and reads the body. That happens before an upstream is chosen, because
// the body may take long to arrive.
func (s *Selection) exchange(upstreams reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *exchange {
	if ex, ok := caddyhttp.GetVar(r.Context(), exchangeVar).(*exchange); ok && ex.request == r {
		return ex
	}
	ex := s.balancerOf(upstreams).newExchange(w, r, s.maxAttempts, s.tryDuration)
	// This is set once, before the first attempt: while a later attempt begins,
	// net/http may still dial for an earlier one and read the variables.
	caddyhttp.SetVar(r.Context(), exchangeVar, ex)
	if s.transport != nil {
		if isEchoOrTunnel(r) {
			ex.own = apierror.MethodNotAllowed.Answer(r)
		} else if err := ex.api.received.Buffer(r, s.transport.sender.RequestBuffers); err != nil {
			ex.own = apierror.UnreadableBody(err).Answer(r)
		}
		ex.api.parse(r, openaiapi.ParsePath(r.URL.EscapedPath()), nil)
		ex.api.Model, ex.api.Route.Deployment = "", "" // an upstream has no benches for models
	}
	return ex
}

// balancerOf returns the balancer of the upstreams. reverse_proxy passes the
// same slice every time, unless the upstreams are dynamic.
func (s *Selection) balancerOf(upstreams reverseproxy.UpstreamPool) *balancer {
	current := s.current.Load()
	if current != nil && len(current.upstreams) == len(upstreams) && &current.upstreams[0] == &upstreams[0] {
		return current.balancer
	}
	targets := make([]*target, len(upstreams))
	for i, health := range s.addresses.Use(upstreams) {
		upstream := upstreams[i]
		m := pool.NewMember(upstream.Dial, health)
		for _, u := range s.Upstreams {
			if u.Dial == upstream.Dial {
				m.Priority, m.Weight = u.Priority, *u.Weight
			}
		}
		m.Checks = plainUpstream{upstream}
		targets[i] = &target{Member: m, backend: anyBackend, upstream: upstream}
	}
	b := newBalancer(s.Pool, plainProxy{}, targets, s.events)
	b.use(s.policy)
	if s.transport != nil {
		b.useSender(s.transport.sender)
		b.forward = s.transport.sender.AllThrottled == attempt.ForwardThrottled
	}
	s.replace(&upstreamsBalancer{upstreams: upstreams, balancer: b})
	return b
}

// anyBackend stands for the upstreams of a plain reverse_proxy: it serves any model.
var anyBackend = new(backend.Backend)

// plainUpstream is an upstream of a plain reverse_proxy, which does not tell when
// a request is over, but counts them.
type plainUpstream struct{ *reverseproxy.Upstream }

// InFlight is how many requests the upstream serves.
func (u plainUpstream) InFlight() int64 { return int64(u.Host.NumRequests()) }

// replace makes the balancer the current one. If it comes after Cleanup, it
// serves only the request that it was made for.
func (s *Selection) replace(by *upstreamsBalancer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		by.balancer.close()
		return
	}
	by.balancer.open()
	if current := s.current.Swap(by); current != nil {
		current.balancer.close()
	}
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Selection)(nil)
	_ caddy.CleanerUpper    = (*Selection)(nil)
	_ reverseproxy.Selector = (*Selection)(nil)
)
