// Package latency follows how fast backends answer, and finds those that accept
// requests and send nothing. It gets the time only from its arguments.
//
// A [Tracker] follows the requests of one operation with one model at one
// backend. What is [Usual] is known for each [Kind] of request, and the
// threshold of a request is a multiple of that, so a slow model has a long
// threshold and no option to set. Several requests that wait are better
// evidence than one: a silence begins when two requests have waited for longer
// than their thresholds, and no byte of any reply has come since the second of
// them was sent. A request whose client leaves before counts for the part of
// its threshold that it has waited, unless that is no long wait.
//
// A silence ends with the next byte that comes in time. A late one shows that
// the backend is only slow. One request after the other tries it, and a few
// have patience, each twice as long as the one before: so what has become usual
// at a slow backend is learned.
//
// Requests that wait may move from a silent backend to one that answers.
// Perhaps it is only these requests that take so long, so one of them leads:
// the others follow when it has got a byte within its threshold.
//
// The hot path takes no lock: a request that is sent costs an addition, and a
// byte a store.
package latency

import (
	"sync/atomic"
	"time"
)

const (
	// lately is for how long after a byte a backend counts as answering.
	lately = 30 * time.Second
	// A silent backend is tried after firstPause, and each further pause is
	// twice as long.
	firstPause   = time.Second
	longestPause = 16 * time.Second
	// A request with patience is sent after seldom times as long as the one
	// before waited.
	seldom = 16
	// A request that waits for longer than the threshold looks again after an
	// eighth of its wait, within these limits.
	soonestLook = 100 * time.Millisecond
	latestLook  = time.Second
)

// Tracker follows the requests of a use of a backend. The zero Tracker is ready
// to use.
type Tracker struct {
	norms [kinds]norm
	// waiting is how many requests wait.
	waiting atomic.Int64
	// heard is when the last byte came, and whether it came later than the
	// threshold.
	heard moment
	// answer is when the first of the requests that were sent since then has
	// waited for too long. 0: none waits.
	answer atomic.Int64
	// evidence is how many requests have waited for too long since then, in
	// parts of a request.
	evidence atomic.Int64
	// silent is when the silence was found, and whether the backend is slow
	// instead. While there is one, the next request that tries the backend is
	// due at due, and the one after it pause later.
	silent     moment
	due, pause atomic.Int64
	// tried is when a request was last sent during the silence, or, before one
	// was, when it began.
	tried atomic.Int64
	// late is how long the last late byte took.
	late atomic.Int64
	// patient is when the next request that is sent during the silence has more
	// patience than others, and patience is how long it waits.
	patient, patience atomic.Int64
	// lead is until when the request that leads the others has time for its
	// byte. 0: none leads. followed: it got the byte. leads is how many
	// requests led.
	lead, leads atomic.Int64
	// trial is when a request was last sent to find out whether the backend
	// answers.
	trial moment
	// silences counts those of the backend.
	silences *atomic.Int64
}

const (
	// one is the evidence of a request that has waited for its threshold.
	one = 1024
	// followed is a lead whose request got its byte in time.
	followed = -1
)

// began is the time from which times are counted. No time is 0.
var began = time.Now().Add(-time.Nanosecond)

func nanos(t time.Time) int64 { return int64(t.Sub(began)) }

// moment is a time with a flag. 0: none.
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

// since returns how long before at the moment was. It is negative if there is
// none.
func (m *moment) since(at int64) time.Duration {
	value := m.Load()
	if value == 0 {
		return -1
	}
	return max(0, time.Duration(at-value>>stateBits))
}

// Request is a request that waits at a backend.
type Request struct {
	Sent time.Time
	// Threshold is how long is too long for it. 0: it is not known.
	Threshold time.Duration

	// patience is how long it waits before it moves, if that is longer.
	patience time.Duration
	took     time.Duration
	Kind     Kind
	// counted reports whether it is evidence, and unusual whether a silence was
	// in force when its byte came.
	counted, unusual bool
}

// Change is what a [Tracker] has found out.
type Change struct {
	Happened Happening
	// Since is when the silence began.
	Since time.Time
}

// Happening is a kind of change.
type Happening int

const (
	Nothing Happening = iota
	// FellSilent: the backend sends nothing.
	FellSilent
	// BecameSlow: it sends something, but not in time.
	BecameSlow
	// Answered: it answers in time again.
	Answered
)

// Usual returns what is usual for requests of a kind.
func (t *Tracker) Usual(kind Kind) Usual { return t.norms[kind-1].get() }

// Slowest returns what is usual for the kind of request that waits longest.
func (t *Tracker) Slowest() Usual { return slowest(t.norms[:], 1) }

