// Package pulse follows how fast backends answer, and finds those that accept requests and send
// nothing. It gets the time only from its arguments. [Choose] chooses a backend by its [FirstByte].
//
// A [Pulse] follows the waits for the first byte of replies of one backend, for one model and one
// [Kind] of request. Several requests that wait together are better evidence than one: a pulse is
// silent when two or more requests have waited for longer than its threshold, and no byte of any
// reply has come since the second of them was sent. The threshold is a multiple of the usual wait,
// and at least the longest recent one, so a slow model has a long threshold and no option to set.
//
// A silence is found by a request that waits, see [Pulse.Look], and ends with the next byte. A client
// that leaves ends nothing. While no request waits, the time does not count.
//
// The hot path takes no lock: a request that is sent costs a compare-and-swap, and a byte a store.
package pulse

import (
	"sync/atomic"
	"time"
)

const (
	// shortest is the shortest threshold.
	shortest = 500 * time.Millisecond
	// enough is how many samples a threshold needs.
	enough = 10
	// lately is for how long after a byte a pulse counts as answering.
	lately = 30 * time.Second
	// A silent backend is tried after firstPause, and each further pause is twice as long.
	firstPause   = time.Second
	longestPause = 16 * time.Second
	// A request that waits for longer than the threshold looks again after an eighth of its wait,
	// within these limits.
	soonestLook = 100 * time.Millisecond
	latestLook  = time.Second
)

// Pulse follows the waits at a backend. The zero Pulse is ready to use.
type Pulse struct {
	// waits is 0 if no request was sent since the last byte. Otherwise it is a time and one of
	// oneWaits, twoWait and paused.
	waits atomic.Int64
	// first is when the first request since the last byte was sent.
	first atomic.Int64
	// waiting is how many requests wait.
	waiting atomic.Int64
	// heard is when the last byte came, and whether it came later than the threshold.
	heard moment
	// usual is the moving average of the waits, longest falls slowly from the longest one, and
	// samples is how many there were, up to enough.
	usual, longest, samples atomic.Int64
	// silent is when the silence was found. While there is one, the next request that tries the
	// backend is due at due, and the one after it pause later.
	silent     moment
	due, pause atomic.Int64
	// trial is when a request was last sent to find out whether the backend answers.
	trial moment
	// silences counts those of the backend.
	silences *atomic.Int64
}

// The states of waits, in its lowest bits. The time above them is when the first request was sent,
// when the second one was sent, or, if no request waits at the moment, for how long the two waited.
const (
	oneWaits = iota + 1
	twoWait
	paused

	stateBits = 2
	stateMask = 1<<stateBits - 1
)

// began is the time from which times are counted. No time is 0.
var began = time.Now().Add(-time.Nanosecond)

func nanos(t time.Time) int64 { return int64(t.Sub(began)) }

// moment is a time with a flag. 0: none.
type moment struct{ atomic.Int64 }

const (
	known   = 1
	flagged = 2
)

func momentOf(at int64, flag bool) int64 {
	if flag {
		return at<<stateBits | known | flagged
	}
	return at<<stateBits | known
}

// since returns how long before at the moment was. It is negative if there is none.
func (m *moment) since(at int64) time.Duration {
	value := m.Load()
	if value == 0 {
		return -1
	}
	return max(0, time.Duration(at-value>>stateBits))
}

// Sent records that a request is sent.
func (p *Pulse) Sent(now time.Time) {
	p.waiting.Add(1)
	at := nanos(now)
	for {
		w := p.waits.Load()
		switch w & stateMask {
		case twoWait:
			return
		case oneWaits:
			if p.waits.CompareAndSwap(w, at<<stateBits|twoWait) {
				return
			}
		case paused:
			if p.waits.CompareAndSwap(w, (at-w>>stateBits)<<stateBits|twoWait) {
				return
			}
		default:
			if p.waits.CompareAndSwap(0, at<<stateBits|oneWaits) {
				p.first.Store(at)
				return
			}
		}
	}
}

// Heard records the first byte of a reply, whatever it says, to a request that was sent at sent. It
// returns when the silence began that this ends, if there was one.
func (p *Pulse) Heard(sent, now time.Time, factor float64) (since time.Time, ended bool) {
	p.waiting.Add(-1)
	threshold, ok := p.Threshold(factor)
	p.heard.Store(momentOf(nanos(now), ok && now.Sub(sent) > threshold))
	p.waits.Store(0)
	if p.silent.Load() == 0 {
		return time.Time{}, false
	}
	return p.endSilence()
}

func (p *Pulse) endSilence() (since time.Time, ended bool) {
	value := p.silent.Swap(0)
	if value == 0 {
		return time.Time{}, false
	}
	if p.silences != nil {
		p.silences.Add(-1)
	}
	return began.Add(time.Duration(value >> stateBits)), true
}

// Left records that a request does not wait any more, and got no byte. That proves nothing, so the
// others are still evidence. If it was the last one, the clock stops until the next request. A
// request that left before the longest recent wait was over, as editors cancel theirs while the user
// types, is no evidence itself.
func (p *Pulse) Left(sent, now time.Time) {
	others := p.waiting.Add(-1)
	if p.silent.Load() != 0 {
		return
	}
	early := now.Sub(sent) < time.Duration(p.longest.Load())
	w := p.waits.Load()
	switch since, state := w>>stateBits, w&stateMask; {
	case state == oneWaits && early && (since == nanos(sent) || others <= 0):
		p.waits.CompareAndSwap(w, 0)
	case state == twoWait && early && others <= 1:
		p.waits.CompareAndSwap(w, p.first.Load()<<stateBits|oneWaits)
	case state == twoWait && others <= 0:
		p.waits.CompareAndSwap(w, (nanos(now)-since)<<stateBits|paused)
	}
}

