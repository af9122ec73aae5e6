package attempt

import (
	"context"
	"sync"
	"time"
)

// deadline limits each step of an attempt: the wait for the reply, then each
// read of the body. start begins a step, and stop ends it. A step that takes
// too long is cancelled.
//
// Most steps are short, and there are many, so the timer is not set again for
// each. Instead it keeps its old time, fires too early, and is then set to the
// time that remains. end stops it after the last step.
//
// While a step takes long, a Watch may be asked whether to give it up early.
// Between the steps, the deadline can measure how long the client keeps the
// reply waiting.
//
// All times are durations since the first step.
type deadline struct {
	// cancel cancels the attempt when a step takes too long.
	cancel context.CancelCauseFunc

	mu    sync.Mutex
	born  time.Time // of the first step
	timer *time.Timer
	// goesOff is when the timer fires. It is 0 if the timer is not set.
	goesOff time.Duration
	until   time.Duration
	limit   time.Duration
	reason  error // nil if no step is limited
	// expired is the reason of the step that took too long. It is nil if all
	// steps were in time.
	expired error

	// watch is asked at the time look whether to give up before until. It may
	// be nil. look is 0 until the request is sent. stalled reports whether look
	// was set because the upload stalled.
	watch   Watch
	look    time.Duration
	stalled bool

	// measures reports whether the time between steps is measured. began and
	// ended are the times of the last step, and lag is how much longer the
	// client took than the backend.
	measures     bool
	began, ended time.Duration
	lag          time.Duration
}

// now returns the time since the first step. The caller holds the lock.
func (d *deadline) now() time.Duration {
	if d.born.IsZero() {
		d.born = time.Now()
	}
	return time.Since(d.born)
}

// start begins a step that may take as long as limit. If it takes longer, the
// attempt is cancelled for reason.
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

// uploadStall is how long the upload of a long body may pause. After a longer
// pause, the request counts as sent and waiting for the backend.
const uploadStall = 2 * time.Second

// watched sets the Watch, which is first asked after this time. after is 0 if
// the request is not sent yet.
func (d *deadline) watched(w Watch, after time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.watch = w; after > 0 {
		d.look = d.now() + after
	}
}

// sent records that a request that was not sent when it was watched is sent
// now. It does nothing if the reply has arrived.
func (d *deadline) sent() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stalled = false; d.watch != nil && d.look == 0 && d.reason != nil {
		now := d.now()
		d.look = now + d.watch.Sent(time.Now())
		d.set(now)
	}
}

// set makes the timer fire no later than next.
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

// unwatched removes the watch and returns it, or nil. It reports whether the
// request was sent.
func (d *deadline) unwatched() (w Watch, sent bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w, d.watch = d.watch, nil
	return w, d.look > 0
}

// refused records that the backend has refused to accept the request. The
// backend is not silent then, so the watch ends.
func (d *deadline) refused() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.watch != nil && d.look > 0 {
		d.watch.Unsent()
	}
	d.watch = nil
}

// heard records that the first byte of the reply has arrived.
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

// next returns when the timer must fire.
func (d *deadline) next() time.Duration {
	switch {
	case d.watch == nil:
		return d.until
	case d.look == 0:
		return min(d.until, d.until-d.limit+uploadStall)
	}
	return min(d.until, d.look)
}

// Extend restarts the time of the step. The upload made progress, so if it had
// stalled, the request no longer counts as sent.
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

// err returns the error of the step that took too long. It returns nil if all
// steps were in time.
func (d *deadline) err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.expired
}

// measure starts to measure the time between the steps. end stops it.
func (d *deadline) measure() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.measures, d.ended = true, d.now()
}

// lagging returns the lag. It grows while the client does not read, and shrinks
// while reads wait for the backend. A read that does not wait, because the
// backend sent during the client's pause, does not shrink it.
func (d *deadline) lagging() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lag
}

// end ends the step, and stops the timer until another step begins.
func (d *deadline) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reason, d.measures = nil, false; d.goesOff > 0 {
		d.timer.Stop()
		d.goesOff = 0
	}
}

// asleep is the delay of the timer that shows that this process did not run,
// because it was suspended or had no CPU. Replies that arrived meanwhile are
// read first, before the watch is asked.
const asleep = 100 * time.Millisecond

// wake runs when the timer fires, and checks whether the step takes too long.
// The step may have ended just before.
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

// expire cancels the attempt for this reason. The caller holds the lock.
func (d *deadline) expire(reason error) {
	d.expired, d.reason = reason, nil
	d.cancel(reason)
}
