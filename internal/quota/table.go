package quota

import (
	"maps"
	"sync"
	"sync/atomic"
)

// maxModels is how many models have a meter, whatever models clients name.
const maxModels = 256

// Table has the meters of a backend, by its names for models. The zero Table is ready to use.
// Reading it takes no lock.
type Table struct {
	meters atomic.Pointer[map[string]*Meter] // which never changes
	mu     sync.Mutex                        // guards writing
}

// Of returns the meter of a model, or nil if it has none.
func (t *Table) Of(model string) *Meter {
	if meters := t.meters.Load(); meters != nil {
		return (*meters)[model]
	}
	return nil
}

// Make returns the meter of a model, which has one from now on. It returns nil if there are too
// many.
func (t *Table) Make(model string) *Meter {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := make(map[string]*Meter)
	if meters := t.meters.Load(); meters != nil {
		if m := (*meters)[model]; m != nil || len(*meters) >= maxModels {
			return m
		}
		maps.Copy(next, *meters)
	}
	next[model] = new(Meter)
	t.meters.Store(&next)
	return next[model]
}

// Clear forgets all meters.
func (t *Table) Clear() { t.meters.Store(nil) }
