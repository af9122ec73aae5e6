package limiter

import (
	"cmp"
	"iter"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Settings are what a config says of a caller.
type Settings struct {
	// Limits has at most one limit of each kind and unit.
	Limits []Limit
	// MaxRequests is how many requests the caller may have at a time. 0: any
	// number.
	MaxRequests int
	// Tier is the caller's own tier, and Tiers are all of them in order of
	// importance.
	Tier  string
	Tiers []string
	// Location is where days and months begin. nil: UTC.
	Location *time.Location
}

// Caller is what one caller uses, and may use.
type Caller struct {
	name string
	id   CallerID
	// number is its place in the order of first requests, and seen when it was
	// last asked for. forgotten never becomes false.
	number    int
	seen      atomic.Int64
	forgotten atomic.Bool
	// hook gets the marks that the use has reached. It is called without the
	// lock.
	hook func(Crossing)

	mu sync.Mutex
	// active are the ids of the active counters, one bit each: those of all
	// limits, and the tokens of a day and a month, which are always counted.
	active      uint16
	counters    [MaxLimits]counter
	location    *time.Location
	tier        tier
	maxRequests int
	// inFlight are the uploads, and the requests that were admitted and are not
	// over; reserved are the tokens that these were charged with. busy is how
	// many were refused because there were maxRequests of them.
	inFlight int
	reserved int64
	busy     uint64
	// unspent is how much output the requests in flight may still have beyond
	// what they were charged with, as each limit of tokens counts it, by the
	// limit's unit.
	unspent [units]int64
	// admitted is how many requests were: it numbers their reservations. held
	// is the number of the latest one when requests in flight last kept out
	// another one.
	admitted, held uint64
	// known is the number of the latest request that the others know, and
	// claims reports whether there is a claim.
	known   uint64
	claims  bool
	sharing Sharing
	reports *reports
	// changes counts changes of the use, and hurry is set if a limit is more
	// than half used.
	changes atomic.Uint64
	hurry   atomic.Bool
	// latest is the report of which the others will know.
	latest latest
	// reset is the latest reset, and resetReported when one that was heard was
	// reported. 0: there was none.
	reset, resetReported int64
	clock                clock
	usual                usual
	hour                 hour
}

// tier is the caller's own: its name, and its number, counted from 1. 0: it has
// none.
type tier struct {
	name   string
	number int
}

// newCaller returns the limiter of a caller that has used nothing. hook may be
// nil.
func newCaller(name string, id CallerID, hook func(Crossing), r *reports) *Caller {
	c := &Caller{name: name, id: id, hook: hook, reports: r, usual: newUsual}
	for id := range ID(MaxLimits) {
		c.counters[id].limit = Limit{Kind: id.Kind(), Unit: id.Unit()}
	}
	c.Change(time.Time{}, Settings{})
	return c
}

// Name returns the caller's name.
func (c *Caller) Name() string { return c.name }

// ID returns IDOf the caller's name.
func (c *Caller) ID() CallerID { return c.id }

// counted are the counters that are active without a limit, too, for reports:
// the tokens of a day and a month.
var counted = []ID{Limit{Kind: Tokens, Unit: Day}.ID(), Limit{Kind: Tokens, Unit: Month}.ID()}

// Change applies the settings of a new config. What was used of a limit stays
// used, even if its amount has changed.
func (c *Caller) Change(now time.Time, s Settings) {
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
		active |= 1 << l.ID()
	}
	for _, id := range counted {
		active |= 1 << id
	}
	c.active, c.location, c.maxRequests = active, location, s.MaxRequests
	c.tier = tier{s.Tier, 1 + slices.Index(s.Tiers, s.Tier)}
	if !now.IsZero() {
		at := c.roll(now)
		c.divide(at)
	}
}

// divide moves the windows of all counters to now, also of those that are not
// active, and divides them.
func (c *Caller) divide(at int64) {
	for id := range c.counters {
		m := &c.counters[id]
		m.roll(ID(id), at, c.location, c.admitted+1)
		m.divide(at)
	}
}

// all iterates over the active counters.
func (c *Caller) all() iter.Seq2[ID, *counter] { return c.countersIn(c.active) }

// countersIn iterates over the counters whose bits a mask has.
func (c *Caller) countersIn(mask uint16) iter.Seq2[ID, *counter] {
	return func(yield func(ID, *counter) bool) {
		for mask := mask; mask != 0; mask &= mask - 1 {
			if id := ID(bits.TrailingZeros16(mask)); !yield(id, &c.counters[id]) {
				return
			}
		}
	}
}
