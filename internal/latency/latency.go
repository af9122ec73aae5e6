// Package latency tracks how fast backends answer, and finds backends that
// accept requests and send nothing. It gets the time only from its arguments.
//
// A [Tracker] tracks the requests of one operation with one model at one
// backend. It learns the [Usual] wait for the first byte of each [Kind] of
// request. The threshold of a request is a multiple of its usual wait, so a
// slow model has a long threshold, and no option is needed.
//
// Several waiting requests are better evidence than one. A silence begins when
// two requests have waited longer than their thresholds, both of which were
// sent after the last first byte of any reply. A request whose client leaves
// before the threshold is weaker evidence: after 60 % of the threshold, it
// counts as 0.6 of a request. It counts as nothing if it waited for less than
// the longest usual wait, because editors cancel requests while a user types.
//
// A silence ends with the next first byte that comes in time. A late one shows
// that the backend is only slow. During a silence, one request at a time tries
// the backend. A few of these have patience: they wait longer before they move,
// each twice as long as the one before. So the tracker learns if a longer wait
// has become usual.
//
// Waiting requests may move from a silent backend to one that answers. But
// perhaps it is these requests that take so long, and not the backend. So one
// of them moves first, as the leader. The others follow if it gets its first
// byte within its threshold.
//
// [Tracker] and [Table] are safe for concurrent use. The common case takes no
// lock: sending a request costs an atomic addition, and a first byte costs an
// atomic store. A [Wait] belongs to one request.
package latency

import (
	"sync/atomic"
	"time"
)

const (
	// lately is how long after a first byte a backend counts as answering.
	lately = 30 * time.Second
	// firstPause is the time from the beginning of a silence to the first
	// request that tries the backend. Each further pause is twice as long, up
	// to longestPause.
	firstPause   = time.Second
	longestPause = 16 * time.Second
	// seldom is the time between two requests with patience, as a multiple of
	// the earlier one's patience.
	seldom = 16
	// A request that has waited longer than its threshold looks again after an
	// eighth of its wait, but within these limits.
	soonestLook = 100 * time.Millisecond
	latestLook  = time.Second
)

// Tracker tracks the waits of one operation with one model at a backend. The
// zero Tracker is ready to use.
type Tracker struct {
	norms [kinds]norm
	// waiting is the number of waiting requests.
	waiting atomic.Int64
	// heard is when the last first byte came. It is flagged if that was later
	// than the request's threshold.
	heard moment
	// answer is the earliest time at which a request that was sent after heard
	// reaches its threshold. It is 0 if there is no such request.
	answer atomic.Int64
	// evidence is how many requests have waited too long since heard, in
	// fractions of a request: see one.
	evidence atomic.Int64
	// silent is when the silence was found. It is flagged if the backend is
	// only slow. During a silence, due is when the next request may try the
	// backend, and pause is the time to the one after it.
	silent     moment
	due, pause atomic.Int64
	// tried is when a request was last sent during the silence. Before the
	// first one, it is when the silence began.
	tried atomic.Int64
	// late is how long the last late first byte took.
	late atomic.Int64
	// patient is when the next request that is sent during the silence gets
	// more patience than others. patience is how long that request waits.
	patient, patience atomic.Int64
	// lead is the time by which the leader must get its first byte. It is 0 if
	// there is no leader, and followed if a leader has got the byte in time.
	// leads is how many requests have led in this silence.
	lead, leads atomic.Int64
	// trial is when a request was last moved to the backend to find out whether
	// it answers.
	trial moment
	// silences counts the silences of the backend. All trackers of a table
	// share it.
	silences *atomic.Int64
}

const (
	// one is the evidence of a request that has waited for its whole threshold.
	one = 1024
	// followed is the value of lead after the leader got its first byte in
	// time.
	followed = -1
)

// began is the origin of all times. It is in the past, so that no time is 0.
var began = time.Now().Add(-time.Nanosecond)

func nanos(t time.Time) int64 { return int64(t.Sub(began)) }

// moment is a time with a flag. It is 0 if there is no time.
type moment struct{ atomic.Int64 }

const (
	known   = 1
	flagged = 2

	stateBits = 2
)

func momentOf(at int64, flag bool) int64 {
	if flag {
		return at<<stateBits | known | flagged
	}
	return at<<stateBits | known
}

// since returns the time from the moment to at. It is negative if there is no
// moment.
func (m *moment) since(at int64) time.Duration {
	value := m.Load()
	if value == 0 {
		return -1
	}
	return max(0, time.Duration(at-value>>stateBits))
}

