package pool

import (
	"math/rand/v2"
	"net/http"
	"slices"
	"sync/atomic"
	"time"
)

// standing says how strictly cooldowns keep a request away. Greater values are
// stricter.
type standing int

const (
	// ready means that there is no cooldown, or that its trial was not refused.
	ready standing = iota
	// refusalOverdue means that refusalDue has lasted for the time overdue. Any
	// request may now be the trial.
	refusalOverdue
	// refusalDue means that the next request is the trial, and that a refused
	// trial is not executed. So any request that can then fail over may be the
	// trial.
	refusalDue
	// trialDue means that the next request is the trial, and that a failed
	// trial may have been executed.
	trialDue
	// trialPending means that another request is the trial.
	trialPending
	// failureCooldown means that a cooldown for a failure is active.
	failureCooldown
	// guessCooldown means that a throttle of guessed length is active, and that
	// one request may try the backend.
	guessCooldown
	// throttleCooldown means that a throttle is active.
	throttleCooldown
)

// slot holds one cooldown. It is nil if there is none.
type slot struct{ atomic.Pointer[cooldownEntry] }

// appendTo appends the slot if it holds a cooldown.
func (s *slot) appendTo(to []*slot) []*slot {
	if s.Load() != nil {
		to = append(to, s)
	}
	return to
}

func (s *slot) standing(cost int64, now time.Time) standing {
	c := s.Load()
	if c == nil {
		return ready
	}
	trial := &c.probe
	if c.inForce(now) {
		trial = &c.check
		if !c.checkableBy(cost) || trial.pending(c, now) { // the throttle holds until the check was not refused
			switch {
			case c.tryable(now):
				return guessCooldown
			case c.Throttle:
				return throttleCooldown
			}
			return failureCooldown
		}
	}
	switch {
	case trial.Load() == 0 && now.Sub(c.Until) < untried:
		switch {
		case !c.refusesOnly():
			return trialDue
		case now.Sub(c.Until) < overdue:
			return refusalDue
		}
		return refusalOverdue
	case trial.pending(c, now):
		return trialPending
	}
	return ready
}

// refusesOnly reports whether the backend executed none of the requests that
// started or extended the cooldown: it answered each with a 429 or 503.
func (c *cooldownEntry) refusesOnly() bool {
	return c.Throttle || c.Status == http.StatusServiceUnavailable && len(c.classes) == 1
}

// tryable reports whether one request may try the backend although the cooldown
// is active.
func (c *cooldownEntry) tryable(now time.Time) bool {
	return c.Guess > 0 && !now.Before(c.nextTry())
}

func (c *cooldownEntry) nextTry() time.Time {
	last := later(c.extended, c.tried.at(c))
	return later(c.promised, last.Add(max(c.Guess/guessParts, guessPause)))
}

// claimTry takes the right to be the next request that tries a throttle. It
// succeeds if no throttle is in force, or none that holds for a request of this
// cost.
func (s *slot) claimTry(cost int64, now time.Time, taken *rights) bool {
	c := s.Load()
	switch {
	case c == nil || !c.inForce(now):
		return true
	case c.checkableBy(cost) && !c.check.pending(c, now):
		return c.check.Load() != 0 || s.take(c, checkOf, 0, now, taken)
	}
	last := c.tried.Load()
	return c.tryable(now) && s.take(c, tryOf, last, now, taken)
}

// checkableBy reports whether a request of this cost may check the cooldown.
func (c *cooldownEntry) checkableBy(cost int64) bool {
	return c.doubt.Load() == inDoubt && c.muchLarger(cost)
}

// muchLarger reports whether all requests that the cooldown refused were much
// larger than cost, so that the cooldown may not apply to a request of that
// cost.
func (c *cooldownEntry) muchLarger(cost int64) bool {
	return cost < c.Cost && cost <= c.Cost/checkShare
}

// claim reserves the right to send a request, as the trial or after it. It
// fails while another request is the trial. ended is the cooldown that this
// call ended because its probe was not refused, or nil.
func (s *slot) claim(cost int64, now time.Time, taken *rights) (ok bool, ended *cooldownEntry) {
	c := s.Load()
	if c == nil {
		return true, nil
	}
	if c.inForce(now) {
		return c.checkableBy(cost) && (s.take(c, checkOf, 0, now, taken) || !c.check.pending(c, now)), nil
	}
	if s.take(c, probeOf, 0, now, taken) {
		return true, nil
	}
	if c.probe.pending(c, now) {
		return false, nil
	}
	if s.CompareAndSwap(c, nil) {
		ended = c
	}
	return true, ended
}

