package limiter

import (
	"slices"
	"time"
)

// A replica may spend its part of what is left without asking the others. A
// request that is larger than that, or comes when the part is spent, is refused
// as Unheard or OverPart, and may make a claim: its charge is reported like any
// other, and the request waits. Once the others know of the charge, and what
// they used until then is known here, it is admitted if it fits into the
// limits. So of several replicas with such a request at the same moment, none
// is admitted that would exceed a limit together with others.
//
// If two claims do not fit together, the replica with the lower id goes on
// waiting, and the other one gives its charge back.

// Claim is a request that waits until the others know of it. It ends with
// Decide or Withdraw.
type Claim struct {
	Reservation
	// why is the refusal without a claim. nil: there is room for the request in
	// this replica's part by now.
	why *Refusal
	// figures are what the others had used of each limit when the claim was
	// made.
	figures [MaxLimits][]figure
}

// MayClaim reports whether a claim may admit the request.
func (r *Refusal) MayClaim() bool { return r.Reason == Unheard || r.Reason == OverPart }

// Claim makes a claim for a request, or returns why it is refused. A caller has
// one claim at a time.
func (c *Caller) Claim(now time.Time, e Estimate) (claim *Claim, refusal *Refusal) {
	c.mu.Lock()
	at := c.roll(now)
	c.confirm(at)
	r, refusal := c.check(at, e, c.allowed)
	why := refusal
	if refusal != nil && refusal.MayClaim() && !c.claims && !c.sharing.Apart {
		r, refusal = c.check(at, e, func(m *counter, _, _ int64) int64 { return m.limit.Amount })
	}
	var crossed []Crossing
	if refusal == nil {
		crossed = c.charge(at, &r)
		claim = &Claim{Reservation: r, why: why}
		for id, m := range c.all() {
			claim.figures[id] = slices.Clone(m.figures)
		}
		if why != nil {
			c.claims = true
			c.reports.hurry()
		}
	}
	c.mu.Unlock()
	c.report(crossed)
	return claim, refusal
}

// Decide reports whether it is decided if the request is admitted: if there is
// no refusal, it is, and must be settled.
func (l *Claim) Decide(now time.Time) (decided bool, refusal *Refusal) {
	c := l.caller
	c.mu.Lock()
	at := c.roll(now)
	c.confirm(at)
	exceeds, known := l.why != nil && l.exceeds(at), c.known >= l.number || l.why == nil
	undecided := !known || exceeds && l.isFirst()
	if !undecided && !exceeds {
		c.claims = c.claims && l.why == nil
	}
	c.mu.Unlock()
	switch {
	case undecided:
		return false, nil
	case exceeds:
		return true, l.Withdraw(now)
	}
	return true, nil
}

// Withdraw gives the charge back, and returns why the request is refused.
func (l *Claim) Withdraw(now time.Time) *Refusal {
	c := l.caller
	c.mu.Lock()
	c.claims = false
	c.mu.Unlock()
	l.Settle(now, Cost{})
	c.reports.hurry() // another one may wait for that
	return l.why
}

// exceeds reports whether the request exceeds a limit with what is used.
func (l *Claim) exceeds(at int64) bool {
	for id, m := range l.caller.countersIn(l.charged) {
		if m.limit.Amount == 0 || m.then > 0 || l.reset != l.caller.reset {
			continue
		}
		charged := int64(1)
		if id.Kind() == Tokens {
			charged = l.prompt + l.output
		}
		if used := max(0, m.use(at)-charged); add(used, min(charged, m.limit.Amount)) > m.limit.Amount {
			return true
		}
	}
	return false
}

// isFirst reports whether this replica's id is lower than those of all others
// that have used something since the claim was made.
func (l *Claim) isFirst() bool {
	for id, m := range l.caller.countersIn(l.charged) {
		for _, f := range m.figures {
			isAsBefore := slices.ContainsFunc(l.figures[id], func(before figure) bool {
				return before.key == f.key && before.window == f.window && before.used >= f.used
			})
			if !isAsBefore && f.used > 0 && f.replica < l.caller.reports.writer {
				return false
			}
		}
	}
	return true
}
