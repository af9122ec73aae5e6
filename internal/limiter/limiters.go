package limiter

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// Set has the limiters of a pool. Module replicas shares the use that these
// count.
type Set interface{ Limiters() *Limiters }

// Limiters are those of all callers of a pool. They outlive a config, and are
// safe for concurrent use.
type Limiters struct {
	hook   func(ratelimit.Crossing)
	writer string

	mu       sync.RWMutex
	settings func(name string) Settings
	byName   map[string]*Limiter
	// inOrder are the callers of byName in the order of their numbers. swept is
	// when idle callers were last forgotten.
	inOrder []*Limiter
	number  int
	swept   time.Time
	evicted atomic.Int64
	most    int // maxCallers
	// byID also contains callers that only other replicas have reported.
	byID    map[ratelimit.CallerID]*Limiter
	reports *reports
	// sharing is the argument of the latest Share. ahead is the argument of the
	// latest Follow.
	sharing Sharing
	ahead   time.Duration
	// restored reports whether the other replicas may not know all that Restore
	// added.
	restored atomic.Bool
}

// maxCallers is the maximum number of callers, including those that only other
// replicas have reported.
const maxCallers = 100_000

// NewLimiters returns limiters of no callers yet. hook receives the marks that
// the use of a limit reaches. It is called without any lock, and may be nil.
func NewLimiters(hook func(ratelimit.Crossing)) *Limiters {
	writer := make([]byte, 16)
	rand.Read(writer)
	id := hex.EncodeToString(writer)
	return &Limiters{most: maxCallers, hook: hook, writer: id, reports: &reports{writer: id},
		byName: make(map[string]*Limiter), byID: make(map[ratelimit.CallerID]*Limiter)}
}

// Writer returns a random id of 32 hexadecimal digits, which identifies this
// replica's use in messages between replicas.
func (cs *Limiters) Writer() string { return cs.writer }

// Configure applies a config. settings returns the settings of a caller.
func (cs *Limiters) Configure(now time.Time, settings func(name string) Settings) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.settings = settings
	for _, c := range cs.byName {
		cs.change(now, c)
	}
}

// Apply applies the settings of a caller again, because they have changed.
func (cs *Limiters) Apply(now time.Time, name string) {
	cs.Get(now, name)
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if c := cs.byName[name]; c != nil {
		cs.change(now, c)
	}
}

// Get returns the caller with this name, and creates it if it is new.
func (cs *Limiters) Get(now time.Time, name string) *Limiter {
	cs.mu.RLock()
	c := cs.byName[name]
	if c != nil {
		c.see(now)
	}
	cs.mu.RUnlock()
	if c != nil {
		return c
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if c = cs.byName[name]; c == nil {
		cs.forget(now)
		cs.evict()
		c = cs.ofID(now, ratelimit.IDOf(name))
		cs.add(c, name)
		cs.byName[name] = c
		if cs.settings != nil {
			cs.change(now, c)
		}
	}
	return c
}

// add gives a caller a name and a number.
func (cs *Limiters) add(c *Limiter, name string) {
	c.mu.Lock()
	c.name = name
	c.mu.Unlock()
	cs.number++
	c.number = cs.number
	cs.inOrder = append(cs.inOrder, c)
}

func (cs *Limiters) ofID(now time.Time, id ratelimit.CallerID) *Limiter {
	c := cs.byID[id]
	if c == nil {
		c = newLimiter("", id, cs.hook, cs.reports)
		c.clock.ahead = int64(cs.ahead)
		c.see(now)
		c.Share(now, cs.sharing)
		cs.byID[id] = c
	}
	return c
}

// From returns the named callers whose numbers are greater than number, in the
// order of their first requests, and the limiters of their models.
func (cs *Limiters) From(number int) []*Limiter {
	cs.mu.RLock()
	defer cs.mu.RUnlock()
	i, _ := slices.BinarySearchFunc(cs.inOrder, number+1,
		func(c *Limiter, number int) int { return cmp.Compare(c.number, number) })
	return slices.Clone(cs.inOrder[i:])
}

// All returns the named callers, sorted by name.
func (cs *Limiters) All() []*Limiter {
	cs.mu.RLock()
	defer cs.mu.RUnlock()
	return slices.SortedFunc(maps.Values(cs.byName), func(a, b *Limiter) int { return cmp.Compare(a.name, b.name) })
}

// Name gives names to callers that so far only other replicas have reported, so
// that All and From return them.
func (cs *Limiters) Name(now time.Time, names []string) {
	cs.mu.RLock()
	unknown := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return cs.byName[name] != nil })
	cs.mu.RUnlock()
	for _, name := range unknown {
		id := ratelimit.IDOf(name) // without the lock: there may be very many names
		cs.mu.RLock()
		heard := cs.byID[id] != nil
		cs.mu.RUnlock()
		if heard {
			cs.Get(now, name)
		}
	}
}

// Heard records another replica's use for a caller: see [Limiter.Heard]. The
// caller may have sent no request here yet.
func (cs *Limiters) Heard(now time.Time, id ratelimit.CallerID, replica string, version uint64, entries []Entry) {
	if c := cs.heardOf(now, id); c != nil {
		c.Heard(now, replica, version, entries)
	}
}

// heardOf returns a caller that another replica reports. It returns nil if
// there are too many callers.
func (cs *Limiters) heardOf(now time.Time, id ratelimit.CallerID) *Limiter {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c := cs.byID[id]
	if c == nil {
		if cs.forget(now); len(cs.byID) < cs.most {
			c = cs.ofID(now, id)
		}
	}
	return c
}

// Share sets for all callers how replicas share the limits: see
// [Limiter.Share].
func (cs *Limiters) Share(now time.Time, s Sharing) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.sharing == s {
		return
	}
	cs.sharing = s
	for _, c := range cs.byID {
		c.Share(now, s)
	}
}

// Follow makes the windows of all callers follow a clock that is ahead of the
// local one by ahead, until the next call. Replicas that follow the same clock
// have the same windows.
func (cs *Limiters) Follow(now time.Time, ahead time.Duration) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.ahead == ahead {
		return
	}
	cs.ahead = ahead
	for _, c := range cs.byID {
		c.follow(now, ahead)
	}
}

// Spread distributes the use of other replicas over time for all callers: see
// [Limiter.Spread].
func (cs *Limiters) Spread(now time.Time, timelines map[ratelimit.CallerID]map[string][]Timeline) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for id, c := range cs.byID {
		c.Spread(now, timelines[id])
	}
}
