package pool

import (
	"math"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Quota returns the meter of a model at the member. It returns nil for a model
// that the member does not know, because clients can make up names.
func (m *Member) Quota(model string) *quota.Meter {
	q := m.quotaOf(model)
	if q == nil && (m.SharedLimits || m.Knows(model)) {
		return m.health.quotas.Make(m.limitKey(model))
	}
	return q
}

// allModels is the key of the meter of limits that all models share.
const allModels = "*"

// limitKey returns the key of a model's meter.
func (m *Member) limitKey(model string) string {
	if m.SharedLimits {
		return allModels
	}
	return ModelKey(model)
}

// Deduct subtracts a request that is sent to the member from the remaining
// limits of the model. Without a meter, it does nothing: the zero Mark that it
// then returns has no effect either.
func (m *Member) Deduct(model string, cost int64) quota.Mark {
	if q := m.Quota(model); q != nil {
		return q.Deduct(cost)
	}
	return quota.Mark{}
}

// DeductFor does the same as Deduct, and counts the cost in the use of the
// request's tier, for the shares of tiers.
func (m *Member) DeductFor(model string, cost int64, tier int, now time.Time) quota.Mark {
	if q := m.Quota(model); q != nil {
		return q.DeductFor(tier, cost, now)
	}
	return quota.Mark{}
}

// TierCosts returns how much each tier has got lately, by the member's models.
// Models of which no tier has got anything are left out.
func (m *Member) TierCosts(now time.Time) map[string]quota.TierCosts {
	return m.health.quotas.TierCosts(now)
}

// learnCooldown records a cooldown of a model in its meter.
func (m *Member) learnCooldown(c *Cooldown, remote bool, now time.Time) {
	if q := m.meterOf(c); q != nil {
		q.CoolDown(c.learned(remote), now)
		if c.Throttle {
			m.seeShortage(q, c.Until, now)
		}
		m.health.paces.Store(true)
	}
}

// unlearnCooldown records that a cooldown was disproved.
func (m *Member) unlearnCooldown(c *Cooldown, now time.Time) {
	if q := m.meterOf(c); q != nil {
		q.Disprove(c.learned(false), now)
	}
}

// meterOf returns the meter of the model that a cooldown covers. It returns nil
// if there is no meter, or unless the cooldown covers exactly the requests of
// the usual service tiers for one model: other cooldowns say nothing about the
// model's limits.
func (m *Member) meterOf(c *Cooldown) *quota.Meter {
	if c.Whole || c.Unreachable || c.Operation != "" || c.Tiers != UsualTiers {
		return nil
	}
	return m.quotaOf(c.Model)
}

// learned returns the parts of the cooldown from which a meter learns.
func (c *Cooldown) learned(remote bool) quota.Cooldown {
	return quota.Cooldown{Since: c.Since, Until: c.Until, Throttle: c.Throttle, Named: c.Guess == 0, Remote: remote}
}

// isPaused reports whether the request should pass the member over while
// another one can serve it: see [quota.Meter.IsFull].
func (m *Member) isPaused(r *Ask, now time.Time) bool {
	if !m.health.paces.Load() || !m.pool.Steers {
		return false
	}
	q := m.limitOf(r, r.At[m.Index].Model)
	return q != nil && q.IsFull(quota.At(now))
}

// isSpent reports whether the pool steers by limits, and the limits of the
// model at the member have no room for the request.
func (p *Pool) isSpent(m *Member, r *Ask, now quota.Instant) bool {
	if !p.Steers {
		return false
	}
	q := m.limitOf(r, r.At[m.Index].Model)
	return q != nil && !q.HasRoom(r.Cost, now)
}

// findSteered fills r.Steered with the members that would have been as good as
// the chosen one, or better, if their limits had room.
func (p *Pool) findSteered(r *Ask, best grade, now time.Time) {
	for _, m := range p.Members {
		spent := grade{best.rank, best.priority, true}
		if !best.spent && p.isOf(spent, m, r, now) ||
			best.rank == open && m.Priority <= best.priority && m.rank(r, now) == paused {
			r.Steered = append(r.Steered, m)
		}
	}
}

// quotaOf returns the meter of a model at the member, or nil. A valid name of
// ordinary length is the same as its key.
func (m *Member) quotaOf(model string) *quota.Meter {
	if m.SharedLimits || len(model) > maxModelName {
		model = m.limitKey(model)
	}
	return m.health.quotas.Of(model)
}

// limitOf returns the meter of the limits that the request uses up at the
// member. It returns nil if there is no meter, or if the request's service tier
// has separate limits, which are not metered.
func (m *Member) limitOf(r *Ask, model string) *quota.Meter {
	if r.At[m.Index].Tiers.HaveOwnLimits() {
		return nil
	}
	return m.quotaOf(model)
}

// Demand records that the request's tier is active for its model, so that other
// tiers leave the tier's share free.
func (p *Pool) Demand(r *Ask, now time.Time) {
	for _, m := range p.Members {
		if model, ok := r.modelAt(m); ok && !r.At[m.Index].Tiers.HaveOwnLimits() {
			if q := m.Quota(model); q != nil {
				q.Ask(r.Tier.Number, now)
			}
		}
	}
}

// DemandShare records that a caller asks for the request's model, so that the
// request leaves other callers their shares.
func (p *Pool) DemandShare(r *Ask, id quota.CallerID, now time.Time) {
	var members uint64
	shared := true
	for _, m := range p.Members {
		if at := &r.At[m.Index]; at.takes() && !at.Tiers.HaveOwnLimits() {
			members |= 1 << (m.Index % 64)
			shared = shared && m.SharedLimits
		}
	}
	if members == 0 {
		return // no other request could leave it anything
	}
	if shared {
		id.Model = 0
	}
	r.Demand = &Demand{use: p.Callers.Ask(id, members, r.Cost, now), dues: make([]float64, len(r.At))}
}

// Get counts the cost of a request that is sent. A negative cost is that of one
// that was not executed. A nil Demand counts nothing.
func (d *Demand) Get(cost int64, now time.Time) {
	if d != nil {
		d.got += cost
		d.use.Get(cost, now)
	}
}

// Withdraw records that a request that got nothing would not have been served
// by more capacity either, so that it is due nothing. A nil Demand counts
// nothing.
func (d *Demand) Withdraw(cost int64, now time.Time) {
	if d != nil && d.got == 0 {
		d.use.Withdraw(cost, now)
	}
}

// find finds out what other callers are due.
func (d *Demand) find(now quota.Instant) {
	if d == nil {
		return
	}
	clear(d.dues)
	for members, part := range d.use.Dues(now) {
		for i := range d.dues {
			d.dues[i] += part * float64(members>>(i%64)&1)
		}
	}
}

// due returns the part of a member that other callers are due.
func (d *Demand) due(m *Member) float64 {
	if d == nil {
		return 0
	}
	return d.dues[m.Index]
}

// seeShortage records that the member has no room until end, so that callers
// share it.
func (m *Member) seeShortage(q *quota.Meter, end, now time.Time) {
	if m.pool.Callers != nil {
		m.pool.Callers.SeeThrottle(q.Window(now), end, now)
	}
}

// PassedOver reports whether the rest of the member's limits is reserved for
// other tiers, or due to other callers.
func (m *Member) PassedOver(r *Ask, now time.Time) bool {
	return r.At[m.Index].takes() && m.isReserved(r, now)
}

// isReserved reports whether the rest of the model's limits at the member is
// reserved for other tiers, and the request's tier has used up its own share,
// or whether it is due to other callers. The answer is cached for one instant.
func (m *Member) isReserved(r *Ask, now time.Time) bool {
	if r.Tier.Shares == nil && r.Demand == nil {
		return false
	}
	instant := quota.At(now)
	if r.shares.at != instant {
		r.shares = shares{at: instant}
		for i := range r.At {
			r.At[i].reserved = unasked
		}
		r.Demand.find(instant)
	}
	at := &r.At[m.Index]
	if at.reserved == unasked {
		at.reserved = no
		if q := m.limitOf(r, at.Model); q != nil {
			group, tiers := q.Kept(r.Tier, instant)
			callers := r.Demand.due(m)
			if !q.Leaves(tiers+callers, r.Cost, instant) &&
				(callers > 0 || !r.Tier.KeepsShare() || !m.pool.isWithinShare(r, group, instant)) {
				at.reserved = yes
				// where limits are named, shares may prevent all throttles
				m.seeShortage(q, now, now)
			}
		}
	}
	return at.reserved == yes
}

// isWithinShare reports whether the request's tier has got no more than its
// share of all members of a group. The answer is cached for one instant.
func (p *Pool) isWithinShare(r *Ask, group quota.Group, now quota.Instant) bool {
	s := &r.shares
	i := slices.IndexFunc(s.groups[:], func(known quota.Group) bool { return known == group || known == 0 })
	if i >= 0 && s.groups[i] == group {
		return s.isWithin[i]
	}
	got := quota.Got{Group: group}
	for _, m := range p.Members {
		if q := m.quotaFor(r); q != nil && !m.repeats(q, r) {
			got.Add(q, r.Tier, now)
		}
	}
	isWithin := got.IsWithinShare(r.Tier)
	if i >= 0 {
		s.groups[i], s.isWithin[i] = group, isWithin
	}
	return isWithin
}

// repeats reports whether an earlier member with the same backend has the same
// meter, so that the meter is counted once.
func (m *Member) repeats(q *quota.Meter, r *Ask) bool {
	for other := m.before; other != nil; other = other.before {
		if other.quotaFor(r) == q {
			return true
		}
	}
	return false
}

// quotaFor returns the meter of the request's model at the member. It returns
// nil if there is no meter, or if the request cannot be sent to the member.
func (m *Member) quotaFor(r *Ask) *quota.Meter {
	if model, ok := r.modelAt(m); ok {
		return m.limitOf(r, model)
	}
	return nil
}

// quotaWait returns how long the shares of other tiers and callers keep the
// request away.
func (m *Member) quotaWait(r *Ask, now time.Time) time.Duration {
	if !m.isReserved(r, now) {
		return 0
	}
	q := m.limitOf(r, r.At[m.Index].Model)
	if q == nil { // a reload has just cleared the meters: see StartFresh
		return 0
	}
	_, tiers := q.Kept(r.Tier, quota.At(now))
	return q.Wait(tiers+r.Demand.due(m), r.Cost, now)
}

// Limits returns the sums of the limits of all members to which the request can
// be sent, and of their remaining amounts. A member that is cooling down has
// nothing remaining. Reset is the longest reset or, if nothing remains, the
// shortest wait. A sum is known only if the limits of all these members are.
func (p *Pool) Limits(r *Ask, now time.Time) (sums quota.Limits) {
	for i := range sums {
		sum, shortest, known := &sums[i], time.Duration(math.MaxInt64), true
		for _, m := range p.Members {
			model, ok := r.modelAt(m)
			if !ok || m.Drained() {
				continue
			}
			coolingDown := m.standing(r, now) > trialDue || !m.healthy() || r.IsOver(m, now)
			f := m.limitOf(r, model).Fields(i, coolingDown, now)
			wait := f.Reset
			if coolingDown {
				wait = m.returns(r, now).Sub(now)
			}
			if wait > 0 { // it is not known when one returns that its health checks find unhealthy
				shortest = min(shortest, wait)
			}
			sum.Limit, sum.Remaining, sum.Reset = sum.Limit+f.Limit, sum.Remaining+f.Remaining, max(sum.Reset, f.Reset)
			known = known && f.Known
		}
		if sum.Remaining == 0 {
			sum.Reset = shortest
		}
		sum.Known = known && sum.Limit > 0 && sum.Reset < math.MaxInt64
	}
	return sums
}
