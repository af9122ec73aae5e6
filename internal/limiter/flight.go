package limiter

import (
	"hash/maphash"
	"math/bits"
	"time"
)

// A request is charged with an estimate, and may cost more. If only estimates
// counted, a caller that has had short answers could ask for any number of long
// ones at once. So each limit of tokens counts, besides what is used, the
// output that the requests in flight may still have: with that, a further
// request has to fit into the limit.
//
// How much a request may have is what it declares, or 16k tokens for each
// reply, until more is known: then it is the largest output that the caller got
// for the model within a day. That is learned step by step, like the window of
// a TCP connection: each answer that came while this rule held back others
// vouches for one more request in flight, so that their number doubles with
// each round of answers. An answer of less than 128 tokens vouches for a part
// of one. So short answers one after the other, which cost a caller next to
// nothing, do not vouch for many long ones at once. What other callers got does
// not count.
//
// A caller without requests in flight is bound in another way. Its request may
// exceed the limit by a tenth if it has all the output that it may have; but a
// fifth of a limit is the most that is kept free for that.

const (
	// mostOutput is how much output a reply has at most, as long as nothing is
	// known.
	mostOutput = 16 << 10
	// vouching is the shortest output that vouches for one more request in
	// flight.
	vouching = 128
	// mostDeclared is the largest output that counts, so that those of all
	// requests in flight can be added up.
	mostDeclared = 1 << 40
	// remembered is how long an output is remembered, at least.
	remembered = int64(24 * time.Hour)
	// maxModels is for how many models of a caller outputs are remembered. All
	// others have one together.
	maxModels = 64
)

// flight is what a request in flight counts as.
type flight struct {
	model string
	// replies is how many the request asks for.
	replies int64
	// most is how much output the request may have, as each limit of tokens
	// counts it, by the limit's unit.
	most [units]int64
	// spent is what the request has been charged with for its output so far.
	spent int64
}

// left returns how much more output the request may have, as a limit counts it.
func (f *flight) left(u Unit) int64 { return max(0, f.most[u]-f.spent) }

// flightOf returns what a request counts as. its is the use of its model, or
// nil if there was none.
func (c *Caller) flightOf(e Estimate, its *modelUse, output int64) flight {
	f := flight{model: e.Model, replies: max(1, e.Replies), spent: output}
	if e.Prompt <= 0 || e.Output == 0 {
		return f
	}
	var known *outputs
	if its != nil {
		known = &its.outputs
	}
	for id, m := range c.all() {
		if id.Kind() == Tokens {
			f.most[id.Unit()] = known.most(e, m.limit.Amount, c.sharing.Replicas)
		}
	}
	return f
}

// add adds what the request may still have to what may follow.
func (c *Caller) add(f *flight, sign int64) {
	for u := range c.unspent {
		c.unspent[u] += sign * f.left(Unit(u))
	}
}

// room returns how much has to be left of a limit of tokens for a request with
// nothing else in flight. Each replica may have one.
func (c *Caller) room(r *Reservation, l Limit) int64 {
	return r.prompt + min(multiply(r.flight.most[l.Unit], c.sharing.Replicas), l.Amount/10*3) - l.Amount/10
}

// overFlight returns why a request does not fit into a limit, because of what
// requests in flight may still use, or nil. The other replicas may have as many
// in flight as this one.
func (c *Caller) overFlight(r *Reservation, l Limit, used int64) *Refusal {
	unspent := c.unspent[l.Unit]
	with := add(used, multiply(unspent, c.sharing.Replicas))
	need := r.prompt + r.output + multiply(r.left(l.Unit), c.sharing.Replicas)
	if unspent == 0 || need == 0 || add(with, need) <= l.Amount {
		return nil
	}
	c.held = c.admitted
	return &Refusal{Reason: InFlight, Limit: l, Allowed: l.Amount, Used: with, Requested: need, Wait: time.Second}
}

