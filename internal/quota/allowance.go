package quota

import (
	"math"
	"sync/atomic"
	"time"
)

// Mark is the place of a request in the order of those that were sent, and what
// was deducted for it. The zero Mark is that of a request for which nothing
// was.
type Mark struct {
	meter    *Meter
	order    int64
	deducted [2]deducted
	// tier is that of the request, which got cost at the instant sent. cost is
	// 0 if no tier keeps a share.
	tier       int
	cost, sent int64
}

// deducted is the estimate that was deducted for a request, and the sum of the
// estimates then, itself included.
type deducted struct{ cost, sum int64 }

// Deduct deducts a request of this cost, in tokens, from what is left.
func (m *Meter) Deduct(cost int64) Mark {
	return Mark{meter: m, order: m.sent.Add(1), deducted: [...]deducted{m.allowances[0].deduct(1), m.allowances[1].deduct(cost)}}
}

// Give is Deduct, and counts the request among those of its tier.
func (m *Meter) Give(tier int, cost int64, now time.Time) Mark {
	k := m.Deduct(cost)
	k.tier, k.cost, k.sent = tier, min(cost, highestCost), instant(now)
	m.given.add(tier, k.cost, k.sent)
	m.spend(k.cost, now)
	return k
}

// Return gives back what was deducted for a request that was not executed. The
// reading of a later reply, or of its own, already says what is left without
// it.
func (k Mark) Return() {
	if k.meter == nil {
		return
	}
	if k.cost > 0 {
		k.meter.given.takeBack(k.tier, k.cost, k.sent)
		k.meter.unspend(k.cost, k.sent)
	}
	for i, d := range k.deducted {
		if a := &k.meter.allowances[i]; a.order.Load() < k.order {
			a.estimated.Add(-d.cost)
		}
	}
}

const (
	// highestCost keeps sums from an overflow. No limit is counted as a higher
	// one.
	highestCost = 1 << 40
	// highestUnknown is the highest estimate that is deducted from a limit of
	// which there was no reading yet.
	highestUnknown = 1 << 14
)

// deduct deducts an estimate, but never more than the limit.
func (a *allowance) deduct(cost int64) deducted {
	limit := a.limit.Load()
	if limit == 0 {
		limit = highestUnknown
	}
	cost = min(cost, limit)
	return deducted{cost, a.estimated.Add(cost)}
}

// HasRoom reports whether the limits have room for one more request of this
// cost. A limit has if it is not known what is left of it.
func (m *Meter) HasRoom(cost int64, now Instant) bool {
	return m.allowances[0].hasRoom(1, now) && m.allowances[1].hasRoom(min(cost, highestCost), now)
}

// Instant is a time, counted in nanoseconds from a time long before the process
// began. It is made once for all that is asked at that time.
type Instant int64

// At returns the instant of a time. If a wall clock is set, it does not jump.
func At(t time.Time) Instant { return 1<<60 + Instant(t.Sub(began)) }

// millis returns the instant in milliseconds, as instant does.
func (i Instant) millis() int64 { return 1<<40 + time.Duration(i-1<<60).Milliseconds() }

// Limit returns the limit of requests a minute for a kind of 0, and of tokens a
// minute for 1, by the newest reply that named it. It is 0 if it is not known.
func (m *Meter) Limit(kind int) int64 { return m.allowances[kind].limit.Load() }

// Left is what is left of a rate limit.
type Left struct {
	// Kind is requests or tokens.
	Kind string
	// Limit is the limit by the minute, and Left what is left of it in this
	// window, by the newest reading and what was sent since.
	Limit, Left int64
	// Ratio is the part that is left of a window. It is known if HasRatio is
	// set.
	Ratio    float64
	HasRatio bool
	// Reset is for how long the reading still counts.
	Reset time.Duration
}

// Left returns what is left of each limit of which there is a reading.
func (m *Meter) Left(now time.Time) (left []Left) {
	at := At(now)
	for i, kind := range [...]string{"requests", "tokens"} {
		if a := &m.allowances[i]; at < Instant(a.until.Load()) {
			l := Left{Kind: kind, Limit: a.limit.Load(), Left: max(0, a.left(at)), Reset: time.Duration(Instant(a.until.Load()) - at)}
			if most := a.most.Load(); most > 0 {
				l.Ratio, l.HasRatio = min(1, float64(l.Left)/float64(most)), true
			}
			left = append(left, l)
		}
	}
	return left
}

