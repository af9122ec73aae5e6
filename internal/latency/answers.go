package latency

import "time"

// Answers says whether a backend answers in time.
type Answers int

const (
	// No means that the backend is silent, that its last reply was late, or
	// that a request has waited longer than its threshold. It also means that
	// another request is already trying the backend.
	No Answers = iota
	// Perhaps means that the backend was not tried lately, or that it was slow
	// and may be tried again. One request may find out.
	Perhaps
	// Yes means that the last reply came within its threshold.
	Yes
)

// Answers says whether the backend would answer a request with this threshold
// in time.
func (t *Tracker) Answers(now time.Time, threshold time.Duration) Answers {
	at := nanos(now)
	waits, first := t.waiting.Load() > 0, t.answer.Load()
	heard := t.heard.since(at)
	silence := t.silent.Load()
	switch {
	case silence != 0 && (silence&flagged == 0 || !t.Due(now)), waits && first != 0 && at >= first:
		return No
	case silence != 0: // it is slow, and it is time to try it
	case heard >= 0 && heard < lately:
		if t.heard.Load()&flagged != 0 {
			return No
		}
		return Yes
	}
	if trial := t.trial.since(at); waits || trial >= 0 && trial < threshold {
		return No
	}
	return Perhaps
}

// Claim reports whether a request may move to the backend. While it is not
// known whether the backend answers, it gives that right to one request. undo
// gives the right back. It is nil if none was taken.
func (t *Tracker) Claim(now time.Time, threshold time.Duration) (undo func(), ok bool) {
	last, claimed := t.trial.Load(), momentOf(nanos(now), false)
	switch t.Answers(now, threshold) {
	case Yes:
		return nil, true
	case Perhaps:
		if t.trial.CompareAndSwap(last, claimed) {
			return func() { t.trial.CompareAndSwap(claimed, last) }, true
		}
	}
	return nil, false
}
