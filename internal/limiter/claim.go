package limiter

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// A replica may spend its part of the remaining limit without asking the other
// replicas. A request that is larger than this part, or that comes when the
// part is spent, is refused as Unheard or OverPart. Such a request may make a
// claim: its estimate is charged and reported as usual, and the request waits.
// Once the other replicas know of the charge, and this replica knows what they
// had used by then, the request is admitted if it fits into the limits. So if
// several replicas have such a request at the same moment, they never admit
// requests that exceed a limit together.
//
// If two claims do not fit together, the replica with the lower id keeps
// waiting, and the other one gives its charge back.

// Claim is a request that waits until the other replicas know of its charge. It
// ends with Decide or Withdraw.
type Claim struct {
	Reservation
	// avoided is the refusal that the claim avoids. It is nil if this replica's
	// part had room for the request when the claim was made.
	avoided *ratelimit.Refusal
	// figures are the other replicas' uses of each limit when the claim was
	// made.
	figures [ratelimit.MaxLimits][]figure
	// isBeyond reports whether this replica had its part of the requests in
	// flight. flights are those of the other replicas at that time.
	isBeyond bool
	flights  []flightFigure
	// ofModel is the claim to the limits of the request's model. It is nil if
	// the model has none.
	ofModel *Claim
}

// Claim makes a claim for a request, or returns why the request is refused. A
// caller has at most one claim at a time.
func (c *Limiter) Claim(now time.Time, e ratelimit.Estimate) (claim *Claim, refusal *ratelimit.Refusal) {
	claim, refusal, crossed := c.claim(now, e)
	c.report(crossed)
	return claim, refusal
}

// claim returns what Claim returns, and the marks to report. The limits of the
// request's model are charged as by try.
func (c *Limiter) claim(now time.Time, e ratelimit.Estimate) (claim *Claim, refusal *ratelimit.Refusal,
	crossed []ratelimit.Crossing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.confirm(at)
	r, refusal := c.check(at, e, c.allowed, c.slots)
	avoided := refusal
	if refusal != nil && refusal.MayClaim() && !c.claims && !c.sharing.Apart {
		r, refusal = c.check(at, e, func(m *counter, _, _ int64) int64 { return m.limit.Amount }, c.free)
	}
	if refusal != nil {
		return nil, refusal, nil
	}
	claim = &Claim{avoided: avoided, isBeyond: !e.IsPart && c.tooMany(at, c.slots) != nil,
		flights: slices.Clone(c.concurrent.figures)}
	if m := c.models[e.Model]; m != nil {
		if claim.ofModel, refusal, crossed = m.claim(now, e); refusal != nil {
			return nil, refusal, nil
		}
		r.join(claim.ofModel.Reservation)
	}
	crossed = append(crossed, c.charge(at, &r)...)
	claim.Reservation = r
	for id, m := range c.all() {
		claim.figures[id] = slices.Clone(m.figures)
	}
	if avoided != nil {
		c.claims = true
		c.reports.hurry()
	}
	return claim, nil, crossed
}

// Decide reports whether the claim is decided. If it is, and there is no
// refusal, the request is admitted, and its reservation must be settled.
func (l *Claim) Decide(now time.Time) (decided bool, refusal *ratelimit.Refusal) {
	decided, refusal = l.decide(now)
	if m := l.ofModel; m != nil && refusal == nil {
		var isDecided bool
		isDecided, refusal = m.decide(now)
		decided = decided && isDecided
	}
	if refusal != nil {
		l.Withdraw(now)
		return true, refusal
	}
	return decided, nil
}

// decide returns the same for one caller or one model. It gives nothing back.
func (l *Claim) decide(now time.Time) (decided bool, refusal *ratelimit.Refusal) {
	c := l.caller
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.confirm(at)
	exceeds, known := l.avoided != nil && l.exceeds(at), c.known >= l.number || l.avoided == nil
	switch {
	case !known || exceeds && l.isFirst():
		return false, nil
	case exceeds:
		return true, l.avoided
	}
	l.release()
	return true, nil
}

// release lets another request make a claim, and returns the refusal that this
// claim avoids. It returns nil if the claim was decided before.
func (l *Claim) release() (avoided *ratelimit.Refusal) {
	l.caller.claims = l.caller.claims && l.avoided == nil
	avoided, l.avoided = l.avoided, nil
	return avoided
}

