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
func (p *Tracker) Answers(now time.Time, threshold time.Duration) Answers {
	at := nanos(now)
	waits, first := p.waiting.Load() > 0, p.answer.Load()
	heard := p.heard.since(at)
	silence := p.silent.Load()
	switch {
	case silence != 0 && (silence&flagged == 0 || !p.Due(now)), waits && first != 0 && at >= first:
		return No
	case silence != 0: // it is slow, and it is time to try it
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
func (p *Tracker) Claim(now time.Time, threshold time.Duration) bool {
	last := p.trial.Load()
	switch p.Answers(now, threshold) {
	case Yes:
		return true
	case Perhaps:
		return p.trial.CompareAndSwap(last, momentOf(nanos(now), false))
	}
	return false
}
