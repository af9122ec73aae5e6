package quota

import (
	"math"
	"sync/atomic"
	"time"
)

// Mark identifies a request in the order in which requests were sent, with the
// amounts that were subtracted for it. The zero Mark is that of a request for
// which nothing was subtracted.
type Mark struct {
	meter    *Meter
	order    int64
	deducted [2]deducted
	// tier is the request's tier, which got cost at the instant sent, in
	// milliseconds. cost is 0 if no tier keeps a share.
	tier       int
	cost, sent int64
}

// deducted is the estimate that was subtracted for a request, and the sum of
// all estimates at that time, including this one.
type deducted struct{ cost, sum int64 }

// Deduct subtracts a request of this cost, in tokens, from what is left of the
// limits.
func (m *Meter) Deduct(cost int64) Mark {
	return Mark{
		meter: m, order: m.sent.Add(1),
		deducted: [...]deducted{m.allowances[0].deduct(1), m.allowances[1].deduct(cost)},
	}
}

// DeductFor subtracts a request from what is left of the limits, and counts its
// cost in the use of its tier.
func (m *Meter) DeductFor(tier int, cost int64, now time.Time) Mark {
	k := m.Deduct(cost)
	k.tier, k.cost, k.sent = tier, min(cost, highestCost), instant(now)
	if limit := m.Limit(tokens); limit > 0 { // no request can use more
		k.cost = min(k.cost, limit)
	}
	m.Ask(tier, now)
	m.counter.add(tier, k.cost, k.sent)
	m.spend(k.cost, now)
	return k
}

// Return gives back the amounts that were subtracted for a request that was not
// executed. If there is a reading from this request or a later one, that
// reading already excludes the request.
func (k Mark) Return() {
	if k.meter == nil {
		return
	}
	if k.cost > 0 {
		k.meter.counter.takeBack(k.tier, k.cost, k.sent)
		k.meter.unspend(k.cost, k.sent)
	}
	for i, d := range k.deducted {
		if a := &k.meter.allowances[i]; a.order.Load() < k.order {
			a.estimated.Add(-d.cost)
		}
	}
}

const (
	// highestCost keeps sums from overflowing. Higher limits are reduced to it.
	highestCost = 1 << 40
	// highestUnknown is the highest estimate that is subtracted from a limit
	// before its first reading.
	highestUnknown = 1 << 14
)

// deduct subtracts an estimate, but at most the limit.
func (a *allowance) deduct(cost int64) deducted {
	limit := a.limit.Load()
	if limit == 0 {
		limit = highestUnknown
	}
	cost = min(cost, limit)
	return deducted{cost, a.estimated.Add(cost)}
}

// HasRoom reports whether the limits have room for one more request of this
// cost. A limit without a current reading has room.
func (m *Meter) HasRoom(cost int64, now Instant) bool {
	return m.allowances[0].hasRoom(1, now) && m.allowances[1].hasRoom(min(cost, highestCost), now)
}

// Instant is a time in nanoseconds since a time long before the process
// started. It is computed once for all questions about the same time.
type Instant int64

// At converts a time to an instant. The result does not jump if the wall clock
// is set.
func At(t time.Time) Instant { return 1<<60 + Instant(t.Sub(began)) }

// millis converts the instant to milliseconds, with the same origin as instant.
func (i Instant) millis() int64 { return 1<<40 + time.Duration(i-1<<60).Milliseconds() }

// Limit returns the latest known limit of requests per minute if kind is 0, and
// of tokens per minute if it is 1. It returns 0 if the limit is not known.
func (m *Meter) Limit(kind int) int64 { return m.allowances[kind].limit.Load() }

// Left describes what is left of a rate limit.
type Left struct {
	// Kind is requests or tokens.
	Kind string
	// Limit is the limit per minute. Left is what is left of it in the current
	// window, by the latest reading and the requests sent since.
	Limit, Left int64
	// Ratio is the fraction of a window's limit that is left. It is valid if
	// HasRatio is set.
	Ratio    float64
	HasRatio bool
	// Reset is how long the reading still counts.
	Reset time.Duration
}