// take records in one of the trials of the cooldown c that a request is sent
// now. It fails if the trial no longer has its previous value, because another
// request was faster. It adds to taken how to undo that, which works even if
// the cooldown has grown in the meantime.
func (s *slot) take(c *cooldownEntry, which func(*cooldownEntry) *trial, previous int64, now time.Time,
	taken *rights) bool {
	value := c.trialAt(now)
	if !which(c).CompareAndSwap(previous, value) {
		return false
	}
	taken.add(func() {
		if current := s.Load(); current != nil && current.Since.Equal(c.Since) {
			which(current).CompareAndSwap(value, previous)
		}
	})
	return true
}

func probeOf(c *cooldownEntry) *trial { return &c.probe }
func checkOf(c *cooldownEntry) *trial { return &c.check }
func tryOf(c *cooldownEntry) *trial   { return &c.tried }

// clear ends a cooldown after an attempt has succeeded, if the attempt started
// after the backend last asked for the cooldown, or if it was a check of the
// cooldown. It returns the cooldown that it ended, or nil.
func (s *slot) clear(started time.Time) (ended *cooldownEntry) {
	c := s.Load()
	if c == nil || !started.After(c.extended) && (c.check.Load() == 0 || started.Before(c.check.at(c))) {
		return nil
	}
	if !s.CompareAndSwap(c, nil) {
		return nil
	}
	return c
}

// put starts or extends a cooldown. It never shortens one: a refusal that asks
// for less changes only the cost, and the reason if the class is new for this
// cooldown or, for an unreachable backend, the cause. ended is the previous
// cooldown if its time has passed, or nil. The caller holds the lock.
func (s *slot) put(c *cooldownEntry, remote bool) (happened Happening, ended *cooldownEntry) {
	current := s.Load()
	if current == nil || !current.inForce(c.Since) {
		c.classes, c.causes = []string{c.Class}, []string{c.Cause}
		s.Store(c)
		return Began, current
	}
	c.doubt.Store(current.doubt.Load())
	c.check.Store(current.check.Load())
	c.tried.Store(current.tried.Load())
	asked := c.extended
	if !c.promised.After(current.promised) {
		asked, c.promised = current.extended, current.promised
	}
	if current.muchLarger(c.Cost) {
		c.doubt.CompareAndSwap(inDoubt, doubtOver)
	}
	c.Cost, c.Heard = min(c.Cost, current.Cost), c.Heard || current.Heard
	c.Since, c.reporter = current.Since, current.reporter
	happened = c.follow(current, remote)
	c.extended = later(c.extended, asked) // also by a promise that ends before a guess does
	c.classes, c.causes = current.classes, current.causes
	switch {
	case !slices.Contains(c.classes, c.Class):
		c.classes = append(slices.Clip(c.classes), c.Class)
		happened = Turned
	case c.Unreachable && len(c.causes) < maxCauses && !slices.Contains(c.causes, c.Cause):
		c.causes = append(slices.Clip(c.causes), c.Cause)
		happened = Turned
	case c.Until.Equal(current.Until):
		c.Reason = current.Reason
	}
	s.Store(c)
	return happened, nil
}

// follow sets the end and the ID of c, which extends the active cooldown
// current. If several replicas are refused at the same time, each reports a
// cooldown to the others. In whichever order a replica receives the reports, it
// merges them into one cooldown with the smallest of the IDs. So a single
// replica sends the probe, and its result counts for all.
func (c *cooldownEntry) follow(current *cooldownEntry, remote bool) Happening {
	longer := c.Until.After(current.Until)
	switch same := remote && c.Until.Sub(current.Until).Abs() < c.Grace(); {
	case same:
		c.ID = min(c.ID, current.ID)
	case !longer:
		c.ID = current.ID
	case !remote:
		c.ID = current.ID - 1 - rand.Uint64N(idStep)
	}
	if !longer {
		c.Until, c.extended, c.Guess, c.AsksAtOnce = current.Until, current.extended, current.Guess, current.AsksAtOnce
		if c.ID == current.ID {
			return nothing
		}
	}
	return Grew
}

// idStep is the most by which the ID of a cooldown decreases when the cooldown
// grows. It is large enough that two replicas hardly ever choose the same ID,
// and small enough that a cooldown can grow millions of times.
const idStep = 1 << 40

// cast puts the cooldown that began at since in doubt, unless it was already in
// doubt or checked. It returns the cooldown if it is in doubt now. The caller
// holds the lock.
func (s *slot) cast(since time.Time) *cooldownEntry {
	if c := s.Load(); c != nil && c.Since.Equal(since) && c.doubt.CompareAndSwap(noDoubt, inDoubt) {
		return c
	}
	return nil
}

// until returns when the cooldown ends, or the zero time if it has ended.
func (s *slot) until(now time.Time) time.Time {
	if c := s.Load(); c != nil && now.Before(c.Until) {
		return c.Until
	}
	return time.Time{}
}
