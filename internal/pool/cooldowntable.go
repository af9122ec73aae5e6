package pool

import (
	"cmp"
	"hash/maphash"
	"iter"
	"sync/atomic"
	"time"
)

// cooldownTable has the cooldowns of a backend by their scopes. Clients can
// make up names of models, so a new one must cost little, and the table is
// bounded.
//
// It works as a set-associative cache: a scope has a place in one of many sets,
// by its hash. A lookup compares the few scopes of that set, and takes no lock.
// In a full set, a new scope takes the place of the one that is worth least. So
// nothing is copied or sorted, and names that clients make up hardly ever take
// the place of another model.
type cooldownTable struct {
	sets atomic.Pointer[[tableSets][setSize]atomic.Pointer[scopedCooldowns]] // nil: there are none
}

// There is room for many more models than backends have, so that hardly any set
// gets more than setSize of those in a config.
const (
	tableSets = 64
	setSize   = 16
)

// scopedCooldowns are the cooldowns of a scope. named reports whether the
// config named its model when they began.
type scopedCooldowns struct {
	scope Scope
	named bool
	cooldownSet
}

var modelSeed = maphash.MakeSeed()

// set returns the set of a scope, whose model is a ModelKey. It is nil if there
// are no cooldowns.
func (t *cooldownTable) set(its Scope) *[setSize]atomic.Pointer[scopedCooldowns] {
	sets := t.sets.Load()
	if sets == nil {
		return nil
	}
	return &sets[maphash.String(modelSeed, its.Model)%tableSets]
}

// find returns the cooldowns of a scope, or nil.
func (t *cooldownTable) find(its Scope) *cooldownSet {
	set := t.set(its)
	if set == nil {
		return nil
	}
	for i := range set {
		c := set[i].Load()
		if c == nil { // no place before it becomes free again
			return nil
		}
		if c.scope == its {
			return &c.cooldownSet
		}
	}
	return nil
}

// place returns where a scope is or would be, and which one leaves that place
// for it, if any. The caller holds the lock.
func (t *cooldownTable) place(m *Member, its Scope, now time.Time) (place *atomic.Pointer[scopedCooldowns], leaves *scopedCooldowns) {
	if t.sets.Load() == nil {
		t.sets.Store(new([tableSets][setSize]atomic.Pointer[scopedCooldowns]))
	}
	set := t.set(its)
	var least worth
	for i := range set {
		c := set[i].Load()
		if c == nil || c.scope == its {
			return &set[i], nil
		}
		if w := m.worthOf(c, now); leaves == nil || w.compare(least) < 0 {
			place, leaves, least = &set[i], c, w
		}
	}
	return place, leaves
}

// worth ranks the cooldowns of a model for a place in the table: a name that
// the member knows is worth more than one that it does not know, a throttle
// more than a failure, and what ends late more than what ends soon.
type worth struct {
	known             bool
	throttle, failure time.Time
}

func (m *Member) worthOf(c *scopedCooldowns, now time.Time) worth {
	return worth{c.named || m.health.hasServed(c.scope.Model), c.throttle.until(now), c.failure.until(now)}
}

func (w worth) compare(other worth) int {
	switch {
	case w.known && !other.known:
		return 1
	case !w.known && other.known:
		return -1
	}
	return cmp.Or(w.throttle.Compare(other.throttle), w.failure.Compare(other.failure))
}

// add returns the cooldowns of a scope, which may be new. The caller holds the
// lock.
func (t *cooldownTable) add(m *Member, its Scope, now time.Time) *cooldownSet {
	if known := t.find(its); known != nil {
		return known
	}
	place, _ := t.place(m, its, now)
	c := &scopedCooldowns{scope: its, named: m.Knows(its.Model)}
	place.Store(c)
	return &c.cooldownSet
}

// clear forgets all.
func (t *cooldownTable) clear() { t.sets.Store(nil) }

// all are the cooldowns of all scopes.
func (t *cooldownTable) all() iter.Seq[*cooldownSet] {
	return func(yield func(*cooldownSet) bool) {
		sets := t.sets.Load()
		if sets == nil {
			return
		}
		for i := range sets {
			for j := range sets[i] {
				c := sets[i][j].Load()
				if c == nil {
					break
				}
				if !yield(&c.cooldownSet) {
					return
				}
			}
		}
	}
}