// allowance is what is left of a rate limit: what remained by a reply, less the
// estimates of all requests that were sent after the request of that reply. For
// this, it needs no list of requests: the sum of the estimates when that
// request was sent is added to what remained, and the sum of now is subtracted.
//
// If a reading is recorded during a pick, the pick may see parts of both
// readings. It then decides by about what is left, as it does anyway.
type allowance struct {
	// estimated is the sum of the estimates of all requests, without those that
	// came back. It is never reset.
	estimated atomic.Int64
	// order is the place of the request of the reading, and base is what
	// estimated was when that was sent, plus what remained.
	order, base atomic.Int64
	// at is the instant when that request was sent, and until is until when the
	// reading counts.
	at, until atomic.Int64
	// refill is how much the limit grows in a nanosecond: the bits of a
	// float64.
	refill atomic.Uint64
	// limit is the limit, and most how much of it there is in a window, which
	// lasts so many nanoseconds. 0: that is not known.
	limit, most, window atomic.Int64
	// learning is set while a reading is recorded. It guards doubt.
	learning atomic.Bool
	doubt    doubt
}

// learn records a reading, unless there is that of a later request: a slow
// reply does not replace a fast one. The time of a reading begins when its
// request was sent, because backends count a request when it comes. Of two
// replies at the same moment, one is enough. A reading that the backend's
// replies contradict does not count.
func (a *allowance) learn(s said, r *Reply, i int, now Instant) {
	if !a.learning.CompareAndSwap(false, true) {
		return
	}
	defer a.learning.Store(false)
	if r.Mark.order < a.order.Load() {
		return
	}
	sent, of := At(r.Sent), r.Mark.deducted[i]
	a.order.Store(r.Mark.order)
	a.limit.Store(int64(s.limit))
	if a.doubt.grows(s, r, [...]int64{1, r.Cost}[i], now) {
		a.until.Store(0)
		return
	}
	a.at.Store(int64(sent))
	a.base.Store(min(of.sum, a.estimated.Load()) + int64(s.remaining)) // of earlier requests, some may have come back since
	a.refill.Store(math.Float64bits(s.refill))
	a.most.Store(int64(s.most))
	a.window.Store(int64(s.whole))
	a.until.Store(int64(sent) + int64(s.window))
}

// doubt is about readings that keep saying the same: what remained by them,
// when the first of them came, and how many requests were sent after that and
// served, although they cost more.
type doubt struct {
	remaining float64
	heard     Instant
	served    int
}

// maxServed is how many requests must be served for a reading to be wrong.
const maxServed = 3

// grows takes a reading into account. It reports whether that is wrong.
func (d *doubt) grows(s said, r *Reply, cost int64, now Instant) bool {
	switch {
	case r.Throttles:
		*d = doubt{}
	case d.heard == 0 || s.remaining != d.remaining:
		*d = doubt{remaining: s.remaining, heard: now}
	case r.Served && s.remaining < float64(cost) && At(r.Sent) >= d.heard:
		d.served++
	}
	return d.served >= maxServed
}

// left returns what is left. It may be negative.
func (a *allowance) left(now Instant) int64 {
	left := a.base.Load() - a.estimated.Load()
	if refill := math.Float64frombits(a.refill.Load()); refill > 0 {
		left += int64(refill * float64(int64(now)-a.at.Load()))
	}
	return left
}

// leaves reports whether that part of the limit is left for the rest of its
// window.
func (a *allowance) leaves(part float64, cost int64, now Instant) bool {
	return a.wait(part, cost, now) < time.Millisecond
}

// wait returns how long it takes until that part of the limit is left for the
// rest of its window, if no request is sent. It takes no time if it is not
// known how much there is in a window.
func (a *allowance) wait(part float64, cost int64, now Instant) time.Duration {
	rest, most, window := float64(a.until.Load()-int64(now)), float64(a.most.Load()), float64(a.window.Load())
	if rest <= 0 || most == 0 || part == 0 {
		return 0
	}
	each := part * most / window // in a nanosecond, which is no longer kept when that is over
	missing := each*min(rest, window) - keepable(float64(a.left(now)), cost)
	return time.Duration(min(rest, math.Ceil(missing/(each+math.Float64frombits(a.refill.Load())))))
}

func (a *allowance) hasRoom(cost int64, now Instant) bool {
	return int64(now) >= a.until.Load() || a.left(now) >= cost
}

// keepable returns how much can be kept for others of what is left, if a
// request of that cost is sent. Others come at random times: of n requests that
// are expected, there may be more by the square root of n.
func keepable(left float64, cost int64) float64 {
	if left <= 0 {
		return left
	}
	each := float64(cost)
	root := (math.Sqrt(each+4*left) - math.Sqrt(each)) / 2 // which solves root² + root·√each = left
	return root * root
}
