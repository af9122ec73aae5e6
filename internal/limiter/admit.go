package limiter

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Reservation is the charge of an admitted request, until Settle replaces it
// with the real cost. It belongs to one request, and is not safe for concurrent
// use. The zero Reservation, for a request without a caller, does nothing.
type Reservation struct {
	caller *Limiter
	// moment is when the request was admitted. charged is the set of counters
	// that were charged then, one bit for each ID. demoted is the set of
	// counters whose limits moved the request to another tier.
	moment
	// reset is the caller's latest reset at that time.
	reset            int64
	charged, demoted uint16
	tier             uint8
	// grew is the set of units whose limits of tokens were charged with output
	// beyond the estimate, and last is the time of the latest such charge.
	grew uint8
	// hasEnded reports whether the request has ended, even if its output goes
	// on. isPart is Estimate.IsPart.
	hasEnded, isPart bool
	// length is Estimate.Prompt. prompt and output are the estimated tokens
	// that were charged.
	length, prompt, output int64
	flight
	last moment
	// ofModel is the charge to the limits of the request's model. It is nil if
	// the model has none.
	ofModel *Reservation
}

// Tier returns the number of the request's tier, counted from 1 in order of
// importance. It returns 0 for a request without a tier, which is more
// important than all tiers.
func (r *Reservation) Tier() int { return int(r.tier) }

// Demoted yields the limits that moved the request to another tier, without
// their amounts.
func (r *Reservation) Demoted(yield func(ratelimit.Limit) bool) {
	for id := range ratelimit.ID(ratelimit.MaxLimits) {
		if r.demoted&(1<<id) != 0 && !yield(ratelimit.Limit{Kind: id.Kind(), Unit: id.Unit()}) {
			return
		}
	}
	if r.ofModel == nil {
		return
	}
	for l := range r.ofModel.Demoted {
		if l.Model = r.model; !yield(l) {
			return
		}
	}
}

// Estimated returns the estimated tokens that the request was charged with.
func (r *Reservation) Estimated() (prompt, output int64) { return r.prompt, r.output }

// Open reports whether the reservation is not yet settled.
func (r *Reservation) Open() bool { return r.caller != nil }

// Try charges all limits with the estimate and returns a reservation, which
// must be settled. If a limit refuses the request, Try charges none of them and
// returns the reason. It does not count the refusal, because the request may be
// tried again: see Refused.
func (c *Limiter) Try(now time.Time, e ratelimit.Estimate) (Reservation, *ratelimit.Refusal) {
	r, refusal, crossed := c.try(now, e)
	c.report(crossed)
	return r, refusal
}

// try returns what Try returns, and the marks to report. The limits of the
// request's model are charged under the caller's lock, when the caller's own
// limits have admitted the request, so that either all are charged or none.
func (c *Limiter) try(now time.Time, e ratelimit.Estimate) (r Reservation, refusal *ratelimit.Refusal,
	crossed []ratelimit.Crossing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.confirm(at)
	if r, refusal = c.check(at, e, c.allowed, c.slots); refusal != nil {
		return r, refusal, nil
	}
	if m := c.models[e.Model]; m != nil {
		var ofModel Reservation
		if ofModel, refusal, crossed = m.try(now, e); refusal != nil {
			return Reservation{}, refusal, nil
		}
		r.join(ofModel)
	}
	return r, nil, append(crossed, c.charge(at, &r)...)
}

// join adds the charge to the limits of the request's model.
func (r *Reservation) join(ofModel Reservation) {
	r.ofModel, r.tier = &ofModel, max(r.tier, ofModel.tier)
}

// Check returns the refusal that Try would return, or nil, without charging any
// limit.
func (c *Limiter) Check(now time.Time, e ratelimit.Estimate) *ratelimit.Refusal {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.confirm(at)
	_, refusal := c.check(at, e, c.allowed, c.slots)
	if m := c.models[e.Model]; m != nil && refusal == nil {
		return m.Check(now, e)
	}
	return refusal
}

