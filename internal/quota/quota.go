// Package quota knows how much of a backend's quota is used, for each model,
// whether a request still fits, and which requests leave the rest to others. It
// gets the time only from its arguments.
//
// A limit has room for a request or not: what remained by the newest reply,
// less an estimate of what was sent after the request of that reply. An
// estimate comes back when its request ends without having been executed. A
// reading does not count while the backend serves requests for which it has no
// room. The pool prefers backends with room.
//
// A tier is a class of requests, which may keep a share of its backends. Its
// requests go to any backend while the tier has got no more than its share
// lately, of all backends of the same kind for which the same tiers ask: one
// small backend serves too few requests at a time to be shared alone. Beyond
// its share, a tier leaves the shares of others that ask for the model: it gets
// no backend of which less is left. So in exhaustion each tier gets its share,
// and what a tier does not need goes to others.
//
// What is left is read in replies: of a limit, for the rest of its window, or
// of a provisioned deployment what its utilization leaves. That reading fades
// in a straight line, because the backend works off what is used. A throttle
// counts as a utilization of 1 until its cooldown ends. Without any reading,
// all is left: a wrong try costs one 429, and a wrong skip wastes capacity that
// is paid for.
//
// Throttles also show what a backend does not say: the limit of a window, or
// the rate at which a bucket drains: see learnedLimit and drain.
package quota

import (
	"sync/atomic"
	"time"
)

// Tier is the tier of a request. The zero Tier is above all others.
type Tier struct {
	// Number is the place of the tier in the order of importance, from 1 to
	// MaxTiers.
	Number int
	Name   string
	// Shares are the shares that all tiers keep. nil: no tier keeps a share, or
	// shares do not apply to this request.
	Shares *Shares
}

// MaxTiers is how many tiers there may be, besides the zero Tier.
const MaxTiers = 8

// memory is for how long tiers are remembered that asked for a model.
const memory = time.Minute

// kind is a kind of reading. Only the latest of each kind counts.
type kind int

const (
	utilization kind = iota
	throttle
	kinds
)

// fades are how long readings last.
var fades = [kinds]time.Duration{utilization: 4 * time.Second, throttle: 2 * time.Second}

// Meter is what is known of a model at a backend. The zero Meter knows nothing.
// No method takes a lock.
type Meter struct {
	readings [kinds]atomic.Uint64
	// sent is how many requests were sent.
	sent atomic.Int64
	// allowances are what is left of the limits of requests and of tokens.
	allowances [2]allowance
	// learned is the limit that throttles show. It is nil until there was one.
	learned atomic.Pointer[learnedLimit]
	// drain predicts when the backend is full. It is nil if nothing shows that
	// it is a bucket. ramp lets requests return to it after a long cooldown, or
	// is nil.
	drain drains
	ramp  atomic.Pointer[ramp]
	// given is what each tier has got at this replica, and others at others.
	given  given
	others others
	// asks are when requests of each tier last asked for the model. 0: never.
	asks [MaxTiers + 1]atomic.Int64
}

// Ask records that a request of a tier asks for the model.
func (m *Meter) Ask(tier int, now time.Time) {
	if at := instant(now); m.asks[tier].Load() < at {
		m.asks[tier].Store(at)
	}
}

// Reserved reports whether only the shares of other tiers are left of the
// backend, which is of a group then.
func (m *Meter) Reserved(t Tier, cost int64, now Instant) (of Group, reserved bool) {
	if t.Shares == nil {
		return 0, false
	}
	of = m.Group(t, now)
	kept := of.kept(t)
	return of, kept > 0 && !m.leaves(kept, cost, now.millis(), now)
}

// Wait returns how long it takes until more is left of the backend, if no reply
// says otherwise.
func (m *Meter) Wait(t Tier, cost int64, now time.Time) time.Duration {
	of, reserved := m.Reserved(t, cost, At(now))
	if !reserved {
		return 0
	}
	at, kept, wait := instant(now), of.kept(t), time.Millisecond
	pause, predicts := m.predict(kept, cost, At(now))
	wait = max(wait, pause)
	for k := range m.readings {
		if kind(k) == throttle && predicts {
			continue
		}
		until := reading(m.readings[k].Load()).fallsTo(1-kept, fades[k])
		wait = max(wait, time.Duration(until-at)*time.Millisecond)
	}
	for i := range m.allowances {
		wait = max(wait, m.allowances[i].wait(kept, [limits]int64{requests: 1, tokens: cost}[i], At(now)))
	}
	return max(wait, m.current(At(now)).wait(kept, cost, At(now)))
}

// seeThrottle records that nothing is left until then, and all of it soon
// after.
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

// reading is how much was used at an instant. Both are in one number, so that
// they change together: 13 bits for what was used, in steps of 1/512, and the
// others for the instant. 0: there is none.
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

// above reports whether more than that is used.
func (r reading) above(most float64, fade time.Duration, now int64) bool {
	used, at := r.unpack()
	left := fade.Milliseconds() - max(0, now-at)
	return left > 0 && used*left > allowed(most, fade)
}

// fallsTo returns the instant at which the reading falls to that.
func (r reading) fallsTo(most float64, fade time.Duration) int64 {
	used, at := r.unpack()
	if used == 0 {
		return 0
	}
	return at + fade.Milliseconds() - allowed(most, fade)/used
}

// allowed returns the largest product of what is used and the time left of its
// fade that is not above most.
func allowed(most float64, fade time.Duration) int64 {
	return int64(most * usedSteps * float64(fade.Milliseconds()))
}

var began = time.Now()

// instant returns a time in milliseconds. It is measured from when the process
// began: if a wall clock is set, it does not jump. The offset keeps it positive
// in tests with a clock of their own.
func instant(t time.Time) int64 { return 1<<40 + t.Sub(began).Milliseconds() }
