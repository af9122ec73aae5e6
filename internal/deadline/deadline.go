// Package deadline ends what does not go on in time.
package deadline

import (
	"context"
	"sync"
	"time"
)

// Deadline limits the time of one step after the other: of a request until its reply, and then of
// each read of the reply. A step is over in nearly no time, and there are many, so the timer is not
// stopped and set again for each. It goes off too early instead, and then sees how long it has to
// wait. After the last step, End stops it.
type Deadline struct {
	// Cancel ends what is not in time.
	Cancel context.CancelCauseFunc
	// Shortest is the limit of the shortest step to come, so that the timer need not be set again for
	// it. 0: nobody knows.
	Shortest time.Duration

	mu      sync.Mutex
	born    time.Time
	timer   *time.Timer
	goesOff time.Duration // since born, 0: the timer is not set
	until   time.Duration // since born
	limit   time.Duration
	reason  error // nil: no step is limited
	expired bool
}

// Start begins a step, which may take so long from now.
func (d *Deadline) Start(limit time.Duration, reason error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.limit, d.reason = limit, reason
	if d.timer == nil {
		d.born = time.Now()
		d.until, d.goesOff = limit, limit
		if d.Shortest > 0 {
			d.goesOff = min(limit, d.Shortest)
		}
		d.timer = time.AfterFunc(d.goesOff, d.expire)
		return
	}
	d.until = time.Since(d.born) + limit
	if d.goesOff == 0 || d.until < d.goesOff {
		d.goesOff = d.until
		d.timer.Reset(limit)
	}
}

// Extend gives the step as long again.
func (d *Deadline) Extend() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reason != nil {
		d.until = time.Since(d.born) + d.limit
	}
}

// Stop ends the step. It reports whether all steps were in time.
func (d *Deadline) Stop() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reason = nil
	return !d.expired
}

// End ends the step, and stops the timer until another one begins.
func (d *Deadline) End() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reason = nil; d.goesOff > 0 {
		d.goesOff = 0
		d.timer.Stop()
	}
}

func (d *Deadline) expire() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.goesOff = 0
	if d.reason == nil {
		return
	}
	if left := d.until - time.Since(d.born); left > 0 {
		d.goesOff = d.until
		d.timer.Reset(left)
		return
	}
	d.expired = true
	d.Cancel(d.reason)
}
