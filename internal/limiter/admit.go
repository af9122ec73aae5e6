package limiter

import "time"

// Estimate is what a request is expected to cost.
type Estimate struct {
	// Prompt is the prompt's length, in units of about a token. The caller's
	// own ratio is applied to it. 0: the request costs no tokens, so no limit
	// of tokens refuses it.
	Prompt int64
	// Output is the largest output that the request allows, in tokens.
	// Undeclared: it does not say. 0: its API has no output.
	Output int64
	// Model is the one that is asked for, and Replies how many replies are.
	// They tell how large the output may be.
	Model   string
	Replies int64
	// Within reports whether it is a part of a request that is in flight, and
	// not one more at a time.
	Within bool
}

// Undeclared is the Output of a request that does not limit it.
const Undeclared = -1

// Cost is what a request has cost in the end. The zero Cost is that of a
// request that was not sent.
type Cost struct {
	Requests       int64
	Prompt, Output int64
	// Counted reports whether a backend counted the tokens. Estimates learn
	// only from such figures.
	Counted bool
	// Model is that of the estimate.
	Model string
}

// Reservation is the charge of a request that was admitted, until it is over.
// The zero Reservation, of a request that has no caller, does nothing.
type Reservation struct {
	caller *Caller
	// moment is when the request was admitted. charged are the ids of the
	// counters that were charged then, and demoted those whose limits gave the
	// request another tier.
	moment
	// reset is the latest reset of the caller at that time.
	reset            int64
	charged, demoted uint16
	tier             uint8
	// outputs reports whether the request may have an output.
	outputs bool
	// length is Estimate.Prompt; prompt and output are the estimate that was
	// charged.
	length, prompt, output int64
	flight
	// grew are the ids of the counters that were charged with output beyond the
	// estimate, and last is when that was last.
	last moment
	grew uint16
	// over reports whether the request is over, while its output is not. within
	// is Estimate.Within.
	over, within bool
}

// Tier returns the number of the request's tier, counted from 1 in order of
// importance. 0: it has none, and is above all.
func (r *Reservation) Tier() int { return int(r.tier) }

// Demoted yields the ids of the limits that gave the request another tier.
func (r *Reservation) Demoted(yield func(ID) bool) {
	for id := range ID(MaxLimits) {
		if r.demoted&(1<<id) != 0 && !yield(id) {
			return
		}
	}
}

// Estimated returns the tokens that the request was charged with.
func (r *Reservation) Estimated() (prompt, output int64) { return r.prompt, r.output }

// Open reports whether there is something to settle.
func (r *Reservation) Open() bool { return r.caller != nil }

// Reason is why a request was refused.
type Reason uint8

// The reasons.
const (
	// OverRate: too much was used in a window that slides. The request is
	// admitted after Refusal.Wait.
	OverRate Reason = iota
	// OverQuota: too much was used in a day or a month.
	OverQuota
	// TooLarge: the prompt alone exceeds a limit.
	TooLarge
	// TooMany: the caller has as many requests at a time as it may have.
	TooMany
	// OverPart: this replica's part of what is left is used. It gets another
	// one when the others know that.
	OverPart
	// Unheard: the request is larger than this replica's part of what is left.
	// A Claim may admit it.
	Unheard
	// InFlight: the requests in flight may still use so much that this one
	// would exceed the limit.
	InFlight
)

// Refusal says why a request was refused.
type Refusal struct {
	Reason Reason
	// Limit is the one that refused it. If there are several, it is the one
	// with the longest wait.
	Limit Limit
	// Allowed is how much of the limit this replica may use: all of it, or its
	// share. Used is how much is used, and Requested how much the request
	// needs. With TooMany these are requests. With InFlight, what the requests
	// in flight may still use counts as used, too.
	Allowed, Used, Requested int64
	// Wait is how long it takes until the request is admitted, if nothing else
	// is used. With OverQuota it ends when the day or the month begins.
	Wait time.Duration
}

