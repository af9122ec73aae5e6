package pool

import (
	"math"
	"slices"
	"time"
)

// Throttles reports whether a throttle, the member's quota, or the reserved
// shares of other tiers, keep the request away from the member.
func (m *Member) Throttles(r *Ask, now time.Time) bool {
	return r.At[m.Index].takes() && (m.standing(r, now) >= guessCooldown || r.IsOver(m, now) || m.isReserved(r, now))
}

// hasThrottle reports whether a slot of the request at the member holds a
// throttle: an active one, or one that has ended and still waits for the result
// of its probe.
func (m *Member) hasThrottle(r *Ask) bool {
	var few [maxSlots]*slot
	return len(r.throttles(m, few[:0])) > 0
}

// Return says when a member accepts a request.
type Return struct {
	// Index is the member's index.
	Index int
	// At is when it accepts the request, and Grace is the grace of the cooldown
	// that ends then.
	At    time.Time
	Grace time.Duration
	// Places is how many requests like this one it accepts at this replica
	// until the time that was asked about, and Every is how long after one the
	// next one may be sent.
	Places float64
	Every  time.Duration
	// Yields reports whether it is the reserved shares of other tiers that keep
	// the request away until then.
	Yields bool
}

// lacksBudget reports whether a budget of the member is used up. Only budgets
// cover all models.
func (m *Member) lacksBudget(now time.Time) bool {
	c := m.health.whole.throttle.Load()
	return c != nil && c.inForce(now)
}

// accepts returns when the member accepts the request, which waits until a time
// at most: now, if the member does not throttle. It returns false if that is
// not known, because the member's latest refusal named no time or asked to be
// called again immediately, or because a budget is used up.
func (m *Member) accepts(r *Ask, now, until time.Time) (back Return, ok bool) {
	back = Return{Index: m.Index, At: now, Places: 1}
	throttles := m.Throttles(r, now)
	if throttles && m.lacksBudget(now) {
		return back, false
	}
	shared := now.Add(m.quotaWait(r, now))
	back.At = later(back.At, r.mayHaveRoom(m, now, until))
	var few [maxSlots]*slot
	for _, s := range r.throttles(m, few[:0]) {
		c := s.Load()
		switch {
		case c == nil:
		case c.Guess > 0 || c.AsksAtOnce: // even if it is over
			return back, false
		case throttles && c.inForce(now):
			back.At, back.Grace = later(back.At, c.Until), max(back.Grace, c.Grace())
		}
	}
	back.At = later(back.At, shared)
	back.Yields = shared.After(now) && back.At.Equal(shared)
	return back, true
}

// Returns returns the members that accept the request again before until. The
// members in barred are those for which others wait, or which have refused the
// request: the request may also wait for these if they accept it now. If any
// other member does not throttle, it only has no room, and there is nothing to
// wait for.
func (p *Pool) Returns(r *Ask, barred []int, now, until time.Time) (all []Return) {
	replicas := 1
	if p.Replicas != nil {
		replicas = p.Replicas()
	}
	for _, m := range p.Members {
		if at := &r.At[m.Index]; !at.takes() || !r.mayTry(at) {
			continue
		}
		back, ok := m.accepts(r, now, until)
		if !ok || back.At.After(until) {
			continue
		}
		if !back.At.After(now) && !slices.Contains(barred, m.Index) {
			return nil
		}
		unknown := true
		if q := m.limitOf(r, r.At[m.Index].Model); q != nil {
			will := q.Returning(r.Cost, until.Sub(back.At), replicas)
			back.Places, back.Every, unknown = will.Requests, will.Every, will.Unknown
		}
		if r.IsOver(m, now) {
			over := &r.Quotas.Over[m.Index]
			places := over.AtOnce + over.PerSecond*until.Sub(now).Seconds()
			// without a cooldown, nothing says that the backend accepts less
			if places < back.Places || unknown && m.standing(r, now) <= trialDue {
				back.Places = places
			}
		} else if unknown && r.Quotas != nil && !back.At.After(now) && m.standing(r, now) <= trialDue {
			back.Places = math.Inf(1) // there is room, but others that wait for the quota come first
		}
		all = append(all, back)
	}
	return all
}
