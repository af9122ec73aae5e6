// Package quota knows how much of a backend's quota is used, for each model, whether a request
// still fits, and which requests leave the rest to more important ones. It gets the time only from its arguments.
//
// What is used is a reading of a reply's header: the utilization of a provisioned deployment,
// or 1 - remaining / limit of a rate limit. Each reading fades in a straight line, because the
// backend works off what is used, or its window ends. A throttle counts as a reading of 1. The
// highest of a model's readings counts. Without any, the backend has room: a wrong try costs
// one 429, and a wrong skip wastes capacity that is paid for.
//
// A limit also has room for a request or not: what remained by the newest reply, less an estimate of what was
// sent after the request of that reply. An estimate comes back when its request ends without having been executed. A
// reading does not count while the backend serves requests for which it has no room. The pool prefers backends with room.
//
// A tier is a class of requests. A backend that is used above the ceiling of a tier gets no
// requests of that tier, but only while requests of better tiers ask for the model. So no
// request is kept from capacity that is idle.
package quota

import (
	"sync/atomic"
	"time"
)

// Tier is the tier of a request. The zero Tier is above all others.
type Tier struct {
	// Number is the place of the tier in the order of importance, from 1 to MaxTiers.
	Number int
	Name   string
	// Ceiling is how much of a backend may be used, from 0 to 1, for the request to go there
	// while requests of better tiers ask for its model. 0: any part.
	Ceiling float64
}

// MaxTiers is how many tiers there may be, besides the zero Tier.
const MaxTiers = 8

// memory is for how long better tiers are remembered that asked for a model.
const memory = time.Minute

// kind is a kind of reading. Only the latest of each kind counts.
type kind int

const (
	utilization kind = iota
	requests
	tokens
	throttle
	kinds
)

// windows are how long readings last at most.
var windows = [kinds]time.Duration{
	utilization: 4 * time.Second,
	requests:    10 * time.Second,
	tokens:      time.Minute,
	throttle:    2 * time.Second,
}

// Meter is what is known of a model at a backend. The zero Meter knows nothing. No method
// takes a lock or allocates.
type Meter struct {
	readings [kinds]atomic.Uint64
	// sent is how many requests were sent.
	sent atomic.Int64
	// allowances are what is left of the limits of requests and of tokens.
	allowances [2]allowance
	// asks are when requests of each tier last asked for the model. 0: never.
	asks [MaxTiers + 1]atomic.Int64
}

// Ask records that a request of a tier asks for the model.
func (m *Meter) Ask(tier int, now time.Time) {
	if at := instant(now); m.asks[tier].Load() < at {
		m.asks[tier].Store(at)
	}
}

// Above reports whether requests of the tier may not go to the backend.
func (m *Meter) Above(t Tier, now time.Time) bool {
	if t.Ceiling == 0 {
		return false
	}
	at := instant(now)
	for i := range m.readings {
		if reading(m.readings[i].Load()).above(t.Ceiling, at) {
			return at < m.asked(t)
		}
	}
	return false
}

// Wait returns how long it takes until requests of the tier may go to the backend, if no reply says otherwise.
func (m *Meter) Wait(t Tier, now time.Time) time.Duration {
	if !m.Above(t, now) {
		return 0
	}
	var until int64
	for i := range m.readings {
		until = max(until, reading(m.readings[i].Load()).fallsTo(t.Ceiling))
	}
	return time.Duration(max(1, min(until, m.asked(t))-instant(now))) * time.Millisecond
}

// asked returns until when the tier makes room for better ones.
func (m *Meter) asked(t Tier) (until int64) {
	for i := range t.Number {
		until = max(until, m.asks[i].Load())
	}
	return until + memory.Milliseconds()
}

// see records a reading. A window of 0 or more than the longest is the longest.
func (m *Meter) see(k kind, used float64, window time.Duration, now time.Time) {
	if window <= 0 || window > windows[k] {
		window = windows[k]
	}
	m.readings[k].Store(uint64(pack(used, window, instant(now))))
}

// reading is how much was used at an instant, and the window in which that fades. They are in
// one number, so that they change together: 41 bits for the instant, 10 for the window in steps
// of an eighth of a second, and 13 for what was used in steps of 1/512. 0: there is none.
type reading uint64

const (
	usedBits, windowBits = 13, 10
	usedSteps            = 512
	windowStep           = time.Second / 8
)

func pack(used float64, window time.Duration, at int64) reading {
	windows := max(1, (window+windowStep-1)/windowStep)
	return reading(at)<<(usedBits+windowBits) | reading(windows)<<usedBits | reading(steps(used)) //nolint:gosec // none is negative
}

func steps(used float64) int64 { return int64(min(max(0, used*usedSteps), 1<<usedBits-1)) }

func (r reading) unpack() (used, window, at int64) {
	return int64(r & (1<<usedBits - 1)), //nolint:gosec // it has 13 bits
		int64(r>>usedBits&(1<<windowBits-1)) * windowStep.Milliseconds(), //nolint:gosec // it has 10 bits
		int64(r >> (usedBits + windowBits)) //nolint:gosec // it has 41 bits
}

// above reports whether more than the ceiling is used.
func (r reading) above(ceiling float64, now int64) bool {
	used, window, at := r.unpack()
	left := window - max(0, now-at)
	return left > 0 && used*left > allowed(ceiling, window)
}

// fallsTo returns the instant at which the reading falls to the ceiling.
func (r reading) fallsTo(ceiling float64) int64 {
	used, window, at := r.unpack()
	if used == 0 {
		return 0
	}
	return at + window - allowed(ceiling, window)/used
}

// allowed returns the largest product of what is used and the time left of its window that is not above the ceiling.
func allowed(ceiling float64, window int64) int64 {
	return int64(ceiling * usedSteps * float64(window))
}

var began = time.Now()

// instant returns a time in milliseconds. It is measured from when the process began: if a wall
// clock is set, it does not jump. The offset keeps it positive in tests with a clock of their own.
func instant(t time.Time) int64 { return 1<<40 + t.Sub(began).Milliseconds() }
