package quota

import (
	"cmp"
	"iter"
	"math"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"
)

// Callers shares the backends of a pool among its callers while backends
// throttle: see the package comment. It is safe for concurrent use, and takes
// no lock.
//
// The level is the cost that each caller may have got lately before it is above
// its share: if no caller got more than the level, and each got all that it
// asked for up to the level, all of them together got as much as they did. What
// callers ask for and get is counted by sums that fade. Nothing is counted
// unless a backend has throttled lately. The zero Callers is ready to use.
type Callers struct {
	// until is the instant until which backends count as short, and halves is
	// the time in which sums fade to a half. Both are in milliseconds.
	until, halves atomic.Int64
	// uses are nil before the first throttle.
	uses atomic.Pointer[[maxCallers]CallerUse]
}

// maxCallers is how many callers are counted at a time, for all models. Further
// ones share the counts of others.
const maxCallers = 256

const (
	// shortAfter is how long after a throttle backends count as short.
	shortAfter = time.Minute
	// shortestHalf and longestHalf bound the time in which sums fade to a half.
	// It is two windows of a limit: in a shorter time, a caller that got its
	// share at the beginning of a window would soon be below it again.
	shortestHalf = 10 * time.Second
	longestHalf  = 2 * time.Minute
	// idleAfter is how long after its latest request a caller counts as idle.
	idleAfter = 10 * time.Second
	// contented is the part of the level with which a caller counts as served,
	// because sums that fade are not exact.
	contented = .98
	// nearlyAll is the part of what it asks for with which a caller below the
	// level counts as served. If it were more, callers above the level would
	// leave free what chance refuses to the others.
	nearlyAll = .96
	// hopeless is after how many requests a caller that got none of them is
	// left out of the shares, until it gets one.
	hopeless = 8
)

// CallerID identifies the requests of a caller for a model, in a tier. Caller
// and Model are hashes of names.
type CallerID struct {
	Caller, Model uint64
	Tier          int
}

// CallerUse counts what a caller asks for and gets.
type CallerUse struct {
	of *Callers
	id atomic.Pointer[CallerID] // nil: it is free
	// members has a bit for each member of the pool that takes the caller's
	// latest request.
	members    atomic.Uint64
	asked, got fading
	// cost is that of its latest request, and begun the instant of its first
	// one, in milliseconds.
	cost, begun atomic.Int64
}

// AreShort reports whether a backend has throttled lately, so that callers get
// shares.
func (c *Callers) AreShort(now time.Time) bool {
	until := c.until.Load()
	return until != 0 && instant(now) < until
}

// SeeThrottle records a throttle that ends at end, of a backend whose limits
// have windows of this length. The length is 0 if it is not known. A request
// that leaves a backend to other tiers counts as one, too.
func (c *Callers) SeeThrottle(window time.Duration, end, now time.Time) {
	if !c.AreShort(now) {
		c.halves.Store(shortestHalf.Milliseconds())
	}
	if c.uses.Load() == nil {
		uses := new([maxCallers]CallerUse)
		for i := range uses {
			uses[i].of = c
		}
		c.uses.CompareAndSwap(nil, uses)
	}
	grow(&c.halves, min(2*window, longestHalf).Milliseconds())
	c.stayShort(instant(end))
}

// stayShort makes backends count as short for a while after an instant.
func (c *Callers) stayShort(at int64) { grow(&c.until, at+shortAfter.Milliseconds()) }

func grow(n *atomic.Int64, to int64) {
	for known := n.Load(); known < to && !n.CompareAndSwap(known, to); known = n.Load() {
	}
}

// Ask counts a request that these members take. It is called only after a
// throttle.
func (c *Callers) Ask(id CallerID, members uint64, cost int64, now time.Time) *CallerUse {
	at := instant(now)
	u := c.useOf(id, at)
	u.members.Store(members)
	u.cost.Store(cost)
	u.asked.add(cost, at, c.halves.Load())
	return u
}

// useOf returns the use of a caller. If the caller is new, it is one that is
// free or idle. If there is none, it is that of another caller.
func (c *Callers) useOf(id CallerID, at int64) *CallerUse {
	first := (id.Caller ^ id.Model) + uint64(id.Tier) //nolint:gosec // any will do
	var free *CallerUse
	uses := c.uses.Load()
	for i := range uint64(maxCallers) {
		u := &uses[(first+i)%maxCallers]
		known := u.id.Load()
		if known != nil && *known == id {
			return u
		}
		if free == nil && (known == nil || u.isIdle(at)) {
			free = u
		}
		if known == nil {
			break
		}
	}
	if free == nil {
		return &uses[first%maxCallers]
	}
	free.asked.Store(0)
	free.got.Store(0)
	free.begun.Store(at)
	begun := id // id itself would always be allocated
	free.id.Store(&begun)
	return free
}

func (u *CallerUse) isIdle(at int64) bool { return u.asked.since(at) >= idleAfter.Milliseconds() }

