package attempt

import (
	"sync"
	"sync/atomic"
	"time"
)

// alarms are timers that one deadline after the other uses. A timer is not stopped in between: in
// time it goes off, which changes nothing. The zero alarms is ready to use.
type alarms struct {
	mu     sync.Mutex
	idle   []*alarm
	closed bool
}

// maxIdle is how many alarms wait for a deadline at most.
const maxIdle = 512

// alarm wakes a deadline, perhaps too early.
type alarm struct {
	timer *time.Timer
	born  time.Time
	// deadline has the alarm. nil: it is idle.
	deadline atomic.Pointer[deadline]
	// goesOff is when it does, since it was born. 0: it is not set.
	goesOff atomic.Int64
}

// take lends an alarm to d, which gives it back.
func (as *alarms) take(d *deadline) (a *alarm) {
	as.mu.Lock()
	if last := len(as.idle) - 1; last >= 0 {
		a, as.idle = as.idle[last], as.idle[:last]
	}
	as.mu.Unlock()
	if a == nil {
		a = &alarm{born: time.Now()}
	}
	a.deadline.Store(d)
	return a
}

func (as *alarms) giveBack(a *alarm) {
	a.deadline.Store(nil)
	as.mu.Lock()
	defer as.mu.Unlock()
	if !as.closed && len(as.idle) < maxIdle {
		as.idle = append(as.idle, a)
	} else {
		a.stop()
	}
}

// stop stops the timer, if there is one: an alarm may be taken and never set.
func (a *alarm) stop() {
	if a.timer != nil {
		a.timer.Stop()
	}
}

// Close stops the timers. Whoever still uses one stops it itself.
func (as *alarms) Close() {
	as.mu.Lock()
	defer as.mu.Unlock()
	for _, a := range as.idle {
		a.stop()
	}
	as.idle, as.closed = nil, true
}

// now is the time since the alarm was born.
func (a *alarm) now() time.Duration { return time.Since(a.born) }

// setFor makes the alarm go off at that time or earlier. left is how long that is from now.
func (a *alarm) setFor(at, left time.Duration) {
	if goesOff := time.Duration(a.goesOff.Load()); goesOff > 0 && goesOff <= at {
		return
	}
	a.goesOff.Store(int64(at))
	if a.timer == nil {
		a.timer = time.AfterFunc(left, a.goOff)
	} else {
		a.timer.Reset(left)
	}
}

// goOff wakes the deadline. If one gets the alarm just now, it either sees that it is not set any
// more, or is told.
func (a *alarm) goOff() {
	late := a.now() - time.Duration(a.goesOff.Swap(0))
	if d := a.deadline.Load(); d != nil {
		d.wake(a, late)
	}
}
