package latency

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Table holds the trackers of a backend. The zero Table is ready to use.
// Reading it takes no lock.
type Table struct {
	uses atomic.Pointer[uses]
	mu   sync.Mutex // guards writing
}

// Use is an operation with a model, by the model's name at the backend.
// Operations are tracked separately: counting the tokens of a prompt, for
// example, is much faster than an answer, and may still work when nothing else
// does.
type Use struct{ Model, Operation string }

// uses is an immutable set of trackers.
type uses struct {
	trackers map[Use]*Tracker
	// first are the trackers of the first uses. Most backends have no more, and
	// comparing a few short names is faster than looking one up in a map.
	first []usedTracker
	// silences is the number of uses with a silence.
	silences *atomic.Int64
}

// usedTracker is the tracker of a use.
type usedTracker struct {
	use     Use
	tracker *Tracker
}

const (
	// maxUses is the maximum number of uses, because clients can name any
	// models.
	maxUses = 256
	// fewUses is the number of uses that are compared one by one.
	fewUses = 4
)

// Of returns the tracker of a use. It returns nil if the use is not tracked.
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

// Make returns the tracker of a use, and adds one if the use is not tracked
// yet. It returns nil if there are too many.
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

// AnySilent reports whether any use has a silence, which is rare.
func (t *Table) AnySilent() bool {
	known := t.uses.Load()
	return known != nil && known.silences.Load() > 0
}

// Clear removes all trackers. Requests that still wait keep the old trackers,
// which no longer affect other requests.
func (t *Table) Clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.uses.Store(nil)
}

// State is the state of a [Tracker], for operators.
type State struct {
	// Use is the operation and the model.
	Use
	// Whole and Streamed are the usual waits for the first byte of whole and of
	// streamed replies. If several kinds of request are known, it is that of
	// the slowest kind. Each is 0 if it is not known.
	Whole, Streamed time.Duration
	// Since is when the silence began. It is zero if there is no silence. Slow
	// reports whether first bytes come, but late.
	Since time.Time
	Slow  bool
	// Untried is when a request was last sent, if the backend was silent or
	// slow then, and no request has tried it for so long that its present state
	// is not known. Since is zero then.
	Untried time.Time
}

// untried is the time without requests after which the state of a silent
// backend counts as unknown. Only a request can end a silence, and an idle
// backend gets none. The next request may try the backend, because untried is
// longer than longestPause.
const untried = 45 * time.Second

// Snapshot returns the states of the trackers that know a usual wait or have a
// silence.
func (t *Table) Snapshot(now time.Time) (states []State) {
	known := t.uses.Load()
	if known == nil {
		return nil
	}
	for use, tracker := range known.trackers {
		s := State{Use: use, Whole: slowest(tracker.norms[:sizes], enough).Wait,
			Streamed: slowest(tracker.norms[sizes:], enough).Wait}
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