// Wait is the state of a request while it waits at a backend.
type Wait struct {
	Sent time.Time
	// Threshold is the wait from which on the request has waited too long. It
	// is 0 if that is not known.
	Threshold time.Duration

	// patience is how long the request waits before it moves, if that is longer
	// than the threshold.
	patience time.Duration
	took     time.Duration
	Kind     Kind
	// counted reports whether the request was counted as evidence. unusual
	// reports whether there was a silence when its first byte came.
	counted, unusual bool
}

// Change is a change that a [Tracker] has found.
type Change struct {
	Happened Happening
	// Since is when the silence began.
	Since time.Time
}

// Happening is a kind of change.
type Happening int

const (
	Nothing Happening = iota
	// FellSilent means that the backend sends nothing.
	FellSilent
	// BecameSlow means that the silent backend answers, but late.
	BecameSlow
	// Answered means that the silent or slow backend answers in time again.
	Answered
)

// Usual returns the usual wait for requests of a kind.
func (t *Tracker) Usual(kind Kind) Usual { return t.norms[kind-1].get() }

// Slowest returns the usual wait of the kind of request that waits longest.
func (t *Tracker) Slowest() Usual { return slowest(t.norms[:], 1) }

// slowest returns the longest usual wait among norms with at least this many
// replies.
func slowest(norms []norm, replies int64) (slowest Usual) {
	for i := range norms {
		if u := norms[i].get(); u.Replies >= replies && u.Wait >= slowest.Wait {
			slowest = u
		}
	}
	return slowest
}

// Sent records that a request is sent. It returns the time after which the
// request should call Look for the first time.
func (t *Tracker) Sent(r *Wait) time.Duration {
	t.waiting.Add(1)
	if r.Threshold == 0 {
		return latestLook
	}
	if t.silent.Load() != 0 {
		t.tried.Store(nanos(r.Sent))
		t.bePatient(r)
	}
	if by, first := nanos(r.Sent)+int64(r.Threshold), t.answer.Load(); first == 0 || by < first {
		t.answer.CompareAndSwap(first, by)
	}
	return r.Threshold
}

// bePatient gives the request patience, if the next request with patience is
// due.
func (t *Tracker) bePatient(r *Wait) {
	at, due, patience := nanos(r.Sent), t.patient.Load(), t.patience.Load()
	if at < due || !t.patient.CompareAndSwap(due, at+seldom*patience) {
		return
	}
	r.patience = time.Duration(patience)
	t.patience.Store(min(2*patience, int64(longestPause)))
}

// Unsent records that a request stops waiting for a reason that says nothing
// about the backend.
func (t *Tracker) Unsent() { t.waiting.Add(-1) }

// Heard records the first byte of any reply to a request.
func (t *Tracker) Heard(r *Wait, now time.Time) Change {
	t.waiting.Add(-1)
	r.took = now.Sub(r.Sent)
	late := r.Threshold > 0 && r.took > r.Threshold
	at := nanos(now)
	if late {
		t.late.Store(int64(r.took))
	}
	t.heard.Store(momentOf(at, late))
	t.answer.Store(0)
	if t.evidence.Load() != 0 {
		t.evidence.Store(0)
	}
	silence := t.silent.Load()
	switch r.unusual = silence != 0; {
	case !r.unusual:
	case !late:
		return t.endSilence()
	case silence&flagged == 0 && t.silent.CompareAndSwap(silence, silence|flagged):
		t.due.Store(at) // it may be back
		t.pause.Store(int64(firstPause))
		return Change{BecameSlow, sinceOf(silence)}
	}
	return Change{}
}

func sinceOf(silence int64) time.Time { return began.Add(time.Duration(silence >> stateBits)) }

func (t *Tracker) endSilence() Change {
	silence := t.silent.Swap(0)
	if silence == 0 {
		return Change{}
	}
	if t.silences != nil {
		t.silences.Add(-1)
	}
	return Change{Answered, sinceOf(silence)}
}

// Left records that a request stops waiting without a first byte, because its
// client has left. If it has waited less than longest, the longest usual wait,
// that is no evidence: editors cancel requests while the user types.
func (t *Tracker) Left(r *Wait, now time.Time, longest time.Duration) Change {
	t.waiting.Add(-1)
	waited := now.Sub(r.Sent)
	if r.counted || r.Threshold == 0 || waited < longest {
		return Change{}
	}
	return t.testify(r, now, min(one, int64(one*waited/r.Threshold)))
}

// testify adds to the evidence, unless a first byte has come since the request
// was sent. If there is enough evidence, it begins the silence.
func (t *Tracker) testify(r *Wait, now time.Time, evidence int64) Change {
	heard := t.heard.Load()
	if nanos(r.Sent) < heard>>stateBits && heard != 0 {
		return Change{}
	}
	r.counted = true
	if t.evidence.Add(evidence) >= 2*one {
		return t.beginSilence(r, heard, now)
	}
	return Change{}
}