// isHopeless reports whether none of many requests was served, as if they were
// larger than the backends' whole limits. Nobody could use what others leave
// free for such a caller.
func (u *CallerUse) isHopeless(asked, got float64, at, halves int64) bool {
	each := float64(u.cost.Load())
	return at-u.begun.Load() > halves && asked > hopeless*each && got < each/2
}

// Get counts the cost of a request that is sent for the caller. A negative cost
// is that of one that was not executed.
func (u *CallerUse) Get(cost int64, now time.Time) {
	u.got.add(cost, instant(now), u.of.halves.Load())
}

// Withdraw takes back a request that the caller has asked for.
func (u *CallerUse) Withdraw(cost int64, now time.Time) {
	u.asked.add(-cost, instant(now), u.of.halves.Load())
}

// Dues yields what the caller leaves to the others of its tier, if it is above
// its share: for each that got less than it is due, a bit for each member that
// it may use, and the part of these members that it is due.
func (u *CallerUse) Dues(now Instant) iter.Seq2[uint64, float64] {
	return func(yield func(members uint64, part float64) bool) {
		var counts counts
		counts.read(u, now.millis())
		level := counts.level()
		if u.got.sum(now.millis(), u.of.halves.Load()) <= level {
			return
		}
		for _, other := range counts.active[:counts.n] {
			if other.got >= min(nearlyAll*other.asked, contented*level) {
				continue
			}
			u.of.stayShort(now.millis())
			part := min(other.asked, level) / counts.all
			// of all members, it may use only some
			part *= float64(bits.OnesCount64(counts.members)) / float64(bits.OnesCount64(other.members))
			if !yield(other.members, part) {
				return
			}
		}
	}
}

// counts are the counts of a caller and of those with whom it shares, at an
// instant.
type counts struct {
	active [maxCallers]count
	n      int
	// all is what callers got of the model, in all tiers, and members are the
	// members that any of them may use.
	all     float64
	members uint64
}

type count struct {
	asked, got float64
	members    uint64
}

func (c *counts) read(u *CallerUse, at int64) {
	id, halves := u.id.Load(), u.of.halves.Load()
	uses := u.of.uses.Load()
	for i := range uses {
		other := &uses[i]
		otherID := other.id.Load()
		if otherID == nil || otherID.Model != id.Model {
			continue
		}
		got, members := other.got.sum(at, halves), other.members.Load()
		c.all += got
		c.members |= members
		if otherID.Tier != id.Tier || other.isIdle(at) {
			continue
		}
		asked := other.asked.sum(at, halves)
		if other == u || !other.isHopeless(asked, got, at, halves) {
			c.active[c.n] = count{asked, got, members}
			c.n++
		}
	}
}

// level returns the cost that a caller may have got. It sorts the counts.
func (c *counts) level() float64 {
	var asked, got float64
	for _, count := range c.active[:c.n] {
		asked += count.asked
		got += count.got
	}
	if nearlyAll*asked <= got {
		return math.Inf(1) // all get what they ask for
	}
	slices.SortFunc(c.active[:c.n], func(a, b count) int { return cmp.Compare(a.asked, b.asked) })
	level := 0.
	for i, count := range c.active[:c.n] { // each gets what it asks for, or an equal part of the rest
		if level = got / float64(c.n-i); count.asked > level {
			break
		}
		got -= count.asked
	}
	return level
}

// fading is a sum that fades. To change together, the sum and the instant of
// its latest change are in a single number: the upper half is the sum, as a
// float32, and the lower half the instant in hundredths of a second.
type fading struct{ atomic.Uint64 }

func (f *fading) add(cost, at, halves int64) {
	for {
		known := f.Load()
		sum, now := max(0, sumOf(known, at, halves)+float64(cost)), hundredths(at)
		if ahead := uint32(known) - now; known != 0 && ahead < 100 { //nolint:gosec // both may overflow
			now = uint32(known) // that of another request was a bit later
		}
		if f.CompareAndSwap(known, uint64(math.Float32bits(float32(sum)))<<32|uint64(now)) {
			return
		}
	}
}

func (f *fading) sum(at, halves int64) float64 { return sumOf(f.Load(), at, halves) }

// since returns the time since the latest change, in milliseconds.
func (f *fading) since(at int64) int64 { return sinceOf(f.Load(), at) }

func sumOf(packed uint64, at, halves int64) float64 {
	sum := float64(math.Float32frombits(uint32(packed >> 32)))
	if sum == 0 {
		return 0
	}
	return sum * math.Exp2(-float64(sinceOf(packed, at))/float64(halves))
}

// sinceOf is right for 248 days.
func sinceOf(packed uint64, at int64) int64 {
	return 10 * max(0, int64(int32(hundredths(at)-uint32(packed)))) //nolint:gosec // both may overflow
}

func hundredths(at int64) uint32 { return uint32(at / 10) } //nolint:gosec // it may overflow
