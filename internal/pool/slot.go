package pool

import (
	"math/rand/v2"
	"net/http"
	"slices"
	"sync/atomic"
	"time"
)

// standing is how far cooldowns keep a request away. The worse, the greater.
type standing int

const (
	// ready: there is no cooldown, or its trial was not refused.
	ready standing = iota
	// refusalOverdue is refusalDue for a while already: any request may be the
	// trial.
	refusalOverdue
	// refusalDue: the next request is the trial. If it is refused again, it was
	// not executed, so that any request may be the trial that can then go on
	// elsewhere.
	refusalDue
	// trialDue: the next request is the trial. If it fails again, it may have
	// been executed.
	trialDue
	// trialPending: another request is the trial.
	trialPending
	// failureCooldown: there is a cooldown for a failure.
	failureCooldown
	// guessCooldown: there is a cooldown because the backend throttles, but its
	// time is a guess. One request may try the backend.
	guessCooldown
	// throttleCooldown: there is a cooldown that the backend asked for.
	throttleCooldown
)

// slot holds a cooldown, or nil.
type slot struct{ atomic.Pointer[cooldownEntry] }

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

// refusesOnly reports whether none of the requests that started or extended the
// cooldown was executed: the backend answered each with a 429 or 503.
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

// accepts returns when a request may be sent to the backend that throttles: at
// the end of the cooldown, or before, if that is a guess.
func (c *cooldownEntry) accepts() time.Time {
	if try := c.nextTry(); c.Guess > 0 && try.Before(c.Until) {
		return try
	}
	return c.Until
}

// claimTry takes the right to be the next request that tries a throttle. It
// succeeds if no throttle is in force, or none that holds for a request of this
// cost.
func (s *slot) claimTry(cost int64, now time.Time) bool {
	c := s.Load()
	switch {
	case c == nil || !c.inForce(now):
		return true
	case c.checkableBy(cost) && !c.check.pending(c, now):
		return c.check.Load() != 0 || c.check.claim(c, now)
	}
	last := c.tried.Load()
	return c.tryable(now) && c.tried.CompareAndSwap(last, int64(now.Sub(c.Since))+1)
}

// checkableBy reports whether a request of this cost may check the cooldown.
func (c *cooldownEntry) checkableBy(cost int64) bool {
	return c.doubt.Load() == inDoubt && c.muchLarger(cost)
}

// muchLarger reports whether the cooldown is for requests much larger than one
// of this cost, so that the cooldown may not hold for that one.
func (c *cooldownEntry) muchLarger(cost int64) bool {
	return cost < c.Cost && cost <= c.Cost/checkShare
}

// claim takes the right to send a request: the trial, or one of many. It fails
// if another request is the trial. over is the cooldown that ended because its
// probe was not refused, if one did.
func (s *slot) claim(cost int64, now time.Time) (ok bool, over *cooldownEntry) {
	c := s.Load()
	if c == nil {
		return true, nil
	}
	if c.inForce(now) {
		return c.checkableBy(cost) && (c.check.claim(c, now) || !c.check.pending(c, now)), nil
	}
	if c.probe.claim(c, now) {
		return true, nil
	}
	if c.probe.pending(c, now) {
		return false, nil
	}
	if s.CompareAndSwap(c, nil) {
		over = c
	}
	return true, over
}

// clear ends a cooldown if an attempt that has succeeded started after the
// backend last asked for the cooldown, or was a check of it.
func (s *slot) clear(started time.Time) (over *cooldownEntry) {
	c := s.Load()
	if c == nil || !started.After(c.extended) && (c.check.Load() == 0 || started.Before(c.check.at(c))) {
		return nil
	}
	if !s.CompareAndSwap(c, nil) {
		return nil
	}
	return c
}

// put starts or extends a cooldown. A cooldown only grows: a shorter one
// changes only the cost, and the reason if the cooldown has not had that class
// so far or, for an unreachable backend, that cause. over is the previous
// cooldown, if there was one and its time has passed. The caller holds the
// lock.
func (s *slot) put(c *cooldownEntry, remote bool) (happened Happening, over *cooldownEntry) {
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

// follow gives c the end and the ID that it has after a cooldown that is still
// active. If replicas are refused at the same time, each reports its own
// cooldown to the others. All replicas treat them as one cooldown with the
// smallest of the IDs, in whichever order a replica hears of them. So one
// replica sends the probe, and what becomes of it counts for all.
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
		c.Until, c.extended, c.Guess = current.Until, current.extended, current.Guess
		if c.ID == current.ID {
			return nothing
		}
	}
	return Grew
}

// idStep is by how much the ID of a cooldown that grows gets smaller at most.
// So two replicas hardly choose the same, and a cooldown can grow millions of
// times.
const idStep = 1 << 40

// cast puts a cooldown in doubt that began at since, unless it was checked. It
// returns the cooldown if it is in doubt now. The caller holds the lock.
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