// Names returns the names of what the limit counts and of its window. Requests
// at a time have none.
func (r *Refusal) Names() (kind, window string) {
	if r.Reason == TooMany {
		return "max_requests", ""
	}
	return r.Limit.Kind.String(), r.Limit.Unit.String()
}

// Try charges all limits with the estimate, or returns why it charged none: the
// request may be tried again later, so a refusal is not counted before Refused.
// An admitted request must be settled.
func (c *Caller) Try(now time.Time, e Estimate) (Reservation, *Refusal) {
	c.mu.Lock()
	at := c.roll(now)
	c.confirm(at)
	r, refusal := c.check(at, e, c.allowed)
	var crossed []Crossing
	if refusal == nil {
		crossed = c.charge(at, &r)
	}
	c.mu.Unlock()
	c.report(crossed)
	return r, refusal
}

// Check returns why Try would not charge the limits, or nil.
func (c *Caller) Check(now time.Time, e Estimate) *Refusal {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.roll(now)
	c.confirm(at)
	_, refusal := c.check(at, e, c.allowed)
	return refusal
}

// Refused counts a request that is refused.
func (c *Caller) Refused(now time.Time, refusal *Refusal) {
	var crossed []Crossing
	c.mu.Lock()
	at := c.roll(now)
	if refusal.Reason == TooMany {
		c.busy++
		c.hour.refuse(at, byMaxRequests)
	} else {
		id := refusal.Limit.ID()
		c.counters[id].refused++
		c.hour.refuse(at, int(id))
		if refusal.Reason <= OverQuota {
			crossed = c.reached(crossed, id, 100, refusal.Used, refusal.Allowed)
		}
	}
	c.mu.Unlock()
	c.report(crossed)
}

// check returns the charge of a request, or why it is refused, if so much of
// each limit is allowed.
func (c *Caller) check(at int64, e Estimate, allows func(m *counter, at, used int64) int64) (r Reservation, refusal *Refusal) {
	its := c.usual.known(e.Model, at)
	prompt, output := c.usual.estimate(e, its)
	r = Reservation{caller: c, moment: moment{at: at - c.clock.ahead}, reset: c.reset, charged: c.active, tier: uint8(c.tier.number), outputs: e.Output != 0, within: e.Within, length: e.Prompt, prompt: prompt, output: output}
	r.flight = c.flightOf(e, its, output)
	for id, m := range c.all() {
		need := int64(1)
		if id.Kind() == Tokens {
			need = prompt + output
		}
		if m.limit.Amount == 0 || need == 0 {
			continue
		}
		used := m.use(at)
		allowed := allows(m, at, used)
		// by its length, too: otherwise a ratio that is too high would refuse
		// the prompt for ever
		large := id.Kind() == Tokens && min(prompt, e.Prompt) > m.limit.Amount
		fits := add(used, min(need, m.limit.Amount)) <= allowed
		if id.Kind() == Tokens && fits {
			need = max(need, c.room(&r, m.limit))
			fits = add(used, min(need, m.limit.Amount)) <= m.limit.Amount
		}
		var over *Refusal
		if fits && id.Kind() == Tokens {
			over = c.overFlight(&r, m.limit, used)
			r.most[id.Unit()] = min(r.most[id.Unit()], max(0, m.limit.Amount-used-prompt)) // more would keep others out for longer
		}
		switch {
		case fits && over == nil && (!large || m.then > 0):
		case m.then > 0:
			r.demoted |= 1 << id
			r.tier = max(r.tier, m.then)
		default:
			next := Refusal{Limit: m.limit, Allowed: allowed, Used: used, Requested: need}
			switch {
			case large:
				next.Reason, next.Requested = TooLarge, prompt
			case over != nil:
				next = *over
			default:
				c.delay(m, at, &next)
			}
			if refusal == nil || refusal.Reason != TooLarge && (large || next.Wait > refusal.Wait) {
				refusal = &next
			}
		}
	}
	if refusal == nil && !e.Within {
		refusal = c.tooMany()
	}
	if refusal != nil {
		return Reservation{}, refusal
	}
	return r, nil
}

