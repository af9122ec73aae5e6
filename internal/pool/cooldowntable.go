package pool

import (
	"cmp"
	"hash/maphash"
	"iter"
	"sync/atomic"
	"time"
)

// cooldownTable holds the cooldowns of a backend by scope. Clients can make up
// names of models, so adding a scope must be cheap, and the table is bounded.
//
// It works like a set-associative cache: the hash of the model selects one of
// many small sets, and a lookup compares the few scopes in that set without a
// lock. If the set is full, a new scope replaces the least valuable one: see
// [worth]. Nothing is copied or sorted, and made-up names hardly ever replace a
// real model.
type cooldownTable struct {
	sets atomic.Pointer[[tableSets][setSize]atomic.Pointer[scopedCooldowns]] // nil: there are none
	// operations reports whether a scope ever named an operation.
	operations atomic.Bool
}

// There is room for many more models than backends have, so that hardly any set
// gets more than setSize of the models in a config.
const (
	tableSets = 64
	setSize   = 16
)

// scopedCooldowns are the cooldowns of a scope. named reports whether the
// member knew the model when the scope was added.
type scopedCooldowns struct {
	scope Scope
	named bool
	cooldownSet
}

var modelSeed = maphash.MakeSeed()

// set returns the set of a scope, whose Model must be a ModelKey. It returns
// nil if the table is empty.
func (t *cooldownTable) set(scope Scope) *[setSize]atomic.Pointer[scopedCooldowns] {
	sets := t.sets.Load()
	if sets == nil {
		return nil
	}
	return &sets[maphash.String(modelSeed, scope.Model)%tableSets]
}

// find returns the cooldowns of a scope, or nil.
func (t *cooldownTable) find(scope Scope) *cooldownSet {
	set := t.set(scope)
	if set == nil {
		return nil
	}
	for i := range set {
		c := set[i].Load()
		if c == nil { // no place before it becomes free again
			return nil
		}
		if c.scope == scope {
			return &c.cooldownSet
		}
	}
	return nil
}

// findOperation returns the cooldowns of a scope that names an operation, or
// nil. Nearly always there are none, or the request has no operation.
func (t *cooldownTable) findOperation(scope Scope) *cooldownSet {
	if scope.Operation == "" || !t.operations.Load() {
		return nil
	}
	return t.find(scope)
}

// place returns the place for a scope, and the scope that would be replaced
// there, or nil. The caller holds the lock.
func (t *cooldownTable) place(m *Member, scope Scope,
	now time.Time) (place *atomic.Pointer[scopedCooldowns], replaced *scopedCooldowns) {
	if t.sets.Load() == nil {
		t.sets.Store(new([tableSets][setSize]atomic.Pointer[scopedCooldowns]))
	}
	set := t.set(scope)
	var least worth
	for i := range set {
		c := set[i].Load()
		if c == nil || c.scope == scope {
			return &set[i], nil
		}
		if w := m.worthOf(c, now); replaced == nil || w.compare(least) < 0 {
			place, replaced, least = &set[i], c, w
		}
	}
	return place, replaced
}

// worth ranks the scopes of a full set. A model that the member knows is worth
// more than an unknown one, then a throttle more than a failure, and a cooldown
// that ends late more than one that ends soon.
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

// add returns the cooldowns of a scope, and adds the scope if it is new. The
// caller holds the lock.
func (t *cooldownTable) add(m *Member, scope Scope, now time.Time) *cooldownSet {
	if known := t.find(scope); known != nil {
		return known
	}
	place, _ := t.place(m, scope, now)
	if scope.Operation != "" {
		t.operations.Store(true)
	}
	c := &scopedCooldowns{scope: scope, named: m.Knows(scope.Model)}
	place.Store(c)
	return &c.cooldownSet
}

// clear removes all cooldowns.
func (t *cooldownTable) clear() { t.sets.Store(nil) }

// all iterates over the cooldowns of all scopes.
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
