package latency

import "time"

// Answers is whether a backend answers.
type Answers int

const (
	// No: it is silent, its last reply was late, a request waits for longer
	// than its threshold, or one was sent to it that has to be answered first.
	No Answers = iota
	// Perhaps: it was not tried lately, or it was slow, so one request may find
	// out.
	Perhaps
	// Yes: its last reply came within its threshold.
	Yes
)

// Answers reports whether the backend answers a request with this threshold.
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

// Claim takes the right to send a request that moves to the backend.
func (t *Tracker) Claim(now time.Time, threshold time.Duration) bool {
	last := t.trial.Load()
	switch t.Answers(now, threshold) {
	case Yes:
		return true
	case Perhaps:
		return t.trial.CompareAndSwap(last, momentOf(nanos(now), false))
	}
	return false
}
