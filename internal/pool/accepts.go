package pool

import (
	"slices"
	"time"
)

// Throttles reports whether a throttle, or the reserved shares of other tiers,
// keep the request away from the member.
func (m *Member) Throttles(r *Ask, now time.Time) bool {
	return r.At[m.Index].takes() && (m.standing(r, now) >= guessCooldown || m.isReserved(r, now))
}

// hasThrottle reports whether a slot of the request at the member holds a
// throttle: an active one, or one that has ended and still waits for the result
// of its probe.
func (m *Member) hasThrottle(r *Ask) bool {
	throttles := r.throttles(m)
	return slices.ContainsFunc(throttles[:], func(s *slot) bool { return s.Load() != nil })
}

// farAway is the assumed wait for a member whose budget is used up. It is so
// long that no request waits for such a member.
const farAway = 24 * time.Hour

// accepts returns when the member accepts the request again, and the grace of
// the cooldown that ends at that time. shares reports whether it is the shares
// of other tiers that keep the request away until then. throttles is false if
// neither such shares nor a throttle keep it away.
func (m *Member) accepts(r *Ask, now time.Time) (at time.Time, grace time.Duration, shares, throttles bool) {
	if !m.Throttles(r, now) {
		return now, 0, false, false
	}
	if c := m.health.whole.throttle.Load(); c != nil && c.inForce(now) {
		return now.Add(farAway), 0, false, true // only budgets are about all models
	}
	shared := now.Add(m.quotaWait(r, now))
	at = shared
	for _, s := range r.throttles(m) {
		if c := s.Load(); c != nil && c.inForce(now) {
			at, grace = later(at, c.accepts()), max(grace, c.Grace())
		}
	}
	return at, grace, shared.After(now) && at.Equal(shared), true
}

// Return says when a request may be sent that all members refuse because they
// throttle.
type Return struct {
	// At is when the first member accepts the request, and Grace is the grace
	// of the cooldown that ends at that time.
	At    time.Time
	Grace time.Duration
	// Awaited are the indexes of all these members.
	Awaited []int
	// Yields reports whether the shares of other tiers keep the request away
	// from any of these members.
	Yields bool
}

// Returns returns when the first of the members that are left accepts the
// request. ok is false unless all of them throttle. The members in behind, for
// which other requests wait, count as members that throttle.
func (p *Pool) Returns(r *Ask, behind []int, now time.Time) (first Return, ok bool) {
	for _, m := range p.Members {
		if at := &r.At[m.Index]; !at.takes() || !r.mayTry(at) {
			continue
		}
		at, grace, shares, throttles := m.accepts(r, now)
		if (!throttles || !at.After(now)) && !slices.Contains(behind, m.Index) {
			return Return{}, false // it has no room
		}
		if len(first.Awaited) == 0 || at.Before(first.At) {
			first.At, first.Grace = at, grace
		}
		first.Awaited = append(first.Awaited, m.Index)
		first.Yields = first.Yields || shares
	}
	return first, len(first.Awaited) > 0
}
