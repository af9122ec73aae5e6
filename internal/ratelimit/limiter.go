package ratelimit

import "time"

// Limiter limits the requests of one caller, or those that one backend gets. A
// request is charged before it is sent, by Try, Admit or Await. The module that
// opened the limits settles the charge when the request is over. A Limiter is
// safe for concurrent use.
type Limiter interface {
	// Try charges all limits with the estimate. If a limit refuses the request,
	// Try charges none of them and returns the reason. It does not count the
	// refusal, because the request may be tried again: see Refused.
	Try(now time.Time, e Estimate) (Reservation, *Refusal)
	// Admit does the same, and counts the refusal. It may wait for the other
	// replicas, if this replica's part of a limit is too small.
	Admit(now time.Time, e Estimate) (Reservation, *Refusal)
	// Await makes a claim after a refusal for which [Refusal.MayClaim] reports
	// true: it charges the request beyond this replica's part of a limit, and
	// waits until the other replicas know of that.
	Await(e Estimate) (Reservation, *Refusal)
	// Unasked returns the reservation of a response of a model that started
	// without a request. Nothing is charged until it is settled.
	Unasked(now time.Time, model string) Reservation
	// Check returns the refusal that Try would return, and Refuses the one of
	// Admit. They charge nothing. Refuses returns nil if Admit would wait.
	Check(now time.Time, e Estimate) *Refusal
	Refuses(now time.Time, e Estimate) *Refusal
	// Refused counts a request that was finally refused, and RefusedBy one that
	// was refused by something else than a limit, such as ByModel.
	Refused(now time.Time, r *Refusal)
	RefusedBy(now time.Time, by int)
	// Upload counts a request as in flight while its body is received, or
	// returns the refusal. Without a refusal, Uploaded must be called when the
	// body was received or its upload was aborted.
	Upload() *Refusal
	Uploaded()
	// Tightest returns, for each kind, the limit of a request for the model
	// with the smallest fraction left. The Amount of its Limit is 0 if there is
	// no limit of that kind.
	Tightest(now time.Time, model string) [Kinds]Use
	// Snapshot returns the use of all limits.
	Snapshot(now time.Time) Snapshot
}

// Reservation is the charge of an admitted request, until it is settled. It
// belongs to one request, and is not safe for concurrent use. The zero
// Reservation, of a request that nothing limits, does nothing.
type Reservation struct{ charge Charge }

// Charge is what a [Limiter] has charged for a request.
type Charge interface {
	// Open reports whether the charge is not yet settled.
	Open() bool
	// Estimated returns the estimated tokens that were charged.
	Estimated() (prompt, output int64)
	// Spend charges the request's output so far, as far as it exceeds the
	// charge.
	Spend(now time.Time, output int64)
	// Demoted yields the limits that moved the request to another tier, without
	// their amounts.
	Demoted(yield func(Limit) bool)
	// Tier returns the number of the request's tier, counted from 1 in order of
	// importance. It returns 0 for a request without a tier, which is more
	// important than all tiers.
	Tier() int
}

// Reserve returns the Reservation with a charge.
func Reserve(c Charge) Reservation { return Reservation{c} }

// Charge returns the charge, or nil.
func (r Reservation) Charge() Charge { return r.charge }

// Open reports whether the request has a charge that is not yet settled.
func (r Reservation) Open() bool { return r.charge != nil && r.charge.Open() }

// Estimated returns the estimated tokens that the request was charged with.
func (r Reservation) Estimated() (prompt, output int64) {
	if r.charge == nil {
		return 0, 0
	}
	return r.charge.Estimated()
}

// Spend charges the request's output so far, as far as it exceeds the charge.
func (r Reservation) Spend(now time.Time, output int64) {
	if r.charge != nil {
		r.charge.Spend(now, output)
	}
}

// Demoted yields the limits that moved the request to another tier, without
// their amounts.
func (r Reservation) Demoted(yield func(Limit) bool) {
	if r.charge != nil {
		r.charge.Demoted(yield)
	}
}

// Tier returns the number of the request's tier, as [Charge] says.
func (r Reservation) Tier() int {
	if r.charge == nil {
		return 0
	}
	return r.charge.Tier()
}