// Refused counts a request that was finally refused.
func (c *Limiter) Refused(now time.Time, refusal *ratelimit.Refusal) {
	var crossed []ratelimit.Crossing
	c.mu.Lock()
	at := c.roll(now)
	if refusal.Reason == ratelimit.TooMany {
		c.busy++
		c.hour.refuse(at, ratelimit.ByMaxRequests)
	} else {
		c.hour.refuse(at, int(refusal.Limit.ID()))
		crossed = c.refusedBy(now, refusal)
	}
	c.mu.Unlock()
	c.report(crossed)
}

// refusedBy counts a refusal at the limit, which a reload may have removed.
func (c *Limiter) refusedBy(now time.Time, refusal *ratelimit.Refusal) []ratelimit.Crossing {
	counted, id := c, refusal.Limit.ID()
	if model := refusal.Limit.Model; model != "" {
		if counted = c.models[model]; counted == nil {
			return nil
		}
		counted.mu.Lock()
		defer counted.mu.Unlock()
		counted.roll(now)
	}
	counted.counters[id].refused++
	if refusal.Reason > ratelimit.OverQuota {
		return nil
	}
	return counted.reached(nil, id, 100, refusal.Used, refusal.Allowed)
}

// check returns the reservation of a request, or why it is refused. allows
// returns how much of a limit may be used, and slots how many requests may be
// in flight here.
func (c *Limiter) check(at int64, e ratelimit.Estimate, allows func(m *counter, at, used int64) int64,
	slots func(at int64) int64) (r Reservation, refusal *ratelimit.Refusal) {
	use := c.usual.known(e.Model, at)
	prompt, output := c.usual.estimate(e, use)
	r = Reservation{caller: c, moment: moment{at: at - c.clock.ahead}, reset: c.reset, charged: c.active,
		tier: uint8(c.tier.number), isPart: e.IsPart, length: e.Prompt, prompt: prompt,
		output: output}
	r.flight = c.flightOf(e, use, output)
	for id, m := range c.all() {
		need := int64(1)
		if id.Kind() == ratelimit.Tokens {
			need = prompt + output
		}
		if m.limit.Amount == 0 || need == 0 {
			continue
		}
		used := m.use(at)
		allowed := allows(m, at, used)
		// by its length, too: otherwise a ratio that is too high would refuse
		// the prompt for ever
		large := id.Kind() == ratelimit.Tokens && min(prompt, e.Prompt) > m.limit.Amount
		fits := add(used, min(need, m.limit.Amount)) <= allowed
		if id.Kind() == ratelimit.Tokens && fits {
			need = max(need, c.room(&r, m.limit))
			fits = add(used, min(need, m.limit.Amount)) <= m.limit.Amount
		}
		var inFlight *ratelimit.Refusal
		if fits && id.Kind() == ratelimit.Tokens {
			inFlight = c.overFlight(&r, m.limit, used)
			// a larger reservation would keep other requests out for longer
			r.most[id.Unit()] = min(r.most[id.Unit()], max(0, m.limit.Amount-used-prompt))
		}
		switch {
		case fits && inFlight == nil && (!large || m.then > 0):
		case m.then > 0:
			r.demoted |= 1 << id
			r.tier = max(r.tier, m.then)
		default:
			next := ratelimit.Refusal{Limit: m.limit, Allowed: allowed, Used: used, Requested: need}
			switch {
			case large:
				next.Reason, next.Requested = ratelimit.TooLarge, prompt
			case inFlight != nil:
				next = *inFlight
			default:
				c.delay(m, at, &next)
			}
			if refusal == nil || refusal.Reason != ratelimit.TooLarge && (large || next.Wait > refusal.Wait) {
				refusal = &next
			}
		}
	}
	if refusal == nil && !e.IsPart {
		refusal = c.tooMany(at, slots)
	}
	if refusal != nil {
		return Reservation{}, refusal
	}
	return r, nil
}