// Left returns what is left of each limit that has a current reading.
func (m *Meter) Left(now time.Time) (left []Left) {
	at := At(now)
	for i, kind := range [...]string{"requests", "tokens"} {
		if a := &m.allowances[i]; at < Instant(a.until.Load()) {
			l := Left{Kind: kind, Limit: a.limit.Load(), Left: max(0, a.left(at)),
				Reset: time.Duration(Instant(a.until.Load()) - at)}
			if most := a.most.Load(); most > 0 {
				l.Ratio, l.HasRatio = min(1, float64(l.Left)/float64(most)), true
			}
			left = append(left, l)
		}
	}
	return left
}

// allowance tracks what is left of a rate limit: the amount that remained by a
// reply (a reading), minus the estimates of all requests sent after the request
// of that reply. It needs no list of requests. It adds the estimates of all
// requests ever sent to one sum. What is left is the amount that remained, plus
// the sum when the reply's request was sent, minus the sum now.
//
// A reading that does not say when its window ends may show that a window has
// begun, because much more remains than by the reading before. Readings may
// also contradict each other about the end of a window, for example because
// windows slide, or because the reset says how long a window is. Then it is not
// known when the window ends.
//
// If a reading is recorded while a member is chosen, the choice may use parts
// of both readings. That does little harm, because readings are estimates
// anyway.
type allowance struct {
	// estimated is the sum of the estimates of all requests, except those that
	// were given back. It is never reset.
	estimated atomic.Int64
	// order is the order of the request that the reading belongs to. base is
	// the value of estimated when that request was sent, plus the amount that
	// remained.
	order, base atomic.Int64
	// at is the instant when that request was sent. until is the instant up to
	// which the reading counts.
	at, until atomic.Int64
	// refill is how much of the limit comes back per nanosecond, as the bits of
	// a float64.
	refill atomic.Uint64
	// limit is the limit per minute. most is how much of it there is in a
	// window. window is the window's length in nanoseconds, or 0 if it is not
	// known when it ends. The others are 0 if they are not known.
	limit, most, window atomic.Int64
	// learning is set while a reading is recorded. It protects the fields
	// below.
	learning atomic.Bool
	doubt    doubt
	// end is the end of the current window: the earliest one that a reading
	// said, or the one that follows from when the window began. In the latter
	// case, the window may really end earlier, by up to unsure. contradicted is
	// when a reading last contradicted the end. It is 0 if none did.
	end, unsure, contradicted Instant
	// remaining is what remained by the latest reading.
	remaining float64
}

// learn records a reading, unless there is one from a later request, so that a
// slow reply does not replace a fast one. A reading counts from when its
// request was sent, because backends count a request when it arrives. If two
// replies arrive at the same moment, only one is recorded. A reading that the
// backend's own replies contradict does not count: see doubt.
func (a *allowance) learn(s rateInfo, r *Reply, i int, now Instant) {
	if !a.learning.CompareAndSwap(false, true) {
		return
	}
	defer a.learning.Store(false)
	if r.Mark.order < a.order.Load() {
		return
	}
	sent, deducted := At(r.Sent), r.Mark.deducted[i]
	a.order.Store(r.Mark.order)
	a.limit.Store(int64(s.limit))
	if a.doubt.grows(s, r, [...]int64{1, r.Cost}[i], now) {
		a.until.Store(0)
		return
	}
	before := Instant(a.at.Swap(int64(sent)))
	// of earlier requests, some may have come back since
	a.base.Store(min(deducted.sum, a.estimated.Load()) + int64(s.remaining))
	a.refill.Store(math.Float64bits(s.refill))
	a.most.Store(int64(s.most))
	until := sent + Instant(s.window)
	switch {
	case s.refill > 0 || s.most == 0:
	case s.whole == 0:
		if !r.Throttles { // which may have other fields
			a.noteBegin(s, before, sent)
		}
		if sent < a.end && !a.isContradicted(sent) {
			s.whole, until = s.window, a.end
		}
	default:
		if !r.Throttles {
			a.noteEnd(until, sent)
		}
		if a.isContradicted(sent) {
			s.whole = 0
		}
	}
	if !r.Throttles {
		a.remaining = s.remaining
	}
	a.window.Store(int64(s.whole))
	a.until.Store(int64(until))
}

