package quota

import (
	"math"
	"sync/atomic"
	"time"
)

// Mark is the place of a request in the order of those that were sent: how many requests and tokens were
// sent until then, itself included.
type Mark [2]int64

// Deduct deducts a request of this cost, in tokens, from what is left.
func (m *Meter) Deduct(cost int64) Mark {
	return Mark{m.allowances[0].sent.Add(1), m.allowances[1].sent.Add(min(cost, highestCost))}
}

// highestCost keeps sums from an overflow. No limit is counted as a higher one.
const highestCost = 1 << 40

// HasRoom reports whether the limits have room for one more request of this cost. A limit has if it is
// not known what is left of it.
func (m *Meter) HasRoom(cost int64, now Instant) bool {
	return m.allowances[0].hasRoom(1, now) && m.allowances[1].hasRoom(min(cost, highestCost), now)
}

// Instant is a time, counted in nanoseconds from a time long before the process began. It is made once for all that is
// asked at that time.
type Instant int64

// At returns the instant of a time. If a wall clock is set, it does not jump.
func At(t time.Time) Instant { return 1<<60 + Instant(t.Sub(began)) }

// Left is what is left of a rate limit.
type Left struct {
	// Kind is requests or tokens.
	Kind string
	// Limit is the limit by the minute, and Left what is left of it in this window, by the newest reading and
	// what was sent since.
	Limit, Left int64
	// Ratio is the part that is left of a window. It is known if HasRatio is set.
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

// allowance is what is left of a rate limit: what remained by a reply, less the estimates of all requests that were
// sent after the request of that reply. For this, it needs no list of requests: the sum of the estimates when that
// request was sent is added to what remained, and the sum of now is subtracted.
//
// If a reading is recorded during a pick, the pick may see parts of both readings. It then decides by about what is
// left, as it does anyway.
type allowance struct {
	// sent is the sum of the estimates of all requests. It is never reset.
	sent atomic.Int64
	// mark is what sent was when the request of the reading was sent, and base is that plus what remained.
	mark, base atomic.Int64
	// at is the instant when that request was sent, and until is until when the reading counts.
	at, until atomic.Int64
	// refill is how much the limit grows in a nanosecond: the bits of a float64.
	refill atomic.Uint64
	// limit is the limit, and most how much of it there is in a window. 0: that is not known.
	limit, most atomic.Int64
	// learning is set while a reading is recorded.
	learning atomic.Bool
}

// learn records a reading, unless there is that of a later request: a slow reply does not replace a fast one. The
// time of a reading begins when its request was sent, because backends count a request when it comes. Of two replies
// at the same moment, one is enough.
func (a *allowance) learn(s said, mark int64, sent Instant) {
	if !a.learning.CompareAndSwap(false, true) {
		return
	}
	defer a.learning.Store(false)
	if mark < a.mark.Load() || mark > a.sent.Load() { // or it was sent before the backend's key changed
		return
	}
	a.at.Store(int64(sent))
	a.mark.Store(mark)
	a.base.Store(mark + int64(s.remaining))
	a.refill.Store(math.Float64bits(s.refill))
	a.limit.Store(int64(s.limit))
	a.most.Store(int64(s.most))
	a.until.Store(int64(sent) + int64(s.window))
}

// left returns what is left. It may be negative.
func (a *allowance) left(now Instant) int64 {
	left := a.base.Load() - a.sent.Load()
	if refill := math.Float64frombits(a.refill.Load()); refill > 0 {
		left += int64(refill * float64(int64(now)-a.at.Load()))
	}
	return left
}

func (a *allowance) hasRoom(cost int64, now Instant) bool {
	return int64(now) >= a.until.Load() || a.left(now) >= cost
}
