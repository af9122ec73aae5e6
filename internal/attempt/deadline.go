package attempt

import (
	"context"
	"sync"
	"time"
)

// A deadline limits each step of an attempt: the wait for the reply, then each
// read of the body. start begins a step, and stop ends it. A step that takes
// too long is cancelled. Most steps are short, and there are many, so the timer
// is not stopped and set again for each. It goes off too early instead, and
// then looks how long it has to wait. After the last step, end stops it.
//
// While a step takes long, a watch may be asked whether to give it up before
// its time is over. Between the steps, the deadline can measure whether the
// client keeps the reply waiting.
//
// All times are durations since the first step.
type deadline struct {
	// cancel ends what is not in time.
	cancel context.CancelCauseFunc

	mu    sync.Mutex
	born  time.Time // of the first step
	timer *time.Timer
	// goesOff is when the timer goes off. It is 0 if that is not set.
	goesOff time.Duration
	until   time.Duration
	limit   time.Duration
	reason  error // nil if no step is limited
	// expired is why the time is over. It is nil if all steps were in time.
	expired error

	// watch is asked at look whether to give up before until. It may be nil.
	// look is 0 until the request is sent, or while its upload stalls, which
	// stalled reports.
	watch   Watch
	look    time.Duration
	stalled bool

	// measures reports whether the time between steps is measured. began and
	// ended are of the last step, and lag is how much longer the client took
	// than the backend.
	measures     bool
	began, ended time.Duration
	lag          time.Duration
}

// now is the time since the first step. The caller holds the lock.
func (d *deadline) now() time.Duration {
	if d.born.IsZero() {
		d.born = time.Now()
	}
	return time.Since(d.born)
}

// start begins a step, which may take so long from now.
func (d *deadline) start(limit time.Duration, reason error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.limit, d.reason = limit, reason
	now := d.now()
	if d.measures {
		d.lag += now - d.ended
		d.began = now
	}
	d.until = now + limit
	d.set(now)
}

// uploadStall is how long the upload of a long body may pause. If it pauses for
// longer, it counts as over: the request waits for the backend.
const uploadStall = 2 * time.Second

// watched makes w be asked after that time, from now on, while a step takes
// long. If it is 0, the request is not sent yet.
func (d *deadline) watched(w Watch, after time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.watch = w; after > 0 {
		d.look = d.now() + after
	}
}

// sent records that a request is sent now that was not when it was watched,
// unless its reply has come.
func (d *deadline) sent() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stalled = false; d.watch != nil && d.look == 0 && d.reason != nil {
		now := d.now()
		d.look = now + d.watch.Sent(time.Now())
		d.set(now)
	}
}

// set makes the timer go off in time, or earlier.
func (d *deadline) set(now time.Duration) {
	at := max(now, d.next())
	if d.goesOff > 0 && d.goesOff <= at {
		return
	}
	d.goesOff = max(at, 1)
	if d.timer == nil {
		d.timer = time.AfterFunc(at-now, d.wake)
	} else {
		d.timer.Reset(at - now)
	}
}

// unwatched stops the watch and returns it, or nil. It reports whether the
// request was sent.
func (d *deadline) unwatched() (w Watch, sent bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w, d.watch = d.watch, nil
	return w, d.look > 0
}

// refused records that the backend has refused to accept the request. So it is
// not silent, and the watch ends.
func (d *deadline) refused() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.watch != nil && d.look > 0 {
		d.watch.Unsent()
	}
	d.watch = nil
}

// heard records that the first byte of the reply has come.
func (d *deadline) heard() {
	w, sent := d.unwatched()
	if w == nil {
		return
	}
	now := time.Now()
	if !sent {
		w.Sent(now)
	}
	w.Heard(now)
}

// next returns when the timer has to go off.
func (d *deadline) next() time.Duration {
	switch {
	case d.watch == nil:
		return d.until
	case d.look == 0:
		return min(d.until, d.until-d.limit+uploadStall)
	}
	return min(d.until, d.look)
}

// Extend gives the step as long again. An upload that had stalled goes on: its
// request does not wait any more.
func (d *deadline) Extend() {
	d.mu.Lock()
	defer d.mu.Unlock()
	goesOn := d.stalled && d.watch != nil
	if goesOn {
		d.watch.Unsent()
		d.look, d.stalled = 0, false
	}
	if d.reason != nil {
		now := d.now()
		if d.until = now + d.limit; goesOn {
			d.set(now) // it may stall again long before the timer goes off
		}
	}
}

// stop ends the step. It reports whether all steps were in time.
func (d *deadline) stop() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reason = nil
	if d.measures {
		d.ended = d.now()
		d.lag = max(0, d.lag-(d.ended-d.began))
	}
	return d.expired == nil
}

// why returns why the time is over. It is nil if all steps were in time.
func (d *deadline) why() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.expired
}

// measure begins to measure the time between the steps. It ends with end.
func (d *deadline) measure() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.measures, d.ended = true, d.now()
}

// lagging returns the lag: it grows while the client does not read, and shrinks
// by the time that reads wait for the backend. Reads that need not wait,
// because the backend sent in the pause, do not shrink it.
func (d *deadline) lagging() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lag
}

// end ends the step, and stops the timer until another one begins.
func (d *deadline) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reason, d.measures = nil, false; d.goesOff > 0 {
		d.timer.Stop()
		d.goesOff = 0
	}
}

// asleep is how late a timer goes off if this process did not run: it was
// suspended, or has no CPU. Replies that came meanwhile are read first, before
// a watch is asked.
const asleep = 100 * time.Millisecond

// wake finds out whether the step takes too long. The timer calls it, perhaps
// just when the step has ended.
func (d *deadline) wake() {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.now()
	late := now - d.goesOff
	if d.goesOff = 0; d.reason == nil {
		return
	}
	switch {
	case d.watch == nil || d.next() > now || d.until <= now:
	case d.look == 0:
		d.look, d.stalled = now+d.watch.Sent(time.Now()), true
	case late >= asleep:
		d.look = now + asleep
	default:
		again := d.watch.Late(time.Now())
		if again <= 0 {
			d.expire(ErrSilent)
			return
		}
		d.look = now + again
	}
	if d.next() > now {
		d.set(now)
		return
	}
	d.expire(d.reason)
}

// expire ends what is not in time. The caller holds the lock.
func (d *deadline) expire(reason error) {
	d.expired, d.reason = reason, nil
	d.cancel(reason)
}
