package openailb

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"
)

// member is a backend as a pool sees it.
type member struct {
	name        string
	priority    int
	weight      int
	maxRequests int64
	inFlight    *atomic.Int64 // with maxRequests
	upstream    *reverseproxy.Upstream
	health      *health
	logger      *zap.Logger

	// backend directs requests to it. It is nil in a plain reverse_proxy,
	// which does that by itself.
	backend *Backend
}

// pool is a set of members to choose from, in the order of their priorities.
type pool struct {
	members []*member
	// policy chooses within a priority. If nil: weighted random.
	policy reverseproxy.Selector
	// forward sends a request that all members throttle to the one that
	// returns soonest, in place of refusing it.
	forward bool
	// intN returns a random number below n.
	intN func(n int) int
}

func newPool(members []*member, policy reverseproxy.Selector, forward bool) *pool {
	slices.SortStableFunc(members, func(a, b *member) int { return a.priority - b.priority })
	return &pool{members: members, policy: policy, forward: forward, intN: rand.IntN}
}

// pick chooses the member that gets the request next and reserves a place at
// it, or returns nil if nobody is left.
func (p *pool) pick(ex *exchange) *member {
	for {
		now := time.Now()
		m, claim := p.choose(ex, now)
		if m == nil {
			return nil
		}
		if !m.reserve() {
			continue // another request took the last place
		}
		if claim && !m.claim(ex.model(m), now) {
			m.release()
			continue // another request is the probe
		}
		return m
	}
}

// choose finds the best member left for the exchange: an open one; then, the
// soonest to return first, a drained one or a suspect. claim tells that the
// member is open, so that after a bench only one request may go first.
func (p *pool) choose(ex *exchange, now time.Time) (m *member, claim bool) {
	if m = p.chooseOpen(ex, now); m != nil {
		return m, true
	}
	if m = p.soonest(ex, now, func(m *member) bool { return !m.promised(ex.model(m), now) }); m != nil {
		return m, false
	}
	if p.forward && !ex.forwarded {
		if m = p.soonest(ex, now, func(*member) bool { return true }); m != nil {
			ex.forwarded = true
			return m, false
		}
	}
	return nil, false
}

// chooseOpen picks by weight, in one pass, among the open members of the best
// priority that has any: each replaces the one chosen so far with the
// probability of its share of the weights seen.
func (p *pool) chooseOpen(ex *exchange, now time.Time) *member {
	var chosen *member
	var total int
	for _, m := range p.members {
		if chosen != nil && m.priority > chosen.priority {
			break
		}
		if m.weight == 0 || !m.open(ex.model(m), now) || !ex.mayTry(m) {
			continue
		}
		if total += m.weight; chosen == nil || p.intN(total) < m.weight {
			chosen = m
		}
	}
	if chosen != nil && p.policy != nil {
		return p.chooseByPolicy(ex, now, chosen)
	}
	return chosen
}

// chooseByPolicy asks the policy to pick among the members of a priority. A
// policy without an answer leaves the choice as it is.
func (p *pool) chooseByPolicy(ex *exchange, now time.Time, chosen *member) *member {
	var tier reverseproxy.UpstreamPool
	for _, m := range p.members {
		if m.priority == chosen.priority && m.weight > 0 && m.open(ex.model(m), now) && ex.mayTry(m) {
			tier = append(tier, m.upstream)
		}
	}
	upstream := p.policy.Select(tier, ex.request, ex.writer)
	for _, m := range p.members {
		if upstream != nil && m.upstream == upstream {
			return m
		}
	}
	return chosen
}

// soonest returns the eligible member that is back first.
func (p *pool) soonest(ex *exchange, now time.Time, eligible func(*member) bool) *member {
	var chosen *member
	var back time.Time
	for _, m := range p.members {
		if !eligible(m) || !ex.mayTry(m) {
			continue
		}
		if returns := m.returns(ex.model(m), now); chosen == nil || returns.Before(back) {
			chosen, back = m, returns
		}
	}
	return chosen
}

// wait tells in how long the first member that can serve the exchange is back.
func (p *pool) wait(ex *exchange, now time.Time) time.Duration {
	soonest := time.Duration(math.MaxInt64)
	for _, m := range p.members {
		if m.takes(&ex.asked) {
			soonest = min(soonest, max(0, m.returns(ex.model(m), now).Sub(now)))
		}
	}
	return soonest
}

// throttled reports whether any member keeps the exchange away for a throttle.
func (p *pool) throttled(ex *exchange, now time.Time) bool {
	return slices.ContainsFunc(p.members, func(m *member) bool {
		return m.takes(&ex.asked) && m.promised(ex.model(m), now)
	})
}

// open reports whether a request may go to the member like to any other.
func (m *member) open(model string, now time.Time) bool {
	for _, b := range m.health.of(model) {
		promise, _ := b.promise.state(now)
		suspicion, _ := b.suspicion.state(now)
		if promise != open || suspicion != open {
			return false
		}
	}
	return m.upstream.Healthy()
}

// promised reports whether the member asked not to be called yet.
func (m *member) promised(model string, now time.Time) bool {
	for _, b := range m.health.of(model) {
		if state, _ := b.promise.state(now); state == benched {
			return true
		}
	}
	return false
}

// returns tells when the member may be called at the latest.
func (m *member) returns(model string, now time.Time) time.Time {
	known := m.health.of(model)
	whole, its := known[0].returns(now), known[1].returns(now)
	if whole.After(its) {
		return whole
	}
	return its
}

// takes reports whether the member can be sent what is asked.
func (m *member) takes(a *asked) bool {
	return m.backend == nil || m.backend.takes(a)
}

// passesThrough reports whether the member gets the caller's own credential.
func (m *member) passesThrough() bool {
	return m.backend != nil && m.backend.auth == authPassthrough
}

func (m *member) full() bool {
	return m.maxRequests > 0 && m.inFlight.Load() >= m.maxRequests || m.upstream.Full()
}

// reserve takes one of the member's max_requests places.
func (m *member) reserve() bool {
	if m.maxRequests > 0 && m.inFlight.Add(1) > m.maxRequests {
		m.release()
		return false
	}
	return true
}

func (m *member) release() {
	if m.maxRequests > 0 {
		m.inFlight.Add(-1)
	}
}
