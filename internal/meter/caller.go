package meter

import (
	"iter"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"
)

// Settings are what a config says of a caller.
type Settings struct {
	// Limits has at most one limit of each kind and unit.
	Limits []Limit
	// MaxRequests is how many requests the caller may have at a time. 0: any number.
	MaxRequests int
	// Tier is the caller's own tier, and Tiers are all of them in order of importance.
	Tier  string
	Tiers []string
	// Location is where days and months begin. nil: UTC.
	Location *time.Location
}

// Caller is what one caller uses, and may use.
type Caller struct {
	name string
	id   CallerID
	// hook gets the marks that the use has reached. It is called without the lock.
	hook func(Crossing)

	mu sync.Mutex
	// active are the ids of meters that count, one bit each: those of all limits, and the tokens of a
	// day and a month, which are always counted.
	active      uint16
	meters      [maxLimits]meter
	location    *time.Location
	tier        tier
	maxRequests int
	// inFlight are the requests that were admitted and are not over, and reserved the tokens that they
	// were charged with. busy is how many were refused because there were maxRequests of them.
	inFlight int
	reserved int64
	busy     uint64
	// replicas is how many replicas share the limits without hearing each other, or 0.
	replicas int
	// latest is the latest time that a method was called with.
	latest int64
	usual  usual
}

// tier is the caller's own: its name, and its number, counted from 1. 0: it has none.
type tier struct {
	name   string
	number int
}

// Estimate is what a request is expected to cost.
type Estimate struct {
	// Prompt is the prompt's length, in units of about a token. The caller's own ratio is applied to it.
	// 0: the request costs no tokens, so no limit of tokens refuses it.
	Prompt int64
	// Output is the largest output that the request allows, in tokens. Undeclared: it does not say. 0:
	// its API has no output.
	Output int64
}

// Undeclared is the Output of a request that does not limit it.
const Undeclared = -1

// Cost is what a request has cost in the end. The zero Cost is that of a request that was not sent.
type Cost struct {
	Requests       int64
	Prompt, Output int64
	// Counted reports whether a backend counted the tokens. Estimates learn only from such figures.
	Counted bool
}

// Reservation is the charge of a request that was admitted, until it is over. The zero Reservation, of a
// request that has no caller, does nothing.
type Reservation struct {
	caller *Caller
	// at is when the request was admitted, and charged are the ids of the meters that were charged then.
	at      int64
	charged uint16
	tier    uint8
	// outputs reports whether the request may have an output.
	outputs bool
	// length is Estimate.Prompt; prompt and output are the estimate that was charged.
	length, prompt, output int64
}

// Tier returns the number of the request's tier, counted from 1 in order of importance. 0: it has none,
// and is above all.
func (r *Reservation) Tier() int { return int(r.tier) }

// Estimated returns the tokens that the request was charged with.
func (r *Reservation) Estimated() (prompt, output int64) { return r.prompt, r.output }

// Open reports whether there is something to settle.
func (r *Reservation) Open() bool { return r.caller != nil }

// Reason is why a request was refused.
type Reason uint8

// The reasons.
const (
	// OverRate: too much was used in a window that slides. The request is admitted after Refusal.Wait.
	OverRate Reason = iota
	// OverQuota: too much was used in a day or a month.
	OverQuota
	// TooLarge: the prompt alone exceeds a limit.
	TooLarge
	// TooMany: the caller has as many requests at a time as it may have.
	TooMany
)

// Refusal says why a request was refused.
type Refusal struct {
	Reason Reason
	// Limit is the one that refused it. If there are several, it is the one with the longest wait.
	Limit Limit
	// Allowed is how much of the limit this replica may use: all of it, or its share. Used is how much is
	// used, and Requested how much the request needs. With TooMany these are requests.
	Allowed, Used, Requested int64
	// Wait is how long it takes until the request is admitted, if nothing else is used. With OverQuota it
	// ends when the day or the month begins.
	Wait time.Duration
}

// Crossing says that the use of a limit has reached a mark for the first time in its window.
type Crossing struct {
	Caller string
	Limit  Limit
	// Percent is 80 or 100. A request that was refused or got another tier makes it 100.
	Percent       int
	Used, Allowed int64
	// Ends is when the window ends.
	Ends time.Time
}

// NewCaller returns the meters of a caller that has used nothing. hook may be nil.
func NewCaller(name string, hook func(Crossing)) *Caller {
	return newCaller(name, IDOf(name), hook)
}

func newCaller(name string, id CallerID, hook func(Crossing)) *Caller {
	c := &Caller{name: name, id: id, hook: hook, usual: newUsual}
	for id := range ID(maxLimits) {
		c.meters[id].limit = Limit{Kind: id.Kind(), Unit: id.Unit()}
	}
	c.Change(time.Time{}, Settings{})
	return c
}

// Name returns the caller's name.
func (c *Caller) Name() string { return c.name }