// beginSilence begins a silence, unless a first byte has come since heard was
// read.
func (t *Tracker) beginSilence(r *Wait, heard int64, now time.Time) Change {
	if t.silent.Load() != 0 {
		return Change{}
	}
	at := nanos(now)
	t.pause.Store(int64(2 * firstPause))
	t.due.Store(at + int64(firstPause))
	t.patient.Store(at + int64(seldom*r.Threshold))
	t.patience.Store(int64(2 * r.Threshold))
	t.lead.Store(0)
	t.leads.Store(0)
	t.tried.Store(at)
	if !t.silent.CompareAndSwap(0, momentOf(at, false)) {
		return Change{}
	}
	if t.silences != nil {
		t.silences.Add(1)
	}
	if t.heard.Load() != heard {
		t.endSilence()
		return Change{}
	}
	return Change{FellSilent, now}
}

// Served records that the backend has served the request, so that its wait
// counts towards the usual wait. Heard must have been called before.
func (t *Tracker) Served(r *Wait) {
	t.norms[r.Kind-1].served(r.took, r.unusual)
}

// Finding is the result of [Tracker.Look].
type Finding struct {
	Change
	// Silent reports whether the request has waited longer than its threshold
	// at a silent backend.
	Silent bool
	// Moves reports whether the request may move to another backend, if it
	// leads or follows. A request with patience may not until its patience is
	// over.
	Moves bool
	// Again is the time after which the request should look again.
	Again time.Duration
}

// Look checks whether the backend is silent. A waiting request calls it at its
// threshold, and then repeatedly.
func (t *Tracker) Look(r *Wait, now time.Time) (f Finding) {
	waited := now.Sub(r.Sent)
	if r.Threshold == 0 || waited < r.Threshold {
		f.Again = min(latestLook, max(soonestLook, r.Threshold-waited))
		return f
	}
	if !r.counted {
		f.Change = t.testify(r, now, one)
	}
	f.Again = min(max(waited/8, soonestLook), latestLook)
	switch silence := t.silent.Load(); {
	case silence == 0:
	case silence&flagged == 0:
		f.Silent, f.Moves = true, waited >= r.patience
	case waited >= max(r.patience, 2*time.Duration(t.late.Load())) && t.heard.Load()>>stateBits <= nanos(r.Sent) &&
		t.silent.CompareAndSwap(silence, silence&^flagged):
		f.Change = Change{FellSilent, sinceOf(silence)}
	}
	return f
}

// Lead reports whether the request may move: as the leader, if there is none,
// or as a follower, if the leader has got its first byte in time. If the
// request finds no backend to move to, it must call Stay.
func (t *Tracker) Lead(r *Wait, now time.Time) bool {
	until, at := t.lead.Load(), nanos(now)
	if until == followed {
		return true
	}
	// a silence that begins makes leads 0
	return (until == 0 || at >= until) &&
		t.lead.CompareAndSwap(until, at+int64(r.Threshold)<<min(max(0, t.leads.Add(1)-1), 16))
}

// Stay records that the leader stays, because it has found no backend to move
// to.
func (t *Tracker) Stay() {
	if until := t.lead.Load(); until != followed && t.lead.CompareAndSwap(until, 0) {
		t.leads.Add(-1)
	}
}

// Follow records that the leader got its first byte in time, so that the other
// requests may follow.
func (t *Tracker) Follow() { t.lead.Store(followed) }

// Silent returns since when the backend is silent or slow. silent is false if
// the backend is neither.
func (t *Tracker) Silent() (since time.Time, silent bool) {
	value := t.silent.Load()
	return sinceOf(value), value != 0
}

// IsSilent reports whether the backend is silent or slow.
func (t *Tracker) IsSilent() bool { return t.silent.Load() != 0 }

// Due reports whether a request may try the silent backend now.
func (t *Tracker) Due(now time.Time) bool { return nanos(now) >= t.due.Load() }

// Try reports whether a request may be sent to the backend: the silence has
// ended, or the request becomes the next one that tries the backend. undo gives
// that right back. It is nil if none was taken.
func (t *Tracker) Try(now time.Time) (undo func(), ok bool) {
	due, at := t.due.Load(), nanos(now)
	if t.silent.Load() == 0 {
		return nil, true
	}
	pause := t.pause.Load()
	next := at + pause
	if at < due || !t.due.CompareAndSwap(due, next) {
		return nil, false
	}
	t.pause.Store(min(2*pause, int64(longestPause)))
	return func() {
		if t.due.CompareAndSwap(next, due) {
			t.pause.Store(pause)
		}
	}, true
}
