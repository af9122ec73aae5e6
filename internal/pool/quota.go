package pool

import (
	"math"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Quota returns the meter of a model at the member. It is nil for a model that
// the member does not know: clients can make up models.
func (m *Member) Quota(model string) *quota.Meter {
	q := m.quotaOf(model)
	if q == nil && m.Knows(model) {
		return m.health.quotas.Make(ModelKey(model))
	}
	return q
}

// Deduct deducts a request that is sent to the member from what is left of its
// limits.
func (m *Member) Deduct(model string, cost int64) quota.Mark {
	if q := m.Quota(model); q != nil {
		return q.Deduct(cost)
	}
	return quota.Mark{}
}

// Give is Deduct, and counts the request among those of its tier.
func (m *Member) Give(model string, cost int64, tier int, now time.Time) quota.Mark {
	if q := m.Quota(model); q != nil {
		return q.Give(tier, cost, now)
	}
	return quota.Mark{}
}

// Given returns what each tier has got lately, by the models at the member,
// where any has got something.
func (m *Member) Given(now time.Time) map[string]quota.Given { return m.health.quotas.Given(now) }

// learnCooldown records a cooldown of a model in its meter.
func (m *Member) learnCooldown(c *Cooldown, remote bool, now time.Time) {
	if q := m.meterOf(c); q != nil {
		q.CoolDown(c.learned(remote), now)
		m.health.paces.Store(true)
	}
}

// unlearnCooldown records that a cooldown was disproved.
func (m *Member) unlearnCooldown(c *Cooldown, now time.Time) {
	if q := m.meterOf(c); q != nil {
		q.Disprove(c.learned(false), now)
	}
}

// meterOf returns the meter of the model that a cooldown is about. It is nil if
// the cooldown is not about all requests for one model.
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

// isSpent reports whether the limits of the model at the member have no room
// for the request, if that matters.
func (p *Pool) isSpent(m *Member, r *Ask, now quota.Instant) bool {
	if !p.Steers {
		return false
	}
	q := m.limitOf(r, r.At[m.Index].Model)
	return q != nil && !q.HasRoom(r.Cost, now)
}

// findSteered finds the members that the request would have found as good as
// its own or better, had they room.
func (p *Pool) findSteered(r *Ask, its grade, now time.Time) {
	for _, m := range p.Members {
		spent := grade{its.rank, its.priority, true}
		if !its.spent && p.isOf(spent, m, r, now) || its.rank == open && m.Priority <= its.priority && m.rank(r, now) == paused {
			r.Steered = append(r.Steered, m)
		}
	}
}

// quotaOf returns the meter of a model at the member, or nil. A valid name of
// ordinary length is its own key.
func (m *Member) quotaOf(model string) *quota.Meter {
	if len(model) > maxModelName {
		model = ModelKey(model)
	}
	return m.health.quotas.Of(model)
}

// limitOf returns the meter of the limits that the request uses up. It is nil
// if there is none, or if the request has a service tier with limits of its
// own, of which nothing is learned.
func (m *Member) limitOf(r *Ask, model string) *quota.Meter {
	if r.At[m.Index].Tiers.HaveOwnLimits() {
		return nil
	}
	return m.quotaOf(model)
}

// Demand records that a request asks for its model, so that other tiers leave
// its share for such requests.
func (p *Pool) Demand(r *Ask, now time.Time) {
	for _, m := range p.Members {
		if model, ok := r.modelAt(m); ok && !r.At[m.Index].Tiers.HaveOwnLimits() {
			if q := m.Quota(model); q != nil {
				q.Ask(r.Tier.Number, now)
			}
		}
	}
}

// PassedOver reports whether only shares of other tiers are left of the member.
func (m *Member) PassedOver(r *Ask, now time.Time) bool {
	return r.At[m.Index].takes() && m.isReserved(r, now)
}

// isReserved reports whether the model at the member has only the shares of
// other tiers left, and the request's tier has got its own.
func (m *Member) isReserved(r *Ask, now time.Time) bool {
	if r.Tier.Shares == nil {
		return false
	}
	instant := quota.At(now)
	if r.shares.at != instant {
		r.shares = shares{at: instant}
		for i := range r.At {
			r.At[i].reserved = unasked
		}
	}
	at := &r.At[m.Index]
	if at.reserved == unasked {
		at.reserved = no
		if q := m.limitOf(r, at.Model); q != nil {
			of, reserved := q.Reserved(r.Tier, r.Cost, instant)
			if reserved && (!r.Tier.KeepsShare() || !m.pool.isWithinShare(r, of, instant)) {
				at.reserved = yes
			}
		}
	}
	return at.reserved == yes
}

// isWithinShare reports whether the request's tier is within its share of the
// members of a group.
func (p *Pool) isWithinShare(r *Ask, of quota.Group, now quota.Instant) bool {
	s := &r.shares
	i := slices.IndexFunc(s.groups[:], func(known quota.Group) bool { return known == of || known == 0 })
	if i >= 0 && s.groups[i] == of {
		return s.within[i]
	}
	got := quota.Got{Group: of}
	for _, m := range p.Members {
		if q := m.quotaFor(r); q != nil && !m.repeats(q, r) {
			got.Add(q, r.Tier, now)
		}
	}
	within := got.IsWithinShare(r.Tier)
	if i >= 0 {
		s.groups[i], s.within[i] = of, within
	}
	return within
}

// repeats reports whether a member of the same backend that comes before this
// one has the same meter.
func (m *Member) repeats(q *quota.Meter, r *Ask) bool {
	for other := m.before; other != nil; other = other.before {
		if other.quotaFor(r) == q {
			return true
		}
	}
	return false
}

// quotaFor returns the meter of the request's model at the member. It is nil if
// there is none, or the request cannot go there.
func (m *Member) quotaFor(r *Ask) *quota.Meter {
	if model, ok := r.modelAt(m); ok {
		return m.limitOf(r, model)
	}
	return nil
}

// quotaWait returns how long the request waits because of the shares of other
// tiers.
func (m *Member) quotaWait(r *Ask, now time.Time) time.Duration {
	if !m.isReserved(r, now) {
		return 0
	}
	return m.health.quotas.Of(r.At[m.Index].Model).Wait(r.Tier, r.Cost, now)
}

// Limits returns the sums of the limits of all members that the request can be
// sent to, and what is left of them: nothing at a member that is cooling down.
// A reset is the longest one or, if nothing is left, the shortest wait. A sum
// is not known if the limit of one member is not.
func (p *Pool) Limits(r *Ask, now time.Time) (sums quota.Limits) {
	for i := range sums {
		sum, shortest, known := &sums[i], time.Duration(math.MaxInt64), true
		for _, m := range p.Members {
			model, ok := r.modelAt(m)
			if !ok || m.Drained() {
				continue
			}
			coolingDown := m.standing(r, now) > trialDue || !m.healthy()
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