// ID returns IDOf the caller's name.
func (c *Caller) ID() CallerID { return c.id }

// counted are the meters that count even without a limit, for reports: the tokens of a day and a month.
var counted = []ID{Limit{Kind: Tokens, Unit: Day}.ID(), Limit{Kind: Tokens, Unit: Month}.ID()}

// Change applies the settings of a new config. What was used of a limit stays used, even if its amount
// has changed.
func (c *Caller) Change(now time.Time, s Settings) {
	c.mu.Lock()
	defer c.mu.Unlock()
	location := s.Location
	if location == nil {
		location = time.UTC
	}
	var active uint16
	for id := range c.meters {
		c.meters[id].limit.Amount, c.meters[id].limit.Then, c.meters[id].then = 0, "", 0
	}
	for _, l := range s.Limits {
		m := &c.meters[l.ID()]
		m.limit, m.then = l, 1+slices.Index(s.Tiers, l.Then)
		active |= 1 << l.ID()
	}
	for _, id := range counted {
		active |= 1 << id
	}
	for id := range c.meters {
		m := &c.meters[id]
		if m.calendar() && location != c.location {
			m.end = m.start // midnight is at another time
		}
	}
	c.active, c.location, c.maxRequests = active, location, s.MaxRequests
	c.tier = tier{s.Tier, 1 + slices.Index(s.Tiers, s.Tier)}
	if !now.IsZero() {
		c.roll(now)
	}
}

// all iterates over the ids of the meters that count.
func (c *Caller) all() iter.Seq[ID] {
	return func(yield func(ID) bool) {
		for mask := c.active; mask != 0; mask &= mask - 1 {
			if !yield(ID(bits.TrailingZeros16(mask))) {
				return
			}
		}
	}
}

// standstill is how far a clock may be set back before that makes a difference: callers read the clock
// before they get the lock, so time may seem to go back a little.
const standstill = int64(time.Minute)

// roll makes all windows those of now.
func (c *Caller) roll(now time.Time) (at int64) {
	at = now.UnixNano()
	if at < c.latest && c.latest-at <= standstill {
		at = c.latest
	}
	c.latest = at
	for mask := c.active; mask != 0; mask &= mask - 1 {
		id := ID(bits.TrailingZeros16(mask))
		c.meters[id].roll(id, at, c.location)
	}
	return at
}

// Admit charges all limits with the estimate, or returns why it charged none. An admitted request must be
// settled.
func (c *Caller) Admit(now time.Time, e Estimate) (Reservation, *Refusal) {
	c.mu.Lock()
	r, refusal, crossed := c.admit(c.roll(now), e)
	c.mu.Unlock()
	c.report(crossed)
	return r, refusal
}

func (c *Caller) admit(at int64, e Estimate) (r Reservation, refusal *Refusal, crossed []Crossing) {
	prompt, output := c.usual.estimate(e)
	r = Reservation{caller: c, at: at, charged: c.active, tier: uint8(c.tier.number), outputs: e.Output != 0, length: e.Prompt, prompt: prompt, output: output}
	var demoted uint16
	for mask := c.active; mask != 0; mask &= mask - 1 {
		id := ID(bits.TrailingZeros16(mask))
		m, need := &c.meters[id], int64(1)
		if id.Kind() == Tokens {
			need = prompt + output
		}
		if m.limit.Amount == 0 || need == 0 {
			continue
		}
		allowed, used := m.allowed(c.replicas), m.use(at, c.apart())
		large := id.Kind() == Tokens && prompt > m.limit.Amount
		fits := allowed > 0 && add(used, min(need, allowed)) <= allowed
		switch {
		case fits && (!large || m.then > 0):
		case m.then > 0:
			demoted |= 1 << id
			r.tier = max(r.tier, uint8(m.then))
		default:
			next := Refusal{Limit: m.limit, Allowed: allowed, Used: used, Requested: need}
			if large {
				next.Reason, next.Requested = TooLarge, prompt
			} else {
				next.Wait = m.wait(at, min(need, allowed), allowed, c.apart())
				if m.calendar() {
					next.Reason = OverQuota
				}
			}
			if refusal == nil || refusal.Reason != TooLarge && (large || next.Wait > refusal.Wait) {
				refusal = &next
			}
		}
	}
	switch {
	case refusal != nil:
		id := refusal.Limit.ID()
		c.meters[id].refused++
		if refusal.Reason != TooLarge {
			crossed = c.reached(crossed, id, 100, refusal.Used, refusal.Allowed)
		}
		return Reservation{}, refusal, crossed
	case c.maxRequests > 0 && c.inFlight >= c.maxRequests:
		c.busy++
		return Reservation{}, &Refusal{Reason: TooMany, Allowed: int64(c.maxRequests), Used: int64(c.inFlight), Requested: 1, Wait: time.Second}, nil
	}
	for mask := c.active; mask != 0; mask &= mask - 1 {
		if id := ID(bits.TrailingZeros16(mask)); id.Kind() == Tokens {
			c.meters[id].charge(prompt + output)
		} else {
			c.meters[id].charge(1)
		}
	}
	for ; demoted != 0; demoted &= demoted - 1 {
		id := ID(bits.TrailingZeros16(demoted))
		m := &c.meters[id]
		m.demoted++
		crossed = c.reached(crossed, id, 100, m.use(at, c.apart()), m.allowed(c.replicas))
	}
	c.inFlight++
	c.reserved += prompt + output
	return r, nil, crossed
}