// slowest returns the longest of these waits that at least so many replies
// show.
func slowest(norms []norm, replies int64) (slowest Usual) {
	for i := range norms {
		if u := norms[i].get(); u.Replies >= replies && u.Wait >= slowest.Wait {
			slowest = u
		}
	}
	return slowest
}

// Sent records that a request is sent. It returns after how long it looks for
// the first time.
func (t *Tracker) Sent(r *Request) time.Duration {
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

// bePatient makes a request wait longer than its threshold before it moves, if
// it is time for that.
func (t *Tracker) bePatient(r *Request) {
	at, due, patience := nanos(r.Sent), t.patient.Load(), t.patience.Load()
	if at < due || !t.patient.CompareAndSwap(due, at+seldom*patience) {
		return
	}
	r.patience = time.Duration(patience)
	t.patience.Store(min(2*patience, int64(longestPause)))
}

// Unsent records that a request does not wait any more, which says nothing of
// the backend.
func (t *Tracker) Unsent() { t.waiting.Add(-1) }

// Heard records the first byte of a reply, whatever it says.
func (t *Tracker) Heard(r *Request, now time.Time) Change {
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

// Left records that a request got no byte, and does not wait any more. If it
// left before the longest usual wait was over, as editors cancel theirs while
// the user types, that proves nothing.
func (t *Tracker) Left(r *Request, now time.Time, longest time.Duration) Change {
	t.waiting.Add(-1)
	waited := now.Sub(r.Sent)
	if r.counted || r.Threshold == 0 || waited < longest {
		return Change{}
	}
	return t.testify(r, now, min(one, int64(one*waited/r.Threshold)))
}

// testify adds to the evidence, unless a byte has come since the request was
// sent, and begins the silence if that is enough.
func (t *Tracker) testify(r *Request, now time.Time, evidence int64) Change {
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

// beginSilence begins a silence, unless a byte has come since heard was read.
func (t *Tracker) beginSilence(r *Request, heard int64, now time.Time) Change {
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

// Served records that the reply whose first byte was heard has served the
// request.
func (t *Tracker) Served(r *Request) {
	t.norms[r.Kind-1].served(r.took, r.unusual)
}

// Finding is what a request that waits finds out.
type Finding struct {
	Change
	// Silent reports whether the request has waited for longer than its
	// threshold at a backend that sends nothing.
	Silent bool
	// Moves reports whether the request may go on to a backend that answers, if
	// it leads or follows. One that is silent for a request with patience does
	// not let it go yet.
	Moves bool
	// Again is after how long the request looks again.
	Again time.Duration
}

// Look finds out whether there is a silence. A request that still waits calls
// it at its threshold, and then again and again.
func (t *Tracker) Look(r *Request, now time.Time) (f Finding) {
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

// Lead reports whether a request may move: the others follow the one that
// leads. With Stay, it does not lead.
func (t *Tracker) Lead(r *Request, now time.Time) bool {
	until, at := t.lead.Load(), nanos(now)
	if until == followed {
		return true
	}
	return (until == 0 || at >= until) && t.lead.CompareAndSwap(until, at+int64(r.Threshold)<<min(max(0, t.leads.Add(1)-1), 16)) // a silence that begins makes leads 0
}

// Stay records that there is no backend to which the request could lead others.
func (t *Tracker) Stay() {
	if until := t.lead.Load(); until != followed && t.lead.CompareAndSwap(until, 0) {
		t.leads.Add(-1)
	}
}

// Follow lets the other requests follow: one that has moved got a byte in time.
func (t *Tracker) Follow() { t.lead.Store(followed) }

// Silent returns since when the backend is silent or slow. It reports false if
// the backend is neither.
func (t *Tracker) Silent() (since time.Time, silent bool) {
	value := t.silent.Load()
	return sinceOf(value), value != 0
}

// IsSilent reports whether the backend is silent or slow.
func (t *Tracker) IsSilent() bool { return t.silent.Load() != 0 }

// Due reports whether a request may try the silent backend.
func (t *Tracker) Due(now time.Time) bool { return nanos(now) >= t.due.Load() }

// Try reports whether the request may be sent: it is the one that tries the
// silent backend, or the silence has ended.
func (t *Tracker) Try(now time.Time) bool {
	due, at := t.due.Load(), nanos(now)
	if t.silent.Load() == 0 {
		return true
	}
	pause := t.pause.Load()
	if at < due || !t.due.CompareAndSwap(due, at+pause) {
		return false
	}
	t.pause.Store(min(2*pause, int64(longestPause)))
	return true
}
