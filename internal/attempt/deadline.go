package attempt

import (
	"context"
	"sync"
	"time"
)

// A deadline limits each step of an attempt: the wait for the reply, then each read of the body. Most
// steps are short, and there are many, so the timer is not stopped and set again for each. It goes off
// too early instead, and then looks how long it has to wait. After the last step, end releases it.
type deadline struct {
	// cancel ends what is not in time.
	cancel context.CancelCauseFunc
	// alarms have the timer.
	alarms *alarms

	mu     sync.Mutex
	alarm  *alarm        // nil: no step has begun since the end
	until  time.Duration // by the alarm's clock
	limit  time.Duration
	reason error // nil: no step is limited
	// expired is why the time is over. nil: all steps were in time.
	expired error

	// watch is asked at look, by the alarm's clock, whether to give up before until. nil: it is not.
	// look is 0 until the request is sent, or while its upload stalls, which stalled reports.
	watch   Watch
	look    time.Duration
	stalled bool

	measures     bool
	began, ended time.Duration // the last step, by the alarm's clock
	lag          time.Duration
}

// start begins a step, which may take so long from now.
func (d *deadline) start(limit time.Duration, reason error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.alarm == nil {
		d.alarm = d.alarms.take(d)
	}
	d.limit, d.reason = limit, reason
	now := d.alarm.now()
	if d.measures {
		d.lag += now - d.ended
		d.began = now
	}
	d.until = now + limit
	d.set(now)
}

// uploadStall is how long the upload of a long body may pause. If it pauses for longer, it counts as
// over: the request waits for the backend.
const uploadStall = 2 * time.Second

// watched makes w be asked after that time, from now on, while a step takes long. If it is 0, the
// request is not sent yet.
func (d *deadline) watched(w Watch, after time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.alarm == nil {
		d.alarm = d.alarms.take(d)
	}
	if d.watch = w; after > 0 {
		d.look = d.alarm.now() + after
	}
}

// sent records that a request is sent now that was not when it was watched, unless its reply has come.
func (d *deadline) sent() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stalled = false; d.watch != nil && d.look == 0 && d.reason != nil {
		now := d.alarm.now()
		d.look = now + d.watch.Sent(time.Now())
		d.set(now)
	}
}

// set makes the alarm go off in time.
func (d *deadline) set(now time.Duration) {
	at := max(now, d.next())
	d.alarm.setFor(at, at-now)
}

// unwatched stops the watch and returns it, or nil. It reports whether the request was sent.
func (d *deadline) unwatched() (w Watch, sent bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w, d.watch = d.watch, nil
	return w, d.look > 0
}

// refused records that the backend has refused to accept the request. So it is not silent, and the watch ends.
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

// next returns when the alarm has to go off.
func (d *deadline) next() time.Duration {
	switch {
	case d.watch == nil:
		return d.until
	case d.look == 0:
		return min(d.until, d.until-d.limit+uploadStall)
	}
	return min(d.until, d.look)
}

// Extend gives the step as long again. An upload that had stalled goes on: its request does not wait
// any more.
func (d *deadline) Extend() {
	d.mu.Lock()
	defer d.mu.Unlock()
	goesOn := d.stalled && d.watch != nil
	if goesOn {
		d.watch.Unsent()
		d.look, d.stalled = 0, false
	}
	if d.reason != nil {
		now := d.alarm.now()
		if d.until = now + d.limit; goesOn {
			d.set(now) // it may stall again long before the alarm goes off
		}
	}
}

// stop ends the step. It reports whether all steps were in time.
func (d *deadline) stop() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reason = nil
	if d.measures {
		d.ended = d.alarm.now()
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
	if d.alarm == nil {
		d.alarm = d.alarms.take(d)
	}
	d.measures, d.ended = true, d.alarm.now()
}

// lagging returns the lag: it grows while the client does not read, and shrinks by the time that reads
// wait for the backend. Reads that need not wait, because the backend sent in the pause, do not shrink it.
func (d *deadline) lagging() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lag
}

// end ends the step, and releases the timer until another one begins.
func (d *deadline) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reason, d.measures = nil, false; d.alarm != nil {
		d.alarms.giveBack(d.alarm)
		d.alarm = nil
	}
}

// asleep is how late an alarm goes off if this process did not run: it was suspended, or has no CPU.
// Replies that came meanwhile are read first, before a watch is asked.
const asleep = 100 * time.Millisecond

// wake finds out whether the step takes too long. late is how late the alarm goes off.
func (d *deadline) wake(by *alarm, late time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.alarm != by || d.reason == nil {
		return
	}
	now := by.now()
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