// Spend charges the output that the request has had so far, if that is more
// than it was charged with.
func (r *Reservation) Spend(now time.Time, output int64) {
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
		if id.Kind() == Tokens {
			m.charge(more, at)
			r.grew |= 1 << id
		}
	}
	c.add(&r.flight, -1)
	r.spent, r.last = r.spent+more, moment{at - c.clock.ahead, c.admitted}
	c.add(&r.flight, 1)
	if r.outputs {
		c.usual.of(r.model, at).atLeast(output, r.replies)
	}
	c.reserved += more
	c.tell(at)
	crossed := c.crossed(at)
	c.mu.Unlock()
	c.report(crossed)
}

func (c *Caller) ended(r *Reservation) {
	if !r.within {
		c.inFlight--
	}
	c.reserved -= r.prompt + r.spent
	c.add(&r.flight, -1)
}

// Leave ends a request whose output goes on: it is charged with all output that
// it may have. The reservation that it returns may be settled later, or never.
func (r *Reservation) Leave(now time.Time) (later Reservation) {
	c := r.caller
	if c == nil {
		return later
	}
	most := int64(0)
	for _, each := range r.flight.most {
		most = max(most, each)
	}
	r.Spend(now, most)
	c.mu.Lock()
	c.ended(r)
	c.mu.Unlock()
	later, r.caller = *r, nil
	later.over = true
	return later
}

// outputs are those of the requests for a model: of the day before, and of the
// current one, which is not that of a calendar. largest is the largest output
// of a reply, and vouched is how much output in flight all of them vouch for.
type outputs struct {
	since            int64
	largest, vouched [2]int64
}

// forget forgets what is too old.
func (o *outputs) forget(now int64) {
	switch since := now - o.since; {
	case since >= 2*remembered, since < 0: // or the clock was set back
		*o = outputs{since: now}
	case since >= remembered:
		*o = outputs{since: o.since + remembered, largest: [2]int64{o.largest[1], 0}, vouched: [2]int64{o.vouched[1], 0}}
	}
}

// atLeast records that a request has had so much output, and is not over.
func (o *outputs) atLeast(output, replies int64) {
	o.largest[1] = max(o.largest[1], min(output, mostLearned)/max(1, replies))
}

func (o *outputs) vouch(output int64) {
	o.vouched[1] = add(o.vouched[1], min(output, vouching)*mostOutput/vouching)
}

var seed = maphash.MakeSeed()

// of returns the use of a model, which the caller may change.
func (u *usual) of(model string, now int64) *modelUse {
	key := maphash.String(seed, model)
	its := u.byModel[key]
	if its == nil {
		if u.byModel == nil {
			u.byModel = make(map[uint64]*modelUse)
		}
		if len(u.byModel) >= maxModels {
			key = 0
			its = u.byModel[key]
		}
		if its == nil {
			its = &modelUse{noAverages, outputs{since: now}}
			u.byModel[key] = its
		}
	}
	its.forget(now)
	return its
}

// known returns the use of a model, or nil if there was none.
func (u *usual) known(model string, now int64) *modelUse {
	its := u.byModel[maphash.String(seed, model)]
	if its == nil && len(u.byModel) >= maxModels {
		its = u.byModel[0]
	}
	if its != nil {
		its.forget(now)
	}
	return its
}

// most returns how much output a request may have, as a limit of this amount
// counts it, which replicas share. 0: it is no limit.
func (o *outputs) most(e Estimate, limit int64, shared int) int64 {
	replies := min(max(1, e.Replies), mostDeclared/mostOutput)
	most := replies * mostOutput
	if e.Output >= 0 {
		most = min(e.Output, mostDeclared)
	}
	if o == nil {
		return most
	}
	largest, vouched := multiply(max(o.largest[0], o.largest[1]), int(replies)), multiply(add(o.vouched[0], o.vouched[1]), shared)
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
