package limiter

import (
	"hash/maphash"
	"math/bits"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// A request is charged with an estimate, and may cost more. If only estimates
// counted, a caller whose answers so far were short could start any number of
// long ones at the same time. So a limit of tokens also counts the output that
// the requests in flight may still have. A further request must fit into the
// limit together with that.
//
// At first, the maximum output of a request is what it declares, or 16k tokens
// for each reply. With experience, it approaches the largest output that the
// caller got for the model within a day. It is learned step by step, like the
// window of a TCP connection: each answer that came while this rule kept out
// other requests vouches for one more request in flight, so that their number
// doubles with each round of answers. An answer of less than 128 tokens vouches
// for a fraction of a request, so that a series of short answers, which cost a
// caller next to nothing, does not vouch for many long ones. Each caller's
// experience is separate.
//
// A caller without requests in flight has a simpler rule: its request may
// exceed the limit by at most a tenth if it has its maximum output. To make
// sure of that, at most a fifth of the limit must be free besides the prompt.

const (
	// mostOutput is the maximum output of a reply while nothing is known.
	mostOutput = 16 << 10
	// vouching is the shortest output that vouches for one more request in
	// flight.
	vouching = 128
	// mostDeclared is the largest declared output that counts, so that the sum
	// for all requests in flight does not overflow.
	mostDeclared = 1 << 40
	// remembered is the shortest time for which an output is remembered.
	remembered = int64(24 * time.Hour)
	// maxModels is the number of models of a caller whose outputs are
	// remembered separately. All further models share one entry.
	maxModels = 64
)

// flight is the state of a request while it is in flight.
type flight struct {
	model string
	// replies is the number of requested replies. It is 0 if the request can
	// have no output.
	replies int64
	// most is the request's maximum output. Each limit of tokens may assume
	// another maximum, so there is one for each unit.
	most [ratelimit.Units]int64
	// spent is the output that the request was charged with so far.
	spent int64
}

// left returns how much more output the request may have, by the limit of a
// unit.
func (f *flight) left(u ratelimit.Unit) int64 { return max(0, f.most[u]-f.spent) }

// flightOf returns the state of a request that starts with a charge for output.
// use is the use of the request's model, or nil if there was none.
func (c *Limiter) flightOf(e ratelimit.Estimate, use *modelUse, output int64) flight {
	f := flight{model: e.Model, spent: output}
	if e.Output != 0 {
		f.replies = max(1, e.Replies)
	}
	if e.Prompt <= 0 || e.Output == 0 {
		return f
	}
	var known *outputs
	if use != nil {
		known = &use.outputs
	}
	for id, m := range c.all() {
		if id.Kind() == ratelimit.Tokens {
			f.most[id.Unit()] = known.most(e, m.limit.Amount, c.sharing.Replicas)
		}
	}
	return f
}

// add adds the output that the request may still have to the caller's sums, or
// subtracts it if sign is -1.
func (c *Limiter) add(f *flight, sign int64) {
	for u := range c.unspent {
		c.unspent[u] += sign * f.left(ratelimit.Unit(u))
	}
}

// room returns how much of a limit of tokens must be left for a request if
// nothing else is in flight. Each replica may admit one such request.
func (c *Limiter) room(r *Reservation, l ratelimit.Limit) int64 {
	return r.prompt + min(multiply(r.flight.most[l.Unit], c.sharing.Replicas), l.Amount/10*3) - l.Amount/10
}

// overFlight returns the refusal of a request that does not fit into a limit
// together with the output that requests in flight may still have, or nil. It
// assumes that each replica has as many requests in flight as this one.
func (c *Limiter) overFlight(r *Reservation, l ratelimit.Limit, used int64) *ratelimit.Refusal {
	unspent := c.unspent[l.Unit]
	total := add(used, multiply(unspent, c.sharing.Replicas))
	need := r.prompt + r.output + multiply(r.left(l.Unit), c.sharing.Replicas)
	if unspent == 0 || need == 0 || add(total, need) <= l.Amount {
		return nil
	}
	c.keptOut = c.admitted
	return &ratelimit.Refusal{Reason: ratelimit.InFlight, Limit: l, Allowed: l.Amount, Used: total, Requested: need,
		Wait: time.Second}
}

// Spend charges the request's output so far, as far as it exceeds the charge.
func (r *Reservation) Spend(now time.Time, output int64) {
	if r.ofModel != nil {
		r.ofModel.Spend(now, output)
	}
	r.spend(now, output)
}

func (r *Reservation) spend(now time.Time, output int64) {
	c, more := r.caller, limited(output)-r.spent
	if c == nil || more <= 0 {
		return
	}
	c.mu.Lock()
	at := c.roll(now)
	if r.reset != c.reset {
		c.mu.Unlock()
		return // the caller got its use back, and this request costs nothing
	}
	for id, m := range c.all() {
		if id.Kind() == ratelimit.Tokens {
			m.charge(more, at)
			r.grew |= 1 << id.Unit()
		}
	}
	c.add(&r.flight, -1)
	r.spent, r.last = r.spent+more, moment{at - c.clock.ahead, c.admitted}
	c.add(&r.flight, 1)
	if r.replies > 0 {
		c.usual.of(r.model, at).atLeast(output, r.replies)
	}
	if !r.hasEnded { // otherwise it is in no sum of requests in flight
		c.reserved += more
	}
	c.tell(at)
	crossed := c.crossed(at)
	c.mu.Unlock()
	c.report(crossed)
}

func (c *Limiter) ended(r *Reservation) {
	if !r.isPart {
		c.inFlight--
	}
	c.reserved -= r.prompt + r.spent
	c.add(&r.flight, -1)
}

// Leave ends a request whose output goes on, and charges it with its maximum
// output. The returned reservation may be settled later, or never.
func (r *Reservation) Leave(now time.Time) (later Reservation) {
	c := r.caller
	if c == nil {
		return later
	}
	most := int64(0)
	for _, each := range r.flight.most {
		most = max(most, each)
	}
	r.spend(now, most)
	if r.ofModel != nil {
		ofModel := r.ofModel.Leave(now)
		r.ofModel = &ofModel
	}
	c.mu.Lock()
	c.ended(r)
	c.changes.Add(1)
	c.mu.Unlock()
	later, r.caller = *r, nil
	later.hasEnded = true
	return later
}

// outputs are the outputs of requests for a model, in two periods of 24 hours:
// the previous one and the current one, which started at since. largest is the
// largest output of a reply. vouched is the output in flight for which all
// answers vouch.
type outputs struct {
	since            int64
	largest, vouched [2]int64
}

// forget starts a new period if the current one is over.
func (o *outputs) forget(now int64) {
	switch since := now - o.since; {
	case since >= 2*remembered, since < 0: // or the clock was set back
		*o = outputs{since: now}
	case since >= remembered:
		*o = outputs{since: o.since + remembered, largest: [2]int64{o.largest[1], 0},
			vouched: [2]int64{o.vouched[1], 0}}
	}
}

// atLeast records the output so far of a request that may not have ended.
func (o *outputs) atLeast(output, replies int64) {
	o.largest[1] = max(o.largest[1], min(output, mostLearned)/max(1, replies))
}

func (o *outputs) vouch(output int64) {
	o.vouched[1] = add(o.vouched[1], min(output, vouching)*mostOutput/vouching)
}

var seed = maphash.MakeSeed()

// of returns the use of a model for writing, and adds it if it is new.
func (u *usual) of(model string, now int64) *modelUse {
	key := maphash.String(seed, model)
	use := u.byModel[key]
	if use == nil {
		if u.byModel == nil {
			u.byModel = make(map[uint64]*modelUse)
		}
		if len(u.byModel) >= maxModels {
			key = 0
			use = u.byModel[key]
		}
		if use == nil {
			use = &modelUse{noAverages, outputs{since: now}}
			u.byModel[key] = use
		}
	}
	use.forget(now)
	return use
}

// known returns the use of a model, or nil if there was none.
func (u *usual) known(model string, now int64) *modelUse {
	use := u.byModel[maphash.String(seed, model)]
	if use == nil && len(u.byModel) >= maxModels {
		use = u.byModel[0]
	}
	if use != nil {
		use.forget(now)
	}
	return use
}

// most returns the maximum output that a limit of this amount, which some
// replicas share, assumes for a request. The more answers have vouched, the
// closer it is to the largest output so far. limit is 0 if the counter has no
// limit.
func (o *outputs) most(e ratelimit.Estimate, limit int64, shared int) int64 {
	replies := min(max(1, e.Replies), mostDeclared/mostOutput)
	most := replies * mostOutput
	if e.Output >= 0 {
		most = min(e.Output, mostDeclared)
	}
	if o == nil {
		return most
	}
	largest, vouched := multiply(max(o.largest[0], o.largest[1]), int(replies)),
		multiply(add(o.vouched[0], o.vouched[1]), shared)
	if limit > 0 {
		high, low := bits.Mul64(uint64(most), uint64(limit))
		less, _ := bits.Div64(high, low, uint64(add(limit, vouched)))
		largest = max(largest, int64(less))
	}
	if e.Output < 0 {
		return largest
	}
	return min(most, largest)
}