// tolerated is by how much readings may differ about the end of a window. Their
// seconds may be rounded.
const tolerated = Instant(2 * time.Second)

// noteEnd records that a reading says that the window ends at until.
func (a *allowance) noteEnd(until, sent Instant) {
	switch {
	case a.end <= sent+tolerated: // another window has begun, or soon begins
		a.end, a.unsure = until, 0
	case until > a.end+tolerated:
		a.end, a.unsure, a.contradicted = until, 0, sent
	default:
		a.end = min(a.end, until)
	}
}

// noteBegin records that a window has begun since the reading before, if much
// more remains than by that one.
func (a *allowance) noteBegin(s rateInfo, before, sent Instant) {
	if before == 0 || s.remaining < a.remaining+s.most/4 {
		return
	}
	if sent < a.end-a.unsure-tolerated {
		a.contradicted = sent
	}
	a.end, a.unsure = sent+Instant(s.window), sent-before
}

// isContradicted reports whether readings of the last minute contradicted each
// other about the end of a window.
func (a *allowance) isContradicted(sent Instant) bool {
	return a.contradicted != 0 && sent < a.contradicted+Instant(time.Minute)
}

// doubt detects a backend whose readings do not change although it serves
// requests for which, by these readings, it has no room. It holds the amount
// that remained, when it was first read, and how many such requests were sent
// after that and served.
type doubt struct {
	remaining float64
	heard     Instant
	served    int
}

// maxServed is how many such requests must be served until the reading is
// wrong.
const maxServed = 3

// grows updates the doubt with a reading. It reports whether the reading is
// wrong.
func (d *doubt) grows(s rateInfo, r *Reply, cost int64, now Instant) bool {
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

// left returns how much is left. It may be negative.
func (a *allowance) left(now Instant) int64 {
	left := a.base.Load() - a.estimated.Load()
	if refill := math.Float64frombits(a.refill.Load()); refill > 0 {
		left += int64(refill * float64(int64(now)-a.at.Load()))
	}
	return left
}

// leaves reports whether, after a request of that cost, this part of the limit
// is left for the rest of its window.
func (a *allowance) leaves(part float64, cost int64, now Instant) bool {
	return a.wait(part, cost, now) < time.Millisecond
}

// wait returns the time until a request of that cost leaves this part of the
// limit for the rest of its window, if no other request is sent. It returns 0
// if it is not known how much there is in a window.
func (a *allowance) wait(part float64, cost int64, now Instant) time.Duration {
	if !a.isInWindow(now) || part == 0 {
		return 0
	}
	rest, most, window := float64(a.until.Load()-int64(now)), float64(a.most.Load()), float64(a.window.Load())
	each := part * most / window // in a nanosecond, which is no longer kept when that is over
	missing := each*min(rest, window) - keepable(float64(a.left(now)), cost, 1)
	return time.Duration(min(rest, math.Ceil(missing/(each+math.Float64frombits(a.refill.Load())))))
}

// isInWindow reports whether it is known how much there is in the window, and
// when it ends.
func (a *allowance) isInWindow(now Instant) bool {
	return int64(now) < a.until.Load() && a.most.Load() > 0 && a.window.Load() > 0
}

func (a *allowance) hasRoom(cost int64, now Instant) bool {
	return int64(now) >= a.until.Load() || a.left(now) >= cost
}

// keepable returns how much of what is left can be kept for other tiers if a
// request of that cost is sent. Requests of other tiers come at random times:
// if n are expected, the real number may be higher by the square root of n.
// deviations is how many times that is left for them.
func keepable(left float64, cost int64, deviations float64) float64 {
	if left <= 0 {
		return left
	}
	more := deviations * math.Sqrt(float64(cost))
	root := (math.Sqrt(more*more+4*left) - more) / 2 // which solves root² + root·more = left
	return root * root
}
