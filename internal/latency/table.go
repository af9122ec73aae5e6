package latency

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Table has the trackers of a backend, by uses. The zero Table is ready to use.
// Reading it takes no lock.
type Table struct {
	uses atomic.Pointer[uses]
	mu   sync.Mutex // guards writing
}

// Use is an operation with a model, by its name at the backend. To count the
// tokens of a prompt takes no part of the time that an answer takes, and may
// still work when nothing else does.
type Use struct{ Model, Operation string }

// uses are the trackers by uses. It never changes.
type uses struct {
	trackers map[Use]*Tracker
	// first are the trackers of the first uses. Most backends have no more, and
	// to compare a few short names takes less time than to look one up.
	first []usedTracker
	// silences is how many uses have a silence.
	silences *atomic.Int64
}

// usedTracker is the tracker of a use.
type usedTracker struct {
	use     Use
	tracker *Tracker
}

const (
	// maxUses is how many uses are followed, whatever models clients name.
	maxUses = 256
	// fewUses is how many of them are compared.
	fewUses = 4
)

// Of returns the tracker of a use, or nil if it is not followed.
func (t *Table) Of(use Use) *Tracker {
	known := t.uses.Load()
	if known == nil {
		return nil
	}
	for i := range known.first {
		if known.first[i].use == use {
			return known.first[i].tracker
		}
	}
	if len(known.first) < fewUses {
		return nil
	}
	return known.trackers[use]
}

// Make returns the tracker of a use, which is followed from now on. It returns
// nil if there are too many.
func (t *Table) Make(use Use) *Tracker {
	if tracker := t.Of(use); tracker != nil || t.full() {
		return tracker
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if tracker := t.Of(use); tracker != nil || t.full() { // another request was faster
		return tracker
	}
	next := &uses{trackers: make(map[Use]*Tracker), silences: new(atomic.Int64)}
	if known := t.uses.Load(); known != nil {
		maps.Copy(next.trackers, known.trackers)
		next.first, next.silences = slices.Clone(known.first), known.silences
	}
	use.Model, use.Operation = strings.Clone(use.Model), strings.Clone(use.Operation) // they are parts of a request
	tracker := &Tracker{silences: next.silences}
	if next.trackers[use] = tracker; len(next.first) < fewUses {
		next.first = append(next.first, usedTracker{use, tracker})
	}
	t.uses.Store(next)
	return tracker
}

func (t *Table) full() bool {
	known := t.uses.Load()
	return known != nil && len(known.trackers) >= maxUses
}

// AnySilent reports whether the backend is silent for any use, which is rare.
func (t *Table) AnySilent() bool {
	known := t.uses.Load()
	return known != nil && known.silences.Load() > 0
}

// Clear forgets all trackers. Requests that still wait have the old ones, which
// count for no request that comes later.
func (t *Table) Clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.uses.Store(nil)
}

// State is the state of a [Tracker], for operators.
type State struct {
	// Use is what the backend is used for.
	Use
	// Whole and Streamed are the usual waits for the first byte: of the kind
	// that waits longest, if several are known. 0: none is.
	Whole, Streamed time.Duration
	// Since is when the silence began. It is zero if there is none. Slow
	// reports whether bytes come, but late.
	Since time.Time
	Slow  bool
	// Untried is when a request was last sent, if the backend was silent or
	// slow then and none has tried it for so long that it is not known how it
	// is. Since is zero then.
	Untried time.Time
}

// untried is after how long without a request a silence says nothing any more:
// only a request can end it, and an idle backend gets none. The next request
// may try it, as one is due after longestPause.
const untried = 45 * time.Second

// Snapshot returns the states of all trackers that have been used.
func (t *Table) Snapshot(now time.Time) (states []State) {
	known := t.uses.Load()
	if known == nil {
		return nil
	}
	for use, tracker := range known.trackers {
		s := State{Use: use, Whole: slowest(tracker.norms[:sizes], enough).Wait, Streamed: slowest(tracker.norms[sizes:], enough).Wait}
		if silence := tracker.silent.Load(); silence != 0 {
			if tried := tracker.tried.Load(); tracker.waiting.Load() <= 0 && nanos(now)-tried > int64(untried) {
				s.Untried = began.Add(time.Duration(tried))
			} else {
				s.Since, s.Slow = sinceOf(silence), silence&flagged != 0
			}
		}
		if s.Whole > 0 || s.Streamed > 0 || tracker.silent.Load() != 0 {
			states = append(states, s)
		}
	}
	return states
}