// Settle replaces the estimate with the real cost. What was too much goes back to the windows that it was
// taken from, and what was too little is charged now. Further calls do nothing.
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
	for mask := c.active | r.charged; mask != 0; mask &= mask - 1 { // a reload may have added or removed limits
		id := ID(bits.TrailingZeros16(mask))
		spent, charged := requests, int64(1)
		if id.Kind() == Tokens {
			spent, charged = tokens, r.prompt+r.output
		}
		if r.charged&(1<<id) == 0 {
			charged = 0
		}
		m := &c.meters[id]
		m.roll(id, at, c.location)
		if spent > charged {
			m.charge(spent - charged)
		} else if spent < charged {
			m.refund(charged-spent, r.at)
		}
	}
	c.inFlight--
	c.reserved -= r.prompt + r.output
	if cost.Counted {
		c.usual.learn(r, cost)
	}
	crossed := c.crossed(at)
	c.mu.Unlock()
	c.report(crossed)
}

// crossed returns the marks that the use of the limits has reached.
func (c *Caller) crossed(at int64) (crossed []Crossing) {
	for mask := c.active; mask != 0; mask &= mask - 1 {
		id := ID(bits.TrailingZeros16(mask))
		if m := &c.meters[id]; m.limit.Amount > 0 && m.marked < 100 {
			used, allowed := m.use(at, c.apart()), m.allowed(c.replicas)
			if mark := m.crosses(used, allowed); mark > 0 {
				crossed = append(crossed, m.crossing(c.name, mark, used, allowed))
			}
		}
	}
	return crossed
}

// reached adds a mark, unless it was reported in this window.
func (c *Caller) reached(crossed []Crossing, id ID, mark int, used, allowed int64) []Crossing {
	m := &c.meters[id]
	if m.marked >= mark {
		return crossed
	}
	m.marked = mark
	return append(crossed, m.crossing(c.name, mark, used, allowed))
}

func (m *meter) crossing(caller string, mark int, used, allowed int64) Crossing {
	return Crossing{Caller: caller, Limit: m.limit, Percent: mark, Used: used, Allowed: allowed, Ends: time.Unix(0, m.end)}
}

func (c *Caller) report(crossed []Crossing) {
	if c.hook == nil {
		return
	}
	for _, x := range crossed {
		c.hook(x)
	}
}

// usual is what a caller's requests usually cost, as moving averages.
type usual struct {
	// length and prompt are Estimate.Prompt and the tokens that backends counted: the ratio of these
	// corrects estimates.
	length, prompt float64
	// output is that of requests that may have one.
	output           float64
	prompts, outputs int
}

var newUsual = usual{length: 256, prompt: 256, output: 128}

// memory is how many requests a moving average remembers.
const memory = 16

// The ratio's bounds: an estimate is never further from the prompt's length.
const (
	leastRatio = 1.0 / 8
	mostRatio  = 4.0
)

func (u *usual) ratio() float64 { return min(max(u.prompt/u.length, leastRatio), mostRatio) }

// estimate returns how many tokens a request is expected to cost.
func (u *usual) estimate(e Estimate) (prompt, output int64) {
	if e.Prompt <= 0 {
		return 0, 0
	}
	prompt = int64(math.Ceil(float64(limited(e.Prompt)) * u.ratio()))
	twice := max(1, int64(math.Ceil(2*u.output)))
	if e.Output < 0 {
		return prompt, twice
	}
	return prompt, min(e.Output, twice)
}

func (u *usual) learn(r *Reservation, cost Cost) {
	if r.length > 0 && cost.Prompt > 0 {
		part := weight(&u.prompts)
		u.length += part * (float64(limited(r.length)) - u.length)
		u.prompt += part * (float64(limited(cost.Prompt)) - u.prompt)
	}
	if r.outputs {
		u.output += weight(&u.outputs) * (float64(limited(cost.Output)) - u.output)
	}
}

// weight is how much the next sample counts: the first ones count more.
func weight(samples *int) float64 {
	*samples = min(*samples+1, memory)
	return 1 / float64(*samples+1)
}

// limited returns a number of tokens that a counter can add.
func limited(tokens int64) int64 { return min(max(0, tokens), MaxAmount) }
