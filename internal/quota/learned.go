package quota

import (
	"math"
	"sync/atomic"
	"time"
)

// learnedLimit is the limit of a backend whose replies do not name one, as its
// throttles show it. A backend that serves a number of tokens in each window
// refuses the next request, and asks not to be called until the window ends. So
// a new window begins when a cooldown ends. It lasts until the end of the next
// cooldown, and its limit is the cost of the requests that were sent in
// between.
//
// If windows pass without a throttle although the limit was used up, the limit
// may be higher. It then grows, by more with each such window. A window that
// did not begin with the end of a cooldown may not be the backend's window, so
// a throttle in it lowers the limit only a little. After some windows without
// any such evidence, the limit is forgotten.
//
// Each replica learns its own part of the limit, because it hears of all
// cooldowns, but counts only its own requests.
//
// A provisioned deployment has no windows. Its cooldowns are too short for this
// type to learn from: see drain.
type learnedLimit struct {
	// began is when the current window began. If it is in the future, it is the
	// end of a cooldown, and nothing is left until then.
	began Instant
	// spent is the cost of the requests that were sent in the current window.
	spent atomic.Int64
	// most is the cost that the backend serves in a window. length is the
	// length of a window. Both are 0 until they are known.
	most   float64
	length time.Duration
	// measured reports whether the current window began with the end of a
	// cooldown. quiet is the number of windows since the latest evidence.
	measured bool
	quiet    int
	// early is the number of consecutive windows that ended early.
	early int
	// full is the number of consecutive windows that were used up without a
	// throttle.
	full int
}

const (
	// shortestWindow and longestWindow bound the length of windows.
	shortestWindow = time.Second
	longestWindow  = 90 * time.Second
	// slowestGrowth is the fraction by which a limit first grows after windows
	// that were used up. The fraction doubles with each further one, up to
	// fastestGrowth.
	slowestGrowth = 1. / 256
	fastestGrowth = 1. / 2
	// patience is the number of windows that must be used up before a limit
	// grows.
	patience = 3
	// maxEarly is how many consecutive windows may end early.
	maxEarly = 3
	// usedUp is the fraction of the limit above which a window counts as used
	// up.
	usedUp = 7. / 8
	// largestLoss is the largest fraction by which a limit falls after a window
	// that did not begin with the end of a cooldown.
	largestLoss = 1. / 16
	// learnedDeviations is for keepable. It is more than that of a named limit,
	// because the end of each window shows only with a throttle, which refuses
	// a request.
	learnedDeviations = 2
	// quietWindows is for how many windows without evidence a limit is
	// remembered.
	quietWindows = 12
)

// learnLimit records a throttle that ends at end.
func (m *Meter) learnLimit(end, at Instant) {
	for {
		l := m.current(at)
		next := l.throttled(end, at)
		if m.learned.CompareAndSwap(l, next) {
			return
		}
	}
}

// throttled returns the limit after a throttle.
func (l *learnedLimit) throttled(end, now Instant) *learnedLimit {
	next := &learnedLimit{began: end, measured: true}
	if l == nil {
		return next
	}
	next.most, next.length = l.most, l.length
	if now < l.began { // it is the throttle of a request that was sent before the cooldown
		next.began, next.early = max(end, l.began), l.early
		return next
	}
	length, cost := time.Duration(end-l.began), float64(max(0, l.spent.Load()))
	switch {
	case l.most > 0 && length < l.length/2 && l.early < maxEarly: // the backend's window ends late
		next.early = l.early + 1
	case length < shortestWindow || length > longestWindow:
		next.most, next.length = 0, 0
	case l.most == 0:
		next.most, next.length = cost, length
	case l.measured:
		next.most, next.length = (l.most+cost)/2, length
	default:
		next.most = max(min(cost, l.most), l.most*(1-largestLoss))
	}
	return next
}

// current returns the learned limit, after starting a new window if one is due.
func (m *Meter) current(now Instant) *learnedLimit {
	for {
		l := m.learned.Load()
		if l == nil || l.length == 0 || now < l.began+Instant(l.length) {
			return l
		}
		if next := l.next(now); m.learned.CompareAndSwap(l, next) {
			return next
		}
	}
}

// isLong reports whether the learned windows are nearer to a minute than to the
// few seconds of other limits.
func (l *learnedLimit) isLong() bool { return l != nil && l.length > longestWindow/3 }

// next returns the limit in the later window that contains now. It returns nil
// if the limit is forgotten.
func (l *learnedLimit) next(now Instant) *learnedLimit {
	passed := int(int64(now-l.began) / int64(l.length))
	next := &learnedLimit{began: l.began + Instant(passed)*Instant(l.length), most: l.most, length: l.length,
		quiet: l.quiet + passed}
	if next.quiet > quietWindows {
		return nil
	}
	if passed == 1 && float64(l.spent.Load()) > usedUp*l.most {
		next.full, next.quiet = l.full+1, l.quiet
		if grows := next.full - patience; grows > 0 {
			next.most += next.most * min(fastestGrowth, slowestGrowth*math.Exp2(float64(grows-1)))
		}
	}
	return next
}

// spend adds the cost of a request that is sent.
func (m *Meter) spend(cost int64, now time.Time) {
	if l := m.current(At(now)); l != nil {
		l.spent.Add(cost)
	}
}

// unspend subtracts the cost of a request that was not executed. sent is when
// it was sent, in milliseconds.
func (m *Meter) unspend(cost, sent int64) {
	if l := m.learned.Load(); l != nil && sent >= l.began.millis() {
		l.spent.Add(-cost)
	}
}

// wait returns the time until a request of that cost leaves this part of the
// limit for the rest of the window, if no other request is sent. It returns 0
// if the limit is not known.
func (l *learnedLimit) wait(part float64, cost int64, now Instant) time.Duration {
	if l == nil || l.most == 0 || part == 0 {
		return 0
	}
	each := part * l.most / float64(l.length) // in a nanosecond, which is no longer kept when that is over
	if now < l.began {
		return time.Duration(l.began - now)
	}
	rest := float64(l.length) - float64(now-l.began)
	missing := each*rest - keepable(l.most-float64(l.spent.Load()), cost, learnedDeviations)
	return time.Duration(max(0, min(rest, math.Ceil(missing/each))))
}
