// Package quota estimates, for each model at a backend, how much of the
// backend's limits is used. With that, it decides whether a request still fits,
// and which requests must leave the rest to other tiers. It gets the time only
// from its arguments.
//
// # What is left
//
// A reading is what a reply says of a limit: how much remained, or how much of
// a provisioned deployment is utilized. What is left of a limit is the amount
// that remained by the newest reading, minus an estimate of the requests sent
// after the request of that reply. The estimate is given back if a request ends
// without having been executed.
//
// The reading of a limit counts for the rest of the limit's window. The reading
// of a utilization fades linearly, because the deployment works off its use. A
// throttle counts as a utilization of 1 until its cooldown ends, and then
// fades, too. A reading is ignored if the backend keeps serving requests for
// which, by the reading, it has no room.
//
// Without any reading, the whole limit is left: a wrong try costs a 429, but a
// wrong skip wastes paid capacity. The pool prefers backends with room.
//
// # Shares of tiers
//
// The tier of a request is that of its caller, or a less important one if the
// request is over a limit. A tier may keep a share: a percentage of what
// backends serve. It is active at a backend for a minute after each request
// that asks for the backend's model. A [Group] is all backends of a pool at
// which the same tiers are active, and of which all or none have windows of a
// minute: a known limit of tokens, or a limit that throttles have shown. Shares
// are counted over a Group, because a small backend serves too few requests at
// a time to be shared on its own.
//
//   - A tier that recently got no more than its share of what the Group served
//     may use any backend. Recently is the last minute if the Group has such
//     windows. If not, what a tier got counts fully for 10 s, and then less
//     and less until it is 30 s old.
//   - A tier that got more, or that keeps no share, may use a backend only if
//     more is left there after the request than the sum of the shares of the
//     other active tiers. If it is not known when the windows of a limit end,
//     such tiers use the limit no faster than it comes back.
//
// For example, gold keeps 70 % and bronze 20 %. The 10 % that no tier keeps
// belong to the more important one, gold. While both are active, bronze may use
// any backend until it got a fifth of what the backends served recently. Above
// that, it may use only backends of which more than 70 % is left. After gold
// has sent nothing for a minute, bronze may use everything.
//
// # Shares of callers
//
// With the option fair_shares, the callers of a tier, or of no tier, share what
// it gets by max-min fairness while backends throttle: a caller that asks for
// less than its fair share gets all of that, and the others get equal parts of
// the rest. A caller that got more lately may use a backend only if more is
// left there than the others are due: those that got less than they asked for,
// and less than the fair share. [Callers] counts this for each pool, from the
// first throttle until a minute after the last one.
//
// # What throttles teach
//
// Throttles also show limits that a backend does not name. A limit of a window
// is learned from the cost that was served between the ends of two cooldowns.
// The rate at which a provisioned deployment works off requests is learned from
// the cost between its throttles, which last for milliseconds. Shares of tiers
// follow what throttles teach only while replies do not say how much is left
// until when, or if a throttle contradicts what they say: others may use the
// deployment, too.
//
// After a cooldown of more than 10 s, a backend gets its requests back step by
// step: at first, two requests at a time may wait for their first byte, and
// then more and more.
//
// # Concurrent use
//
// Meter, Table and Callers are safe for concurrent use. Their zero values are
// ready to use. Only changes of a Table and [Meter.Hear] take a lock. A Got
// belongs to one request.
package quota

import (
	"sync/atomic"
	"time"
)

// Tier is the tier of a request: how important it is, and which share of
// backends its requests keep: see [Shares]. The zero Tier is more important
// than all others.
type Tier struct {
	// Number is the tier's place in the order of importance, from 1 to
	// MaxTiers.
	Number int
	Name   string
	// Shares are the shares of all tiers. It is nil if no tier keeps a share,
	// or if shares do not apply to the request.
	Shares *Shares
}

// MaxTiers is the maximum number of tiers, without the zero Tier.
const MaxTiers = 8

// activeFor is how long a tier is active after a request for the model.
const activeFor = time.Minute

// kind is a kind of reading. Only the latest reading of each kind counts.
type kind int

const (
	utilization kind = iota
	throttle
	kinds
)

// fades are the times in which readings fade.
var fades = [kinds]time.Duration{utilization: 4 * time.Second, throttle: 2 * time.Second}

