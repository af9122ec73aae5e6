package openailb

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
)

func init() {
	caddy.RegisterModule(new(Selection))
}

// Selection is a policy for a plain reverse_proxy: it chooses among upstreams
// by priority and weight. Together with the openai_lb transport it leaves out
// those that throttle, for as long as they asked to, and moves a request that
// meets one to the next. lb_retries and lb_try_duration limit that; without
// them, a request may try every upstream.
type Selection struct {
	// Upstreams gives priorities and weights to upstreams, by their dial
	// address. Default: priority 1 and weight 1 for all.
	Upstreams []SelectionUpstream `json:"upstreams,omitempty"`

	// LBPolicyRaw chooses among the upstreams of a priority. Default: at
	// random, by weight.
	LBPolicyRaw json.RawMessage `json:"lb_policy,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	policy      reverseproxy.Selector
	logger      *zap.Logger
	maxAttempts int
	tryDuration time.Duration
	// transport is the one of the same reverse_proxy, if it is an openai_lb.
	transport *Transport

	// cached is the pool of the upstreams seen last.
	cached atomic.Pointer[cachedPool]

	mu      sync.Mutex
	healths map[string]*health // by dial address
}

// SelectionUpstream is what an upstream means to the selection.
type SelectionUpstream struct {
	// Dial is the upstream's address, as in reverse_proxy. Required.
	Dial string `json:"dial"`

	// Priority ranks the upstream: those with the lowest number that can
	// serve get the requests. 1 or more. Default: 1.
	Priority int `json:"priority,omitempty"`

	// Weight is the upstream's share of the requests within its priority. 0
	// drains it. Default: 1.
	Weight *int `json:"weight,omitempty"`
}

// cachedPool is the pool made of upstreams.
type cachedPool struct {
	upstreams reverseproxy.UpstreamPool
	pool      *pool
}

// CaddyModule returns the Caddy module information.
func (*Selection) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.selection_policies.openai_lb",
		New: func() caddy.Module { return new(Selection) },
	}
}

// Provision sets up the policy.
func (s *Selection) Provision(ctx caddy.Context) error {
	s.logger = ctx.Logger()
	s.healths = make(map[string]*health)
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
			return fmt.Errorf("upstream %d: expected a dial address", i+1)
		case seen[u.Dial]:
			return fmt.Errorf("upstream %s is there twice", u.Dial)
		}
		seen[u.Dial] = true
		if err := checkRank(u.Priority, *u.Weight); err != nil {
			return fmt.Errorf("upstream %s: %w", u.Dial, err)
		}
	}
	if s.LBPolicyRaw != nil {
		module, err := ctx.LoadModule(s, "LBPolicyRaw")
		if err != nil {
			return fmt.Errorf("lb_policy: %w", err)
		}
		s.policy = module.(reverseproxy.Selector)
	}
	return s.takeOver(ctx.Modules())
}

// maxAttemptsElsewhere limits the attempts at upstreams that come and go.
const maxAttemptsElsewhere = 64

// takeOver makes the retries of the reverse_proxy that this policy and an
// openai_lb transport are part of their own: it would end them with an error
// of its own, where they know the backend's reply, and without lb_retries it
// would make none.
func (s *Selection) takeOver(modules []caddy.Module) error {
	if len(modules) < 2 {
		return nil
	}
	proxy, ok := modules[len(modules)-2].(*reverseproxy.Handler)
	if !ok || proxy.LoadBalancing == nil {
		return nil
	}
	if s.transport, ok = proxy.Transport.(*Transport); !ok {
		return nil
	}
	lb := proxy.LoadBalancing
	if lb.RetryMatchRaw != nil {
		return errors.New("lb_retry_match is not allowed with the openai_lb transport, which judges replies itself")
	}
	if lb.Retries > 0 {
		s.maxAttempts = lb.Retries + 1
	} else {
		s.maxAttempts = max(len(proxy.Upstreams), maxAttemptsElsewhere)
	}
	s.tryDuration = time.Duration(lb.TryDuration)
	lb.Retries, lb.TryDuration = s.maxAttempts, 0
	return nil
}

// Cleanup gives back what is known of the upstreams.
func (s *Selection) Cleanup() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for dial := range s.healths {
		_, err := healths.Delete(dial)
		errs = append(errs, err)
	}
	s.healths = nil
	return errors.Join(errs...)
}

// Select implements reverseproxy.Selector.
func (s *Selection) Select(upstreams reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	if len(upstreams) == 0 {
		return nil
	}
	ex := s.exchange(upstreams, r, w)
	if m := ex.take(); m != nil {
		return m.upstream
	}
	if s.transport != nil && len(ex.attempts) == 0 {
		return upstreams[0] // the transport calls nobody, and says why
	}
	return nil
}

// exchange returns the exchange of the request, which it opens if need be.
func (s *Selection) exchange(upstreams reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *exchange {
	if ex, ok := caddyhttp.GetVar(r.Context(), exchangeVar).(*exchange); ok && ex.request == r {
		return ex
	}
	ex := newExchange(s.poolOf(upstreams), w, r, s.maxAttempts, s.tryDuration)
	ex.transport, ex.bodyPending = s.transport, true
	// set once, before the first attempt: net/http may still read the
	// request's variables, in a dial of its own, while another attempt begins
	caddyhttp.SetVar(r.Context(), exchangeVar, ex)
	ex.next()
	return ex
}

// poolOf returns the pool of the upstreams, which reverse_proxy passes as the
// same slice every time, unless they are dynamic.
func (s *Selection) poolOf(upstreams reverseproxy.UpstreamPool) *pool {
	cached := s.cached.Load()
	if cached != nil && len(cached.upstreams) == len(upstreams) && &cached.upstreams[0] == &upstreams[0] {
		return cached.pool
	}
	members := make([]*member, len(upstreams))
	for i, upstream := range upstreams {
		members[i] = &member{name: upstream.Dial, priority: 1, weight: 1,
			upstream: upstream, health: s.healthOf(upstream.Dial), logger: s.logger}
		for _, u := range s.Upstreams {
			if u.Dial == upstream.Dial {
				members[i].priority, members[i].weight = u.Priority, *u.Weight
			}
		}
	}
	forward := s.transport != nil && s.transport.AllThrottled == forwardThrottled
	p := newPool(members, s.policy, forward)
	s.cached.Store(&cachedPool{upstreams: upstreams, pool: p})
	return p
}

// healthOf returns what is known of the upstream at a dial address.
func (s *Selection) healthOf(dial string) *health {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, ok := s.healths[dial]
	if s.healths == nil {
		return new(health) // a late request: the config is gone already
	}
	if !ok {
		h = loadHealth(dial)
		s.healths[dial] = h
	}
	return h
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Selection)(nil)
	_ caddy.CleanerUpper    = (*Selection)(nil)
	_ caddyfile.Unmarshaler = (*Selection)(nil)
	_ reverseproxy.Selector = (*Selection)(nil)
)
