package pulse

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Table has the pulses of a backend, by models. The zero Table is ready to use. Reading it takes no
// lock.
type Table struct {
	models atomic.Pointer[models]
	mu     sync.Mutex // guards writing
}

// models are the pulses by the names of models at the backend. It never changes.
type models struct {
	pulses map[string]*Pulse
	// first are the pulses of the first models. Most backends have no more, and to compare a few short names takes less
	// time than to look one up.
	first []named
	// silences is how many of them are silent.
	silences *atomic.Int64
}

// named is the pulse of a model.
type named struct {
	model string
	pulse *Pulse
}

const (
	// maxModels is how many models are followed, whatever models clients name.
	maxModels = 256
	// fewModels is how many of them are compared.
	fewModels = 4
)

// Of returns the pulse of a model, or nil if it is not followed.
func (t *Table) Of(model string) *Pulse {
	known := t.models.Load()
	if known == nil {
		return nil
	}
	for i := range known.first {
		if known.first[i].model == model {
			return known.first[i].pulse
		}
	}
	if len(known.first) < fewModels {
		return nil
	}
	return known.pulses[model]
}

// Make returns the pulse of a model, which is followed from now on. It returns nil if there are too
// many.
func (t *Table) Make(model string) *Pulse {
	if p := t.Of(model); p != nil || t.full() {
		return p
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.Of(model); p != nil || t.full() { // another request was faster
		return p
	}
	next := &models{pulses: make(map[string]*Pulse), silences: new(atomic.Int64)}
	if known := t.models.Load(); known != nil {
		maps.Copy(next.pulses, known.pulses)
		next.first, next.silences = slices.Clone(known.first), known.silences
	}
	p := &Pulse{silences: next.silences}
	if next.pulses[model] = p; len(next.first) < fewModels {
		next.first = append(next.first, named{model, p})
	}
	t.models.Store(next)
	return p
}

func (t *Table) full() bool {
	known := t.models.Load()
	return known != nil && len(known.pulses) >= maxModels
}

// AnySilent reports whether any of the pulses is silent, which is hardly ever so.
func (t *Table) AnySilent() bool {
	known := t.models.Load()
	return known != nil && known.silences.Load() > 0
}

// Clear forgets all pulses. Requests that still wait have the old ones, which count for no request
// that comes later.
func (t *Table) Clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.models.Store(nil)
}

// State is the state of a pulse, for operators.
type State struct {
	// Model is the backend's name for the model.
	Model string
	// Whole and Streamed are the usual waits for the first byte: of the kind that waits longest, if several are
	// known. 0: none is.
	Whole, Streamed time.Duration
	// Since is when the silence began. It is zero if there is none. Slow reports whether bytes come, but late.
	Since time.Time
	Slow  bool
	// Untried is when a request was last sent, if the backend was silent or slow then and none has tried it for so long
	// that it is not known how it is. Since is zero then.
	Untried time.Time
}

// untried is after how long without a request a silence says nothing any more: only a request can end it, and an idle
// backend gets none. The next request may try it, as one is due after longestPause.
const untried = 45 * time.Second

// Snapshot returns the states of all pulses that have been used.
func (t *Table) Snapshot(now time.Time) (states []State) {
	known := t.models.Load()
	if known == nil {
		return nil
	}
	for model, p := range known.pulses {
		s := State{Model: model, Whole: slowest(p.norms[:sizes], enough).Wait, Streamed: slowest(p.norms[sizes:], enough).Wait}
		if silence := p.silent.Load(); silence != 0 {
			if tried := p.tried.Load(); p.waiting.Load() <= 0 && nanos(now)-tried > int64(untried) {
				s.Untried = began.Add(time.Duration(tried))
			} else {
				s.Since, s.Slow = sinceOf(silence), silence&flagged != 0
			}
		}
		if s.Whole > 0 || s.Streamed > 0 || p.silent.Load() != 0 {
			states = append(states, s)
		}
	}
	return states
}
