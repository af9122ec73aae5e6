package pulse

import "time"

// Wait follows how long one request waits for the first byte of a reply. It implements
// attempt.Watch. The zero Wait follows nothing.
type Wait struct {
	waiter Waiter
	pulse  *Pulse
	factor float64
	sent   time.Time
	// took is how long the first byte took.
	took time.Duration
}

// Waiter is whose request waits. Its methods are called while the request waits, by a timer's
// goroutine, or by that of the request.
type Waiter interface {
	// Move reports whether the request goes on to a backend that answers. threshold is that of
	// the silent one.
	Move(threshold time.Duration, now time.Time) bool
	// Silence records that a silence began at since, or, with ended, that it has ended.
	Silence(since time.Time, ended bool)
}

// Begin makes the Wait follow a request that will be sent to the backend of p.
func (w *Wait) Begin(p *Pulse, waiter Waiter, factor float64) {
	*w = Wait{pulse: p, waiter: waiter, factor: factor}
}

// Sent implements attempt.Watch.
func (w *Wait) Sent(now time.Time) time.Duration {
	w.sent = now
	w.pulse.Sent(now)
	return w.pulse.FirstLook(w.factor)
}

// Unsent implements attempt.Watch.
func (w *Wait) Unsent() { w.pulse.Left(w.sent, w.sent) }

// Late implements attempt.Watch.
func (w *Wait) Late(now time.Time) time.Duration {
	found := w.pulse.Look(w.sent, now, w.factor)
	if found.Began {
		w.waiter.Silence(now, false)
	}
	if found.Moves && w.waiter.Move(found.Threshold, now) {
		return 0
	}
	return found.Again
}

// Heard implements attempt.Watch.
func (w *Wait) Heard(now time.Time) {
	w.took = now.Sub(w.sent)
	if since, ended := w.pulse.Heard(w.sent, now, w.factor); ended {
		w.waiter.Silence(since, true)
	}
}

// Left implements attempt.Watch.
func (w *Wait) Left(now time.Time) { w.pulse.Left(w.sent, now) }

// Served implements attempt.Watch.
func (w *Wait) Served() { w.pulse.Served(w.took) }
