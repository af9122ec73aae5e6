package quota

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// maxModels is the maximum number of models with a meter.
const maxModels = 256

// Table holds the meters of a backend, by the backend's names for models. The
// zero Table is ready to use. Reading it takes no lock.
type Table struct {
	meters atomic.Pointer[meters]
	mu     sync.Mutex // guards writing
}

// meters is an immutable set of meters.
type meters struct {
	byModel map[string]*Meter
	// first are the meters of the first models. Most backends have no more, and
	// comparing a few short names is faster than looking one up in a map.
	first []named
}

// named is the meter of a model.
type named struct {
	model string
	meter *Meter
}

const fewModels = 4

// Of returns the meter of a model. It returns nil if the model has none.
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

// Make returns the meter of a model, and adds one if the model has none. It
// returns nil if there are too many.
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

// Clear removes all meters.
func (t *Table) Clear() { t.meters.Store(nil) }

// State describes what is left of a model's limit.
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

// TierCosts returns the cost that each tier has got lately, by model. Models of
// which no tier has got anything are left out.
func (t *Table) TierCosts(now time.Time) map[string]TierCosts {
	known := t.meters.Load()
	if known == nil {
		return nil
	}
	all := make(map[string]TierCosts)
	for model, m := range known.byModel {
		if costs := m.TierCosts(now); !costs.IsZero() {
			all[model] = costs
		}
	}
	return all
}
