package quota

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// maxModels is how many models have a meter, whatever models clients name.
const maxModels = 256

// Table has the meters of a backend, by its names for models. The zero Table is
// ready to use. Reading it takes no lock.
type Table struct {
	meters atomic.Pointer[meters]
	mu     sync.Mutex // guards writing
}

// meters are those of a backend. They never change.
type meters struct {
	byModel map[string]*Meter
	// first are the meters of the first models. Most backends have no more, and
	// to compare a few short names takes less time than to look one up.
	first []named
}

// named is the meter of a model.
type named struct {
	model string
	meter *Meter
}

const fewModels = 4

// Of returns the meter of a model, or nil if it has none.
func (t *Table) Of(model string) *Meter {
	known := t.meters.Load()
	if known == nil {
		return nil
	}
	for i := range known.first {
		if known.first[i].model == model {
			return known.first[i].meter
		}
	}
	if len(known.first) < fewModels {
		return nil
	}
	return known.byModel[model]
}

// Make returns the meter of a model, which has one from now on. It returns nil
// if there are too many.
func (t *Table) Make(model string) *Meter {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := &meters{byModel: make(map[string]*Meter)}
	if known := t.meters.Load(); known != nil {
		if m := known.byModel[model]; m != nil || len(known.byModel) >= maxModels {
			return m
		}
		maps.Copy(next.byModel, known.byModel)
		next.first = slices.Clone(known.first)
	}
	m := new(Meter)
	next.byModel[model] = m
	if len(next.first) < fewModels {
		next.first = append(next.first, named{model, m})
	}
	t.meters.Store(next)
	return m
}

// Clear forgets all meters.
func (t *Table) Clear() { t.meters.Store(nil) }

// State is what is left of a limit of a model.
type State struct {
	Model string
	Left
}

// Snapshot returns what is left of the limits of all models.
func (t *Table) Snapshot(now time.Time) (states []State) {
	known := t.meters.Load()
	if known == nil {
		return nil
	}
	for model, m := range known.byModel {
		for _, left := range m.Left(now) {
			states = append(states, State{model, left})
		}
	}
	return states
}

// Given returns what each tier has got lately, by the models of which any has
// got something.
func (t *Table) Given(now time.Time) map[string]Given {
	known := t.meters.Load()
	if known == nil {
		return nil
	}
	all := make(map[string]Given)
	for model, m := range known.byModel {
		if given := m.Given(now); !given.IsZero() {
			all[model] = given
		}
	}
	return all
}