// Served records the wait for the first byte of a reply that served its request. Requests that do so
// at the same moment may overwrite each other's sample, which changes little.
func (p *Pulse) Served(wait time.Duration) {
	n := p.samples.Load()
	if n < enough {
		n++
		p.samples.Store(n)
	}
	usual := p.usual.Load()
	p.usual.Store(usual + (int64(wait)-usual)/n)
	longest := p.longest.Load()
	p.longest.Store(max(int64(wait), longest-longest/128))
}

// Usual returns the usual wait for the first byte. It reports false while too few replies are known.
func (p *Pulse) Usual() (time.Duration, bool) {
	return time.Duration(p.usual.Load()), p.samples.Load() >= enough
}

// Threshold returns how long a wait must be to be longer than usual. It reports false while that is
// not known.
func (p *Pulse) Threshold(factor float64) (time.Duration, bool) {
	usual, ok := p.Usual()
	return max(shortest, time.Duration(factor*float64(usual)), time.Duration(p.longest.Load())), ok
}

// Finding is what a request that waits finds out.
type Finding struct {
	// Began reports whether the silence was found just now.
	Began bool
	// Moves reports whether the request may go on to a backend that answers: there is a silence,
	// and the request has waited for longer than Threshold.
	Moves     bool
	Threshold time.Duration
	// Again is after how long the request looks again.
	Again time.Duration
}

// Look finds out whether there is a silence. A request that was sent at sent, and still waits, calls
// it at the threshold and then again and again.
func (p *Pulse) Look(sent, now time.Time, factor float64) (f Finding) {
	var ok bool
	if f.Threshold, ok = p.Threshold(factor); !ok {
		f.Again = latestLook
		return f
	}
	at, waited := nanos(now), now.Sub(sent)
	w := p.waits.Load()
	two, lasts := w&stateMask == twoWait, time.Duration(at-w>>stateBits)
	if two && lasts >= f.Threshold {
		f.Began = p.beginSilence(w, at)
	}
	f.Again = min(max(waited/8, soonestLook), latestLook)
	switch {
	case p.silent.Load() != 0:
		f.Moves = waited >= f.Threshold
		f.Again = max(f.Again, f.Threshold-waited)
	case two && lasts < f.Threshold:
		f.Again = f.Threshold - lasts
	}
	return f
}

// beginSilence begins a silence, unless a byte has come since w was read.
func (p *Pulse) beginSilence(w, at int64) (began bool) {
	if p.silent.Load() != 0 {
		return false
	}
	p.pause.Store(int64(2 * firstPause))
	p.due.Store(at + int64(firstPause))
	if !p.silent.CompareAndSwap(0, momentOf(at, false)) {
		return false
	}
	if p.silences != nil {
		p.silences.Add(1)
	}
	if p.waits.Load() != w {
		p.endSilence()
		return false
	}
	return true
}

// FirstLook returns how long after it was sent a request looks for the first time.
func (p *Pulse) FirstLook(factor float64) time.Duration {
	if threshold, ok := p.Threshold(factor); ok {
		return threshold
	}
	return latestLook
}

// Silent returns since when the pulse is silent. It reports false if it is not.
func (p *Pulse) Silent() (since time.Time, silent bool) {
	value := p.silent.Load()
	return began.Add(time.Duration(value >> stateBits)), value != 0
}

// IsSilent reports whether the pulse is silent.
func (p *Pulse) IsSilent() bool { return p.silent.Load() != 0 }

// Due reports whether a request may try the silent backend.
func (p *Pulse) Due(now time.Time) bool { return nanos(now) >= p.due.Load() }

// Try reports whether the request may be sent: it is the one that tries the silent backend, or the
// silence has ended.
func (p *Pulse) Try(now time.Time) bool {
	due, at := p.due.Load(), nanos(now)
	if p.silent.Load() == 0 {
		return true
	}
	pause := p.pause.Load()
	if at < due || !p.due.CompareAndSwap(due, at+pause) {
		return false
	}
	p.pause.Store(min(2*pause, int64(longestPause)))
	return true
}

// Answers is whether a backend answers.
type Answers int

const (
	// No: it is silent, its last reply was late, a request waits for longer than its threshold, or
	// one was sent to it that has to be answered first.
	No Answers = iota
	// Perhaps: it was not tried lately, so one request may find out.
	Perhaps
	// Yes: its last reply came within its threshold.
	Yes
)

// Answers reports whether the backend answers. fallback is the threshold while its own is not known.
func (p *Pulse) Answers(now time.Time, factor float64, fallback time.Duration) Answers {
	at := nanos(now)
	threshold, ok := p.Threshold(factor)
	if !ok {
		threshold = fallback
	}
	waits := p.waits.Load() != 0 && p.waiting.Load() > 0
	heard := p.heard.since(at)
	switch {
	case p.silent.Load() != 0, waits && time.Duration(at-p.first.Load()) >= threshold:
		return No
	case heard >= 0 && heard < lately:
		if p.heard.Load()&flagged != 0 {
			return No
		}
		return Yes
	}
	if trial := p.trial.since(at); waits || trial >= 0 && trial < threshold {
		return No
	}
	return Perhaps
}

// Claim takes the right to send a request that moves to the backend.
func (p *Pulse) Claim(now time.Time, factor float64, fallback time.Duration) bool {
	last := p.trial.Load()
	switch p.Answers(now, factor, fallback) {
	case Yes:
		return true
	case Perhaps:
		return p.trial.CompareAndSwap(last, momentOf(nanos(now), false))
	}
	return false
}
