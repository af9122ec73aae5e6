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
	b := s.Load()
	if b == nil {
		return ready
	}
	trial := &b.probe
	if b.inForce(now) {
		trial = &b.check
		if !b.checkableBy(cost) || trial.pending(b, now) { // the throttle holds until the check was not refused
			switch {
			case b.tryable(now):
				return guessCooldown
			case b.Throttle:
				return throttleCooldown
			}
			return failureCooldown
		}
	}
	switch {
	case trial.Load() == 0 && now.Sub(b.Until) < untried:
		switch {
		case !b.refusesOnly():
			return trialDue
		case now.Sub(b.Until) < overdue:
			return refusalDue
		}
		return refusalOverdue
	case trial.pending(b, now):
		return trialPending
	}
	return ready
}

// refusesOnly reports whether none of the requests that started or extended the
// cooldown was executed: the backend answered each with a 429 or 503.
func (b *cooldownEntry) refusesOnly() bool {
	return b.Throttle || b.Status == http.StatusServiceUnavailable && len(b.classes) == 1
}

// tryable reports whether one request may try the backend although the cooldown
// is active.
func (b *cooldownEntry) tryable(now time.Time) bool {
	return b.Guess > 0 && !now.Before(b.nextTry())
}

func (b *cooldownEntry) nextTry() time.Time {
	last := later(b.extended, b.tried.at(b))
	return later(b.promised, last.Add(max(b.Guess/guessParts, guessPause)))
}

// accepts returns when a request may be sent to the backend that throttles: at
// the end of the cooldown, or before, if that is a guess.
func (b *cooldownEntry) accepts() time.Time {
	if try := b.nextTry(); b.Guess > 0 && try.Before(b.Until) {
		return try
	}
	return b.Until
}

// claimTry takes the right to be the next request that tries a throttle. It
// succeeds if no throttle is in force, or none that holds for a request of this
// cost.
func (s *slot) claimTry(cost int64, now time.Time) bool {
	b := s.Load()
	switch {
	case b == nil || !b.inForce(now):
		return true
	case b.checkableBy(cost) && !b.check.pending(b, now):
		return b.check.Load() != 0 || b.check.claim(b, now)
	}
	last := b.tried.Load()
	return b.tryable(now) && b.tried.CompareAndSwap(last, int64(now.Sub(b.Since))+1)
}

// checkableBy reports whether a request of this cost may check the cooldown.
func (b *cooldownEntry) checkableBy(cost int64) bool {
	return b.doubt.Load() == inDoubt && b.muchLarger(cost)
}

// muchLarger reports whether the cooldown is for requests much larger than one
// of this cost, so that the cooldown may not hold for that one.
func (b *cooldownEntry) muchLarger(cost int64) bool {
	return cost < b.Cost && cost <= b.Cost/checkShare
}

// claim takes the right to send a request: the trial, or one of many. It fails
// if another request is the trial. over is the cooldown that ended because its
// probe was not refused, if one did.
func (s *slot) claim(cost int64, now time.Time) (ok bool, over *cooldownEntry) {
	b := s.Load()
	if b == nil {
		return true, nil
	}
	if b.inForce(now) {
		return b.checkableBy(cost) && (b.check.claim(b, now) || !b.check.pending(b, now)), nil
	}
	if b.probe.claim(b, now) {
		return true, nil
	}
	if b.probe.pending(b, now) {
		return false, nil
	}
	if s.CompareAndSwap(b, nil) {
		over = b
	}
	return true, over
}

// clear ends a cooldown if an attempt that has succeeded started after the
// backend last asked for the cooldown, or was a check of it.
func (s *slot) clear(started time.Time) (over *cooldownEntry) {
	b := s.Load()
	if b == nil || !started.After(b.extended) && (b.check.Load() == 0 || started.Before(b.check.at(b))) {
		return nil
	}
	if !s.CompareAndSwap(b, nil) {
		return nil
	}
	return b
}

// put starts or extends a cooldown. A cooldown only grows: a shorter one
// changes only the cost, and the reason if the cooldown has not had that class
// so far or, for an unreachable backend, that cause. over is the previous
// cooldown, if there was one and its time has passed. The caller holds the
// lock.
func (s *slot) put(b *cooldownEntry, remote bool) (happened Happening, over *cooldownEntry) {
	current := s.Load()
	if current == nil || !current.inForce(b.Since) {
		b.classes, b.causes = []string{b.Class}, []string{b.Cause}
		s.Store(b)
		return Began, current
	}
	b.doubt.Store(current.doubt.Load())
	b.check.Store(current.check.Load())
	b.tried.Store(current.tried.Load())
	asked := b.extended
	if !b.promised.After(current.promised) {
		asked, b.promised = current.extended, current.promised
	}
	if current.muchLarger(b.Cost) {
		b.doubt.CompareAndSwap(inDoubt, doubtOver)
	}
	b.Cost, b.Heard = min(b.Cost, current.Cost), b.Heard || current.Heard
	b.Since, b.reporter = current.Since, current.reporter
	happened = b.follow(current, remote)
	b.extended = later(b.extended, asked) // also by a promise that ends before a guess does
	b.classes, b.causes = current.classes, current.causes
	switch {
	case !slices.Contains(b.classes, b.Class):
		b.classes = append(slices.Clip(b.classes), b.Class)
		happened = Turned
	case b.Unreachable && len(b.causes) < maxCauses && !slices.Contains(b.causes, b.Cause):
		b.causes = append(slices.Clip(b.causes), b.Cause)
		happened = Turned
	case b.Until.Equal(current.Until):
		b.Reason = current.Reason
	}
	s.Store(b)
	return happened, nil
}

// follow gives b the end and the ID that it has after a cooldown that is still
// active. If replicas are refused at the same time, each reports its own
// cooldown to the others. All replicas treat them as one cooldown with the
// smallest of the IDs, in whichever order a replica hears of them. So one
// replica sends the probe, and what becomes of it counts for all.
func (b *cooldownEntry) follow(current *cooldownEntry, remote bool) Happening {
	longer := b.Until.After(current.Until)
	switch same := remote && b.Until.Sub(current.Until).Abs() < b.Grace(); {
	case same:
		b.ID = min(b.ID, current.ID)
	case !longer:
		b.ID = current.ID
	case !remote:
		b.ID = current.ID - 1 - rand.Uint64N(idStep)
	}
	if !longer {
		b.Until, b.extended, b.Guess = current.Until, current.extended, current.Guess
		if b.ID == current.ID {
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
	if b := s.Load(); b != nil && b.Since.Equal(since) && b.doubt.CompareAndSwap(noDoubt, inDoubt) {
		return b
	}
	return nil
}

// until returns when the cooldown ends, or the zero time if it has ended.
func (s *slot) until(now time.Time) time.Time {
	if b := s.Load(); b != nil && now.Before(b.Until) {
		return b.Until
	}
	return time.Time{}
}
