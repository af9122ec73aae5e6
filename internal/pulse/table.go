package pulse

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"
)

// Kind is a kind of request. The first byte of a streamed reply comes when the model begins to
// answer, and that of a whole one when it is done, so each has its own usual wait.
type Kind int

const (
	// Unfollowed requests have no pulse.
	Unfollowed Kind = iota
	Whole
	Streamed
)

// Table has the pulses of a backend, by models. The zero Table is ready to use. Reading it takes no
// lock.
type Table struct {
	models atomic.Pointer[models]
	mu     sync.Mutex // guards writing
}

// models are the pulses by the names of models at the backend. It never changes.
type models struct {
	pulses map[string]*[2]Pulse
	// silences is how many of them are silent.
	silences *atomic.Int64
}

// maxModels is how many models are followed, whatever models clients name.
const maxModels = 256

// Of returns the pulse of a model, or nil if it is not followed.
func (t *Table) Of(model string, kind Kind) *Pulse {
	if known := t.models.Load(); known != nil && kind != Unfollowed {
		if pulses := known.pulses[model]; pulses != nil {
			return &pulses[kind-Whole]
		}
	}
	return nil
}

// Make returns the pulse of a model, which is followed from now on. It returns nil if there are too
// many.
func (t *Table) Make(model string, kind Kind) *Pulse {
	if p := t.Of(model, kind); p != nil || kind == Unfollowed || t.full() {
		return p
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.Of(model, kind); p != nil || t.full() { // another request was faster
		return p
	}
	next := &models{make(map[string]*[2]Pulse), new(atomic.Int64)}
	if known := t.models.Load(); known != nil {
		maps.Copy(next.pulses, known.pulses)
		next.silences = known.silences
	}
	next.pulses[model] = &[2]Pulse{{silences: next.silences}, {silences: next.silences}}
	t.models.Store(next)
	return &next.pulses[model][kind-Whole]
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
	Model    string
	Streamed bool
	// Usual is the usual wait for the first byte. 0: it is not known yet.
	Usual time.Duration
	// Since is when the silence began. It is zero if there is none.
	Since time.Time
}

// Snapshot returns the states of all pulses that have been used.
func (t *Table) Snapshot() (states []State) {
	known := t.models.Load()
	if known == nil {
		return nil
	}
	for model, pulses := range known.pulses {
		for i := range pulses {
			p := &pulses[i]
			s := State{Model: model, Streamed: Kind(i)+Whole == Streamed}
			if usual, ok := p.Usual(); ok {
				s.Usual = usual
			}
			if since, silent := p.Silent(); silent {
				s.Since = since
			}
			if s.Usual > 0 || !s.Since.IsZero() {
				states = append(states, s)
			}
		}
	}
	return states
}