func (c *Limiter) delay(m *counter, at int64, r *ratelimit.Refusal) {
	need := min(r.Requested, r.Limit.Amount)
	switch {
	case m.calendar():
		r.Reason, r.Wait = ratelimit.OverQuota, m.wait(at, need, Sharing{})
	case c.sharing.Apart:
		r.Wait = max(m.wait(at, need, c.sharing), shareWait)
	default:
		r.Wait = m.wait(at, need, Sharing{})
	}
	if !c.sharing.Apart && r.Allowed < r.Limit.Amount && add(r.Used, need) <= r.Limit.Amount {
		r.Reason, r.Wait = ratelimit.OverPart, max(c.sharing.Delay, time.Millisecond)
		if need > m.partOf(r.Used, at, c.sharing) {
			r.Reason = ratelimit.Unheard
		}
		c.reports.hurry()
	}
}

// shareWait is the shortest wait for a share of a limit, because shares are
// rounded.
const shareWait = 250 * time.Millisecond

func (c *Limiter) charge(at int64, r *Reservation) (crossed []ratelimit.Crossing) {
	c.admitted++
	r.number = c.admitted
	for id, m := range c.all() {
		if id.Kind() == ratelimit.Tokens {
			m.charge(r.prompt+r.output, at)
		} else {
			m.charge(1, at)
		}
	}
	if !r.isPart {
		c.begin()
	}
	c.tell(at)
	for id, m := range c.countersIn(r.demoted) {
		m.demoted++
		crossed = c.reached(crossed, id, 100, m.use(at), m.limit.Amount)
	}
	c.reserved += r.prompt + r.output
	c.add(&r.flight, 1)
	return crossed
}

// Unasked returns the reservation of a response of a model that started without
// a request. Nothing is charged until it is settled.
func (c *Limiter) Unasked(now time.Time, model string) Reservation {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := Reservation{caller: c, moment: moment{at: c.roll(now) - c.clock.ahead, number: c.admitted}, reset: c.reset,
		tier: uint8(c.tier.number), hasEnded: true}
	if m := c.models[model]; m != nil {
		r.join(m.Unasked(now, ""))
	}
	return r
}

// Settle replaces the estimate with the real cost. An excess is given back to
// the windows, and the parts of windows, from which it was taken. A shortfall
// is charged now. Further calls do nothing.
func (r *Reservation) Settle(now time.Time, cost ratelimit.Cost) {
	c := r.caller
	if c == nil {
		return
	}
	r.caller = nil
	if r.ofModel != nil {
		r.ofModel.Settle(now, cost)
	}
	requests := max(0, cost.Requests)
	tokens := limited(cost.Prompt) + limited(cost.Output)
	c.mu.Lock()
	at := c.roll(now)
	charged := c.active | r.charged // a reload may have added or removed limits
	if r.reset != c.reset {
		charged, cost.Counted = 0, false // it was given back
	}
	for id, m := range c.countersIn(charged) {
		spent, charged := requests, int64(1)
		if id.Kind() == ratelimit.Tokens {
			spent, charged = tokens, r.prompt+r.output
		}
		if r.charged&(1<<id) == 0 {
			charged = 0
		}
		grown := int64(0)
		if id.Kind() == ratelimit.Tokens && r.grew&(1<<id.Unit()) != 0 {
			grown = r.spent - r.output
		}
		m.roll(id, at, c.location, c.admitted+1)
		if excess := spent - charged - grown; excess > 0 {
			m.charge(excess, at)
		} else if excess < 0 {
			first := min(charged, -excess)
			m.refund(first, r.number, min(r.at+c.clock.ahead, at)) // a clock may have been set back
			m.refund(-excess-first, r.last.number, min(r.last.at+c.clock.ahead, at))
		}
	}
	if !c.isModel {
		c.hour.add(at, requests, tokens)
	}
	if !r.hasEnded {
		c.ended(r)
	}
	if cost.Counted {
		c.usual.learn(at, r, cost, c.keptOut)
	}
	c.tell(at)
	crossed := c.crossed(at)
	c.mu.Unlock()
	c.report(crossed)
}
