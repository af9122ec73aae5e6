package callers

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// limiting is a caller's limiter, as the core knows it. It only turns the
// reservations of package limiter into those of package ratelimit.
type limiting struct{ *limiter.Limiter }

// Try implements ratelimit.Limiter.
func (l limiting) Try(now time.Time, e ratelimit.Estimate) (ratelimit.Reservation, *ratelimit.Refusal) {
	return reserve(l.Limiter.Try(now, e))
}

// Admit implements ratelimit.Limiter.
func (l limiting) Admit(now time.Time, e ratelimit.Estimate) (ratelimit.Reservation, *ratelimit.Refusal) {
	return reserve(l.Limiter.Admit(now, e))
}

// Await implements ratelimit.Limiter.
func (l limiting) Await(e ratelimit.Estimate) (ratelimit.Reservation, *ratelimit.Refusal) {
	return reserve(l.Limiter.Await(e))
}

// Unasked implements ratelimit.Limiter.
func (l limiting) Unasked(now time.Time, model string) ratelimit.Reservation {
	r, _ := reserve(l.Limiter.Unasked(now, model), nil)
	return r
}

// reserve returns the reservation with a charge, unless there is a refusal.
func reserve(r limiter.Reservation, refusal *ratelimit.Refusal) (ratelimit.Reservation, *ratelimit.Refusal) {
	if refusal != nil {
		return ratelimit.Reservation{}, refusal
	}
	return ratelimit.Reserve(&r), nil
}

// chargeOf returns the charge of an open reservation.
func chargeOf(r ratelimit.Reservation) *limiter.Reservation {
	return r.Charge().(*limiter.Reservation)
}
