package pool

import "time"

// Throttles reports whether a throttle keeps the request away from the member.
func (m *Member) Throttles(r Request, now time.Time) bool {
	model, ok := r.ModelAt(m)
	return ok && (m.standing(model, r.Cost(), now) >= benchedGuess || m.isAbove(r, model, now))
}

// hasThrottle reports whether there is a throttle of the member that the request
// would meet, or one whose probe may still be refused.
func (m *Member) hasThrottle(r Request) bool {
	model, _ := r.ModelAt(m)
	return m.health.whole.throttle.Load() != nil || m.health.of(model).throttle.Load() != nil
}

// farAway is when a request may go to a member whose budget is used up: no request waits for that.
const farAway = 24 * time.Hour

// Accepts returns when the member accepts the request again, and the grace of the bench that ends then.
// It returns false if neither a throttle nor the ceiling of a tier keeps the request away.
func (m *Member) Accepts(r Request, now time.Time) (at time.Time, grace time.Duration, throttles bool) {
	if !m.Throttles(r, now) {
		return now, 0, false
	}
	model, _ := r.ModelAt(m)
	at = now.Add(m.quotaWait(r, model, now))
	if b := m.health.whole.throttle.Load(); b != nil && b.inForce(now) {
		return now.Add(farAway), 0, true // only budgets are about all models
	}
	if b := m.health.of(model).throttle.Load(); b != nil && b.inForce(now) {
		at, grace = later(at, b.accepts()), b.Grace()
	}
	return at, grace, true
}