func (c *Caller) delay(m *counter, at int64, r *Refusal) {
	need := min(r.Requested, r.Limit.Amount)
	switch {
	case m.calendar():
		r.Reason, r.Wait = OverQuota, m.wait(at, need, Sharing{})
	case c.sharing.Apart:
		r.Wait = max(m.wait(at, need, c.sharing), shareWait)
	default:
		r.Wait = m.wait(at, need, Sharing{})
	}
	if !c.sharing.Apart && r.Allowed < r.Limit.Amount && add(r.Used, need) <= r.Limit.Amount {
		r.Reason, r.Wait = OverPart, max(c.sharing.Delay, time.Millisecond)
		if need > m.partOf(r.Used, at, c.sharing) {
			r.Reason = Unheard
		}
		c.reports.hurry()
	}
}

// shareWait is the shortest wait for a share, which is rounded.
const shareWait = 250 * time.Millisecond

// tooMany returns the refusal of a further request, if the caller has as many
// as it may have.
func (c *Caller) tooMany() *Refusal {
	if c.maxRequests == 0 || c.inFlight < c.maxRequests {
		return nil
	}
	return &Refusal{Reason: TooMany, Allowed: int64(c.maxRequests), Used: int64(c.inFlight), Requested: 1, Wait: time.Second}
}

// Upload counts a request among those in flight while its body comes, before it
// can be admitted, or returns why it may not come. An upload that may must be
// followed by Uploaded.
func (c *Caller) Upload() *Refusal {
	c.mu.Lock()
	defer c.mu.Unlock()
	refusal := c.tooMany()
	if refusal == nil {
		c.inFlight++
	}
	return refusal
}

// Uploaded records that all of the body has come, or that no more of it comes.
func (c *Caller) Uploaded() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inFlight--
}

func (c *Caller) charge(at int64, r *Reservation) (crossed []Crossing) {
	c.admitted++
	r.number = c.admitted
	for id, m := range c.all() {
		if id.Kind() == Tokens {
			m.charge(r.prompt+r.output, at)
		} else {
			m.charge(1, at)
		}
	}
	c.tell(at)
	for id := range r.Demoted {
		m := &c.counters[id]
		m.demoted++
		crossed = c.reached(crossed, id, 100, m.use(at), m.limit.Amount)
	}
	if !r.within {
		c.inFlight++
	}
	c.reserved += r.prompt + r.output
	c.add(&r.flight, 1)
	return crossed
}

// Unasked returns the reservation of what began without a request: nothing is
// charged until it is settled.
func (c *Caller) Unasked(now time.Time) Reservation {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Reservation{caller: c, moment: moment{at: c.roll(now) - c.clock.ahead, number: c.admitted}, reset: c.reset, tier: uint8(c.tier.number), over: true}
}

// Settle replaces the estimate with the real cost. What was too much goes back
// to the windows, and their parts, that it was taken from, and what was too
// little is charged now. Further calls do nothing.
func (r *Reservation) Settle(now time.Time, cost Cost) {
	c := r.caller
	if c == nil {
		return
	}
	r.caller = nil
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
		if id.Kind() == Tokens {
			spent, charged = tokens, r.prompt+r.output
		}
		if r.charged&(1<<id) == 0 {
			charged = 0
		}
		grown := int64(0)
		if r.grew&(1<<id) != 0 {
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
	c.hour.add(at, requests, tokens)
	if !r.over {
		c.ended(r)
	}
	if cost.Counted {
		c.usual.learn(at, r, cost, c.held)
	}
	c.tell(at)
	crossed := c.crossed(at)
	c.mu.Unlock()
	c.report(crossed)
}
