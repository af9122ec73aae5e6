// Package limiter counts the requests and tokens of callers, and admits
// requests that are within their callers' limits. To this package, a backend
// with a quota is a caller, too: its name is the backend's health key.
//
// A caller may have several limits, each a number of requests or tokens in a
// second, a minute, an hour, a day or a month. Before a request is sent,
// [Limiter.Try] estimates its tokens. Unless a limit refuses the request, all
// limits are charged with the estimate, and the request has a [Reservation].
// When the request is over, [Reservation.Settle] replaces the estimate with the
// real cost, once.
//
// # What a limit promises
//
// For a limit of N tokens or requests in a minute:
//
//   - Any 60 s admit estimates of at most N × 25/24 together, or N if N is
//     below 24 (TestInNoWindowIsMoreThan25TwentyFourthsOfALimitAdmitted).
//     Requests that are spread evenly can use all of N.
//   - Because the charge comes before the request, concurrent requests cannot
//     exceed the limit by their estimates. Requests that cost more than their
//     estimates may exceed it. The shortfall is charged when it is known, and
//     paid back from later windows (TestWhatExceedsALimitIsPaidBack).
//   - A charge counts until 60 s after the last charge in its part of the
//     window, which is at most 2.5 s later.
//
// # How windows slide
//
// Days and months are those of the calendar. The windows of a second, a minute
// and an hour slide. A window has 24 parts, of 2.5 s each for a minute. All
// parts count in full but the oldest, which the window has partly left. Its use
// counts as if it was spread evenly from the part's beginning to the last
// charge in it. But at most N/24, rounded down, is left out in this way. The
// use that counts is rounded up.
//
// # Replicas
//
// With several replicas, each one writes only its own use ([Limiter.Report]),
// and adds up the use that the others report ([Limiter.Heard]). The use that a
// replica has not yet reported, or that the others do not know yet, is limited
// to its part of the remaining limit ([Limiter.Share]). A larger request waits
// until the others know of it ([Limiter.Admit]). So all replicas together keep
// a limit (TestOthersCannotHaveUsedMoreThanTheirPartsMeanwhile). While they do
// not hear each other, each one uses an equal part of what was left. With
// [Sharing].ByUse, a replica that used more before may go on to use its usual
// part then, so that N replicas together may use up to 2 - 1/N times the limit.
//
// The maximum of concurrent requests is shared in the same way, by the numbers
// in flight ([Limiter.ReportInFlight], [Limiter.HeardInFlight]). Those of a
// replica that has ended or vanished no longer count ([Limiters.Running]).
//
// A restart loses no use: a process saves what the others may not know
// ([Limiters.Save]), and the next one counts it ([Limiters.Restore]) until they
// do ([Limiters.Told]).
//
// # Concurrent use
//
// The methods of Limiters and Limiter are safe for concurrent use. A
// Reservation or a Claim belongs to one request, and one goroutine at a time
// uses it. Only [Limiter.Admit] and [Limiter.Await] read the clock, because
// they may wait. No hook is called while a lock is held.
package limiter