// Meter tracks the use of a model's limits at a backend. The zero Meter is
// ready to use. It is safe for concurrent use, and only Hear takes a lock.
type Meter struct {
	readings [kinds]atomic.Uint64
	// sent is how many requests were sent.
	sent atomic.Int64
	// allowances track the limits of requests and of tokens.
	allowances [2]allowance
	// learned is the limit that throttles show. It is nil before the first
	// throttle.
	learned atomic.Pointer[learnedLimit]
	// unexplained reports whether the latest throttle came although, by the
	// backend's own replies, there was room.
	unexplained atomic.Bool
	// drain predicts when a backend that works off requests continuously is
	// full. ramp limits the requests after a long cooldown. It is nil at other
	// times.
	drain drains
	ramp  atomic.Pointer[ramp]
	// counter counts the cost that tiers got from this replica, and others from
	// the other replicas.
	counter costCounter
	others  others
	// askedAt is when requests of each tier last asked for the model. 0: never.
	askedAt [MaxTiers + 1]atomic.Int64
}

// Ask records that a request of a tier asks for the model, so that the tier
// counts as active.
func (m *Meter) Ask(tier int, now time.Time) {
	if at := instant(now); m.askedAt[tier].Load() < at {
		m.askedAt[tier].Store(at)
	}
}

// Kept returns the part of the backend that is reserved for other tiers. group
// is the backend's group.
func (m *Meter) Kept(t Tier, now Instant) (group Group, part float64) {
	if t.Shares == nil {
		return 0, 0
	}
	group = m.Group(t, now)
	return group, group.kept(t)
}

// Leaves reports whether, after a request of that cost, this part of the
// backend is left. More than 1 counts as 1.
func (m *Meter) Leaves(part float64, cost int64, now Instant) bool {
	return part == 0 || m.leaves(min(1, part), cost, now.millis(), now)
}

// Wait returns the time until the backend leaves this part, if no further reply
// changes that. It returns 0 if it does.
func (m *Meter) Wait(kept float64, cost int64, now time.Time) time.Duration {
	if m.Leaves(kept, cost, At(now)) {
		return 0
	}
	kept = min(1, kept)
	at, wait := instant(now), time.Millisecond
	predicted, known := m.predict(kept, cost, At(now))
	wait = max(wait, predicted)
	for k := range m.readings {
		if kind(k) == throttle && known {
			continue
		}
		until := reading(m.readings[k].Load()).fallsTo(mostUsed(kept), fades[k])
		wait = max(wait, time.Duration(until-at)*time.Millisecond)
	}
	for i := range m.allowances {
		wait = max(wait, m.allowances[i].wait(kept, [limits]int64{requests: 1, tokens: cost}[i], At(now)))
	}
	return wait
}

// seeThrottle records that nothing is left until a time. After that, the
// reading fades.
func (m *Meter) seeThrottle(until time.Time) {
	next := pack(1, instant(until))
	for {
		known := m.readings[throttle].Load()
		if uint64(next) <= known || m.readings[throttle].CompareAndSwap(known, uint64(next)) {
			return
		}
	}
}

// see records a reading.
func (m *Meter) see(k kind, used float64, now time.Time) {
	m.readings[k].Store(uint64(pack(used, instant(now))))
}

// reading is the use at an instant, in a single number, so that both change
// together: the lowest 13 bits are the use, in steps of 1/512, and the others
// are the instant. It is 0 if there is no reading.
type reading uint64

const (
	usedBits  = 13
	usedSteps = 512
)

func pack(used float64, at int64) reading {
	steps := int64(min(max(0, used*usedSteps), 1<<usedBits-1))
	return reading(at)<<usedBits | reading(steps) //nolint:gosec // none is negative
}

func (r reading) unpack() (used, at int64) {
	return int64(r & (1<<usedBits - 1)), int64(r >> usedBits) //nolint:gosec // they have 13 and 51 bits
}

// isFresh reports whether the reading has not faded.
func (r reading) isFresh(fade time.Duration, now int64) bool {
	_, at := r.unpack()
	return now-at < fade.Milliseconds()
}

// above reports whether more than most is used.
func (r reading) above(most float64, fade time.Duration, now int64) bool {
	used, at := r.unpack()
	left := fade.Milliseconds() - max(0, now-at)
	return left > 0 && used*left > allowed(most, fade)
}

// fallsTo returns the instant at which the reading has faded to most.
func (r reading) fallsTo(most float64, fade time.Duration) int64 {
	used, at := r.unpack()
	if used == 0 {
		return 0
	}
	return at + fade.Milliseconds() - allowed(most, fade)/used
}

// allowed returns the largest product of the use and the remaining time of its
// fade that is not above most.
func allowed(most float64, fade time.Duration) int64 {
	return int64(most * usedSteps * float64(fade.Milliseconds()))
}

var began = time.Now()

// instant converts a time to milliseconds. It is measured from when the process
// started, so that it does not jump if the wall clock is set. The offset keeps
// it positive in tests with another clock.
func instant(t time.Time) int64 { return 1<<40 + t.Sub(began).Milliseconds() }
