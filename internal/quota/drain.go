package quota

import (
	"math"
	"sync/atomic"
	"time"
)

// drain predicts when a backend is full that works off its requests
// continuously, as a provisioned deployment does. When such a backend is full,
// it asks to be called again after some milliseconds, and is full again after
// the next request. Requests that follow these times exactly find it full again
// and again. So they skip the backend while it is predicted to be full and
// another one can serve them.
//
// The prediction is that of a leaky bucket whose rate is learned. When a
// cooldown ends, the bucket is exactly full. After that, it drains at the rate,
// and each request that is sent adds its estimated cost.
//
// The first value of the rate is the cost that was sent between two throttles,
// divided by the time. Each throttle lowers the rate by 1/50, unless the bucket
// may have been empty since the one before. While requests skip the backend,
// the rate grows by 1/50 each second, and faster if there was no throttle for
// several seconds. So a full backend throttles about once a second. If the rate
// is too low for a while, the backend works off its bucket. Until the rate is
// known, requests skip the backend for a fifth of a second after each throttle.
//
// If tiers keep shares, a part of what the backend works off in about two
// seconds (cushion) is kept free. The rate then grows more slowly, because a
// throttle may refuse a tier within its share.
//
// A drain is immutable. The rate of a replica is its own part of the backend's
// rate: each replica hears of all throttles, but counts only its own requests.
type drain struct {
	// full is when the bucket was last full. sent is the sum of the estimates
	// at that time.
	full Instant
	sent int64
	// rate is the cost that is worked off per nanosecond. It is 0 until it is
	// known.
	rate float64
	// measured is the rate between two throttles. It is too low if the bucket
	// was empty in between. begun is when the current measurement started, and
	// first is the sum of the estimates at that time.
	measured float64
	begun    Instant
	first    int64
	// throttled is when the latest throttle came. raised is when the rate was
	// last raised.
	throttled, raised Instant
}

const (
	// longestDrain is the longest cooldown of a backend that works off requests
	// continuously.
	longestDrain = Instant(time.Second)
	// pause is how long requests skip a backend after a throttle while its rate
	// is not known.
	pause = Instant(200 * time.Millisecond)
	// measures is the shortest time of a measurement of the rate.
	measures = Instant(6 * time.Second)
	// patient is how long after a throttle the rate does not grow because of
	// requests that keep the cushion free. A rate that is a little too low
	// costs little meanwhile, because a tier within its share uses what the
	// others leave. A backend that becomes faster is used fully only after this
	// time.
	patient = Instant(70 * time.Second)
	// cushion is the time of work of which a part is kept free for other tiers.
	cushion = 2200 * time.Millisecond
	// raise is the fraction by which the rate grows and falls. raisesEvery is
	// how often it grows.
	raise       = 1. / 50
	raisesEvery = Instant(time.Second)
	// hurriesAfter is the time without a throttle after which the rate grows
	// twice as fast. fastestRaise is the largest fraction by which it grows or
	// falls.
	hurriesAfter = Instant(3 * time.Second)
	fastestRaise = 1. / 4
	// surely is the time between two throttles after which the cost sent in
	// between is taken as the rate.
	surely = Instant(2 * time.Second)
	// idle is how much work the bucket may be predicted to have room for, at
	// the learned rate, when a throttle comes. If it is more, the bucket may
	// have been empty for a while, so that the cost sent in between is not the
	// rate.
	idle = Instant(5 * time.Second)
	// drainMemory is how long a rate is remembered after a throttle. It is
	// longer than patient, which delays the next throttle.
	drainMemory = Instant(150 * time.Second)
)

// throttle returns the drain after a throttle that ends at end. sent is the sum
// of the estimates. remote reports whether another replica met the throttle.
func (d *drain) throttle(end, now Instant, sent int64, remote bool) *drain {
	next := &drain{full: end, sent: sent, throttled: now, raised: now, begun: now, first: sent}
	if d == nil || now-d.throttled > drainMemory {
		return next
	}
	next.rate, next.measured, next.raised = d.rate, d.measured, max(d.raised, now-raisesEvery)
	if now < d.full { // it is the throttle of a request that was sent before the cooldown
		next.full, next.begun, next.first = max(end, d.full), d.begun, d.first
		return next
	}
	passed, spent := now-d.full, float64(sent-d.sent)
	if !remote && spent > d.rate*float64(passed-idle) {
		next.rate *= 1 - raise
		if passed > surely {
			next.rate = min(next.rate, max(spent/float64(passed), next.rate*(1-fastestRaise)))
		}
	}
	if passed := now - d.begun; passed >= measures {
		next.measured = float64(sent-d.first) / float64(passed)
	} else {
		next.begun, next.first = d.begun, d.first
	}
	next.rate = max(next.rate, next.measured)
	return next
}

// isFull reports whether the bucket is predicted to be full.
func (d *drain) isFull(now Instant, sent int64) bool {
	switch {
	case now < d.full:
		return true
	case d.rate == 0:
		return now < d.throttled+pause
	}
	return d.rate*float64(now-d.full) < float64(sent-d.sent)
}

// drains holds the current drain of a meter. It is nil unless a throttle shows
// that the backend works off requests continuously.
type drains struct{ atomic.Pointer[drain] }

// throttle records a throttle. A long cooldown shows that the backend does not
// work off requests continuously.
func (p *drains) throttle(c Cooldown, end, now Instant, sent int64) {
	if end-now > longestDrain {
		p.Store(nil)
		return
	}
	d := p.Load()
	p.CompareAndSwap(d, d.throttle(end, now, sent, c.Remote))
}

// isFull reports whether requests should skip the backend. If they should, it
// raises the rate when that is due.
func (p *drains) isFull(now Instant, sent int64) bool {
	d := p.Load()
	if d == nil || !d.isFull(now, sent) {
		return false
	}
	p.raise(d, d.throttled, now)
	return true
}

// raise raises the rate if that is due. It raises it by more if more time has
// passed since the instant since.
func (p *drains) raise(d *drain, since, now Instant) {
	if d.rate == 0 || now < since || now < d.raised+raisesEvery {
		return
	}
	next := *d
	part := raise * math.Exp2(float64((now-since)/hurriesAfter))
	next.rate, next.raised = d.rate*(1+min(part, fastestRaise)), now
	p.CompareAndSwap(d, &next)
}

// wait returns the time until a request of that cost leaves this part of what
// the backend works off in the time cushion, if no other request is sent. known
// is false if the rate is not known.
func (p *drains) wait(part float64, cost int64, now Instant, sent int64) (wait time.Duration, known bool) {
	d := p.Load()
	if d == nil || d.rate == 0 || now-d.throttled > drainMemory {
		return 0, false
	}
	missing := part*d.rate*float64(cushion) - keepable(d.rate*float64(now-d.full)-float64(sent-d.sent), cost, 1)
	if missing <= 0 {
		return 0, true
	}
	p.raise(d, d.throttled+patient, now) // each throttle may refuse a tier its share
	return time.Duration(math.Ceil(missing / d.rate)), true
}
