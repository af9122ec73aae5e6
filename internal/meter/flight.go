package meter

import (
	"hash/maphash"
	"time"
)

// Estimates are lower than what requests declare, because most use less. So all requests in flight together could use any
// number of tokens. Therefore what they may use beyond what they were charged with is bounded, too: with what is used,
// it is at most twice a limit. A caller of which no request in flight may use more than its charge is not bound.

// mostDeclared is the largest output that counts, so that those of all requests in flight can be added up.
const mostDeclared = 1 << 40

// unspent returns how much output the request may still have beyond what it was charged with.
func (r *Reservation) unspent() int64 { return max(0, r.declared-r.output-r.grown) }

// overFlight returns why a request does not fit into a limit, because of what requests in flight may still use, or nil. The
// other replicas may have as many in flight as this one.
func (c *Caller) overFlight(r *Reservation, l Limit, used int64) *Refusal {
	others := add(used, multiply(c.unspent, c.sharing.Replicas))
	need := r.prompt + r.output + multiply(r.unspent(), c.sharing.Replicas)
	if c.unspent == 0 || need == 0 || add(others, need) <= 2*l.Amount {
		return nil
	}
	return &Refusal{Reason: InFlight, Limit: l, Allowed: 2 * l.Amount, Used: others, Requested: need, Wait: time.Second}
}

// Spend charges the output that the request has had so far, if that is more than it was charged with.
func (r *Reservation) Spend(now time.Time, output int64) {
	c, more := r.caller, limited(output)-r.output-r.grown
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
	c.unspent -= r.unspent()
	r.grown, r.last = r.grown+more, moment{at - c.clock.ahead, c.admitted}
	c.unspent += r.unspent()
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
	c.reserved -= r.prompt + r.output + r.grown
	c.unspent -= r.unspent()
}

// Leave ends a request whose output goes on: it is charged with all output that it may have. The reservation that it returns
// may be settled later, or never.
func (r *Reservation) Leave(now time.Time) (later Reservation) {
	c := r.caller
	if c == nil {
		return later
	}
	r.Spend(now, r.declared)
	c.mu.Lock()
	c.ended(r)
	c.mu.Unlock()
	later, r.caller = *r, nil
	later.over = true
	return later
}

const (
	// leastUndeclared is what a request that declares no output counts as at least.
	leastUndeclared = 1024
	// maxModels is for how many models of a caller the largest output is kept. All others have one together.
	maxModels = 64
)

// largest is the largest output of the last requests for a model: of the current ones, and of as many before these.
type largest struct {
	outputs [2]int64
	number  uint8
}

func (l *largest) learn(output int64) {
	if l.number++; l.number > memory {
		l.outputs, l.number = [2]int64{l.outputs[1], 0}, 1
	}
	l.outputs[1] = max(l.outputs[1], output)
}

var seed = maphash.MakeSeed()

// largestOf returns that of a model. nil: there is none.
func (u *usual) largestOf(model string) *largest {
	if l := u.largest[maphash.String(seed, model)]; l != nil || len(u.largest) <= maxModels {
		return l
	}
	return u.largest[0]
}

func (u *usual) learnLargest(model string, output int64) {
	l, key := u.largestOf(model), maphash.String(seed, model)
	if l == nil {
		if u.largest == nil {
			u.largest = make(map[uint64]*largest)
		}
		if len(u.largest) >= maxModels {
			key = 0
		}
		l = new(largest)
		u.largest[key] = l
	}
	l.learn(output)
}

// declared returns how much output a request may have.
func (u *usual) declared(e Estimate) int64 {
	if e.Output >= 0 {
		return min(e.Output, mostDeclared)
	}
	declared := leastUndeclared * min(max(1, e.Replies), mostDeclared/leastUndeclared)
	if l := u.largestOf(e.Model); l != nil {
		declared = max(declared, l.outputs[0], l.outputs[1])
	}
	return declared
}