import (
	"cmp"
	"iter"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Settings are the limits of a caller in a config.
type Settings struct {
	// Limits has at most one limit of each kind, unit and model.
	Limits []ratelimit.Limit
	// MaxRequests is the maximum number of concurrent requests, at all replicas
	// together. It is 0 if there is no maximum.
	MaxRequests int
	// Tier is the caller's tier. Tiers are all tiers in order of importance.
	Tier  string
	Tiers []string
	// Location is the time zone in which days and months begin. If it is nil,
	// that is UTC.
	Location *time.Location
}

// Limiter limits the requests of one caller. A request calls Try before it is
// sent, and then Settle of its [Reservation]. A Limiter is safe for concurrent
// use.
type Limiter struct {
	name string
	id   ratelimit.CallerID
	// number is the caller's place in the order of first requests. seen is when
	// Get last returned it. Once forgotten is set, it stays set.
	number    int
	seen      atomic.Int64
	forgotten atomic.Bool
	// hook receives the marks that the use of a limit reaches. It is called
	// without the lock.
	hook func(ratelimit.Crossing)

	mu sync.Mutex
	// active is the set of active counters, one bit for each ID: those of all
	// limits, and the tokens of a day and a month, which are always counted.
	active      uint16
	counters    [ratelimit.MaxLimits]counter
	location    *time.Location
	tier        tier
	maxRequests int
	// inFlight is the number of uploads and of admitted requests here that have
	// not ended, and uploads that of the former. reserved is the tokens that
	// these requests were charged with. busy is how many requests were refused
	// because of maxRequests.
	inFlight   int
	uploads    int
	reserved   int64
	busy       uint64
	concurrent concurrent
	// waiting is the number of requests that wait because of maxRequests.
	waiting int
	// unspent is how much output the requests in flight may still have beyond
	// their charges. Each limit of tokens may assume another maximum, so there
	// is one sum for each unit.
	unspent [ratelimit.Units]int64
	// admitted is how many requests were admitted. It numbers their
	// reservations. keptOut is the value of admitted when the requests in
	// flight last kept another request out.
	admitted, keptOut uint64
	// known is the number of the latest request that the other replicas know.
	// claims reports whether a claim is pending.
	known   uint64
	claims  bool
	sharing Sharing
	reports *reports
	// changes counts changes of the use. hurry is set while a limit is more
	// than half used.
	changes atomic.Uint64
	hurry   atomic.Bool
	// latest is the latest report that is not yet confirmed.
	latest latest
	// reset is the time of the latest reset. resetReported is when a reset of
	// another replica was last reported to the hook; a caller shares it with
	// the limiters of its models. Each is 0 before the first one.
	reset         int64
	resetReported *atomic.Int64
	// models are the limiters of single models, and isModel reports whether the
	// limiter is one of these: see Limiters.change. The lock of Limiters guards
	// changes of both, too.
	models  map[string]*Limiter
	isModel bool
	clock   clock
	usual   usual
	hour    hour
}

// tier is the caller's tier: its name, and its number, counted from 1. The
// number is 0 if the caller has no tier.
type tier struct {
	name   string
	number int
}

// newLimiter returns the limiter of a caller that has used nothing. hook may be
// nil.
func newLimiter(name string, id ratelimit.CallerID, hook func(ratelimit.Crossing), r *reports) *Limiter {
	c := &Limiter{name: name, id: id, hook: hook, reports: r, usual: newUsual,
		resetReported: new(atomic.Int64)}
	for id := range ratelimit.ID(ratelimit.MaxLimits) {
		c.counters[id].limit = ratelimit.Limit{Kind: id.Kind(), Unit: id.Unit()}
	}
	c.Change(time.Time{}, Settings{})
	return c
}

// Name returns the caller's name.
func (c *Limiter) Name() string { return c.name }

// ID returns the caller's id, which [ratelimit.IDOf] makes of its name.
func (c *Limiter) ID() ratelimit.CallerID { return c.id }

// counted are the counters that are always active, even without a limit,
// because reports need them: the tokens of a day and a month.
var counted = []ratelimit.ID{
	ratelimit.Limit{Kind: ratelimit.Tokens, Unit: ratelimit.Day}.ID(),
	ratelimit.Limit{Kind: ratelimit.Tokens, Unit: ratelimit.Month}.ID(),
}

// Change applies the settings of a new config, but no limits of single models.
// A limit keeps its use even if its amount changes.
func (c *Limiter) Change(now time.Time, s Settings) {
	c.mu.Lock()
	defer c.mu.Unlock()
	location := cmp.Or(s.Location, time.UTC)
	var active uint16
	for id := range c.counters {
		m := &c.counters[id]
		m.limit.Amount, m.limit.Then, m.then = 0, "", 0
		if m.calendar() && location != c.location {
			m.end = m.start // midnight is at another time
		}
	}
	for _, l := range s.Limits {
		m := &c.counters[l.ID()]
		m.limit, m.then = l, uint8(1+slices.Index(s.Tiers, l.Then))
		m.boundDebt()
		active |= 1 << l.ID()
	}
	for _, id := range counted {
		active |= 1 << id
	}
	if s.MaxRequests != c.maxRequests && !now.IsZero() {
		if c.maxRequests == 0 {
			c.concurrent.peak = c.admittedInFlight() // nothing was reported before
		}
		c.changes.Add(1)
		c.reports.hurry()
	}
	c.active, c.location, c.maxRequests = active, location, s.MaxRequests
	c.tier = tier{s.Tier, 1 + slices.Index(s.Tiers, s.Tier)}
	if !now.IsZero() {
		at := c.roll(now)
		c.divide(at)
		c.addUpInFlight(at)
	}
}

// divide moves the windows of all counters to now, including inactive ones, and
// gives them parts if their limits need any.
func (c *Limiter) divide(at int64) {
	for id := range c.counters {
		m := &c.counters[id]
		m.roll(ratelimit.ID(id), at, c.location, c.admitted+1)
		m.divide(at)
	}
}

// all iterates over the active counters.
func (c *Limiter) all() iter.Seq2[ratelimit.ID, *counter] { return c.countersIn(c.active) }

// countersIn iterates over the counters whose bits are set in mask.
func (c *Limiter) countersIn(mask uint16) iter.Seq2[ratelimit.ID, *counter] {
	return func(yield func(ratelimit.ID, *counter) bool) {
		for mask := mask; mask != 0; mask &= mask - 1 {
			if id := ratelimit.ID(bits.TrailingZeros16(mask)); !yield(id, &c.counters[id]) {
				return
			}
		}
	}
}