// Withdraw gives the charge back, and returns the refusal of the request.
func (l *Claim) Withdraw(now time.Time) (refusal *ratelimit.Refusal) {
	c := l.caller
	for part := l; part != nil; part = part.ofModel {
		part.caller.mu.Lock()
		refusal = cmp.Or(refusal, part.release())
		part.caller.mu.Unlock()
	}
	l.Settle(now, ratelimit.Cost{})
	c.reports.hurry() // another one may wait for that
	return refusal
}

// exceeds reports whether the request and the use of all replicas exceed a
// limit.
func (l *Claim) exceeds(at int64) bool {
	if l.isBeyond && l.caller.maxRequests > 0 && int64(l.caller.inFlight) > l.caller.free(at) {
		return true
	}
	for id, m := range l.caller.countersIn(l.charged) {
		if m.limit.Amount == 0 || m.then > 0 || l.reset != l.caller.reset {
			continue
		}
		charged := int64(1)
		if id.Kind() == ratelimit.Tokens {
			charged = l.prompt + l.output
		}
		if used := max(0, m.use(at)-charged); add(used, min(charged, m.limit.Amount)) > m.limit.Amount {
			return true
		}
	}
	return false
}

// isFirst reports whether this replica's id is lower than the ids of all
// replicas whose use has grown since the claim was made.
func (l *Claim) isFirst() bool {
	if l.isBeyond && !l.isFirstInFlight() {
		return false
	}
	if l.avoided.Reason == ratelimit.TooMany {
		return true // its use is within this replica's part
	}
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

// isFirstInFlight reports the same of requests in flight.
func (l *Claim) isFirstInFlight() bool {
	return !slices.ContainsFunc(l.caller.concurrent.figures, func(f flightFigure) bool {
		isAsBefore := slices.ContainsFunc(l.flights,
			func(before flightFigure) bool { return before.key == f.key && before.n >= f.n })
		return !isAsBefore && f.n > 0 && f.replica < l.caller.reports.writer
	})
}

// hearing is the longest time that a request waits until this replica has heard
// from the others, unless there are so many that their reports take longer.
// look is how often it checks that.
const hearing, look = 500 * time.Millisecond, 5 * time.Millisecond

// Admit charges all limits with the estimate, or returns why the request is
// refused, and counts the refusal. If this replica's part of a limit is too
// small, Admit may wait to hear from the other replicas.
func (c *Limiter) Admit(now time.Time, e ratelimit.Estimate) (r Reservation, refusal *ratelimit.Refusal) {
	if r, refusal = c.Try(now, e); refusal != nil && refusal.MayClaim() {
		r, refusal = c.Await(e)
		now = time.Now()
	}
	if refusal != nil {
		c.Refused(now, refusal)
	}
	return r, refusal
}

// Refuses returns the refusal that Admit would return, without charging any
// limit. It returns nil if Admit would wait for the other replicas, which then
// decide.
func (c *Limiter) Refuses(now time.Time, e ratelimit.Estimate) *ratelimit.Refusal {
	if refusal := c.Check(now, e); refusal == nil || !refusal.MayClaim() {
		return refusal
	}
	return nil
}

// patience is the longest time that a request waits until this replica has
// heard from the others. Its report is sent within an interval, which is half
// of the delay, and is confirmed after the delay. A tenth of a second is for
// the store.
func (c *Limiter) patience() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(hearing, c.sharing.Delay*3/2+hearing/5)
}

// Await tries to admit a request by a claim, if this replica's part of a limit
// has no room for it. In a burst, one request at a time can make a claim. A
// request that is larger than the part keeps trying until its time is over.
func (c *Limiter) Await(e ratelimit.Estimate) (r Reservation, refusal *ratelimit.Refusal) {
	waits := false
	for until := time.Now().Add(c.patience()); ; time.Sleep(rand.N(hearing / 4)) {
		var claim *Claim
		if claim, refusal = c.Claim(time.Now(), e); refusal == nil {
			if refusal = claim.await(until); refusal == nil {
				return claim.Reservation, nil
			}
		}
		if !refusal.PassesSoon() || !time.Now().Before(until) {
			return Reservation{}, refusal
		}
		if refusal.Reason == ratelimit.TooMany && !waits {
			if waits = c.wait(); !waits {
				return Reservation{}, refusal
			}
			defer c.waited()
		}
	}
}

// await waits until the claim is decided or the time is over. It returns the
// refusal, or nil if the request is admitted.
func (l *Claim) await(until time.Time) *ratelimit.Refusal {
	for {
		switch decided, refusal := l.Decide(time.Now()); {
		case decided:
			return refusal
		case !time.Now().Before(until):
			return l.Withdraw(time.Now())
		}
		time.Sleep(look)
	}
}
