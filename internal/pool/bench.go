package pool

import (
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"
)

// Bench is a time in which a backend gets no requests.
type Bench struct {
	Reason
	// ID identifies the bench, also between replicas. A bench that grew has a
	// new ID, which is smaller than before.
	ID uint64
	// Whole reports whether the bench covers every model.
	Whole bool
	// Model is the benched model. It is empty if the bench covers the whole
	// backend, or requests that name no model.
	Model        string
	Since, Until time.Time
	// Throttle reports whether the backend asked for the bench. Otherwise it is
	// for a failure.
	Throttle bool
	// Guess is the length that we guessed for a throttle, because the backend named
	// no time. 0: it named Until.
	Guess time.Duration
	// Cost is the cost of the smallest request that was refused.
	Cost int64
	// Unreachable reports whether the bench lasts until the backend is reached.
	// Until is then the time of the next recheck.
	Unreachable bool
	// InDoubt reports, in a snapshot, whether the bench is in doubt.
	InDoubt bool
	// Heard reports whether another replica reported the bench.
	Heard bool
}

// inForce reports whether the bench keeps requests away, and not its end only.
func (b *Bench) inForce(now time.Time) bool { return b.Unreachable || now.Before(b.Until) }

// Grace returns how long after the bench's end all requests wait for the result
// of the probe.
func (b *Bench) Grace() time.Duration { return min(time.Second, b.Until.Sub(b.Since)/10) }

// Reason is why a backend is benched. The pool only passes it to listeners.
type Reason struct {
	// Class is the class of the backend's reply.
	Class string
	// Status is the reply's HTTP status, or 0 if there was no reply.
	Status int
	// Hint is where the backend said how long the bench lasts, if it did.
	Hint string
	// Cause is a more specific word than the class: dns, refused or certificate
	// for an unreachable backend, or the code of the backend's error.
	Cause string
	// Error is the error in full if there was no reply. It contains no secret.
	Error string
}

// bench is a Bench in force. Only the times of its probe and its check change.
type bench struct {
	Bench
	// extended is when the backend last asked for more.
	extended time.Time
	// probe is when the bench's probe was sent.
	probe trial
	// check is when a request was sent to check a bench that is in doubt.
	check trial
	// promised is until when the backend itself asked for the bench. The rest of it
	// is a guess, and tried is when a request last tried the backend during that.
	promised time.Time
	tried    trial
	// doubt is one of noDoubt, inDoubt and doubtOver.
	doubt atomic.Int32
	// pool is the one that reports the bench to its listeners.
	pool *Pool
	// told reports whether they know that the bench is over.
	told atomic.Bool
	// classes are those of the reasons that the bench had so far.
	classes []string
}

const (
	noDoubt int32 = iota
	inDoubt
	doubtOver // a check was refused
)

// checkShare is how many times smaller than the refused request one must be
// to check a bench that is in doubt.
const checkShare = 4

// untried is for how long after its end a bench waits for a probe that can be sent
// again. If only requests come that cannot be sent again, one of them is then the
// probe: otherwise the backend would never be used again.
const untried = time.Minute

// While no other member is left, a guess is tried again and again: each time after a
// part of it has passed, but no sooner than the pause.
const (
	guessParts = 20
	guessPause = 250 * time.Millisecond
)

// trial is a request that goes first: when it was sent, as nanoseconds since
// its bench began, plus 1. 0: no request was sent.
type trial struct{ atomic.Int64 }

func (t *trial) at(b *bench) time.Time { return b.Since.Add(time.Duration(t.Load() - 1)) }

func (t *trial) claim(b *bench, now time.Time) bool {
	return t.CompareAndSwap(0, int64(now.Sub(b.Since))+1)
}

// pending reports whether the trial is too young for its silence to mean that
// it was not refused. A throttled backend refuses at once.
func (t *trial) pending(b *bench, now time.Time) bool {
	return t.Load() != 0 && now.Before(t.at(b).Add(b.Grace()))
}

// standing is what benches mean for a request. The worse, the greater.
type standing int

const (
	// ready: there is no bench, or its trial was not refused.
	ready standing = iota
	// due: the next request is the trial.
	due
	// waiting: another request is the trial.
	waiting
	// suspected: benched for a failure.
	suspected
	// guessed: benched because it throttles, but the time is a guess. One request
	// may try it.
	guessed
	// throttled: benched because the backend asked for it.
	throttled
)

// slot holds a bench, or nil.
type slot struct{ atomic.Pointer[bench] }

// standing returns what the slot means for a request of this cost, if an
// unfinished bench in it means benched.
func (s *slot) standing(cost int64, now time.Time, benched standing) standing {
	b := s.Load()
	if b == nil {
		return ready
	}
	trial := &b.probe
	if b.inForce(now) {
		trial = &b.check
		if !b.checkableBy(cost) || trial.pending(b, now) { // the throttle holds until the check was not refused
			if b.tryable(now) {
				return guessed
			}
			return benched
		}
	}
	switch {
	case trial.Load() == 0 && now.Sub(b.Until) < untried:
		return due
	case trial.pending(b, now):
		return waiting
	}
	return ready
}

// tryable reports whether one request may try the backend although the bench is in
// force.
func (b *bench) tryable(now time.Time) bool {
	last := later(b.extended, b.tried.at(b))
	return b.Guess > 0 && !now.Before(later(b.promised, last.Add(max(b.Guess/guessParts, guessPause))))
}

// claimTry takes the right to be the next request that tries a throttle. It
// succeeds if no throttle is in force.
func (s *slot) claimTry(now time.Time) bool {
	b := s.Load()
	if b == nil || !b.inForce(now) {
		return true
	}
	last := b.tried.Load()
	return b.tryable(now) && b.tried.CompareAndSwap(last, int64(now.Sub(b.Since))+1)
}

// checkableBy reports whether a request of this cost may check the bench.
func (b *bench) checkableBy(cost int64) bool {
	return b.doubt.Load() == inDoubt && b.muchLarger(cost)
}

// muchLarger reports whether the bench is for requests that are so much larger than
// one of this cost that it may not hold for that one.
func (b *bench) muchLarger(cost int64) bool { return cost < b.Cost && cost <= b.Cost/checkShare }

// claim takes the right to send a request: the trial, or one of many. It fails
// if another request is the trial. over is the bench that ended by it, if one
// did, because its probe was not refused.
func (s *slot) claim(cost int64, now time.Time) (ok bool, over *bench) {
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

// clear ends a bench if an attempt that has succeeded started after the
// backend last asked for it, or was a check of it.
func (s *slot) clear(started time.Time) (over *bench) {
	b := s.Load()
	if b == nil || !started.After(b.extended) && (b.check.Load() == 0 || started.Before(b.check.at(b))) {
		return nil
	}
	if !s.CompareAndSwap(b, nil) {
		return nil
	}
	return b
}

// put starts or extends a bench. A bench only grows: a shorter one changes
// nothing but the cost that the bench is for, and its reason if that is of a
// class that it did not have so far. over is the bench before it,
// if there was one and its time has passed. The caller holds the lock.
func (s *slot) put(b *bench, remote bool) (happened Happening, over *bench) {
	current := s.Load()
	if current == nil || !current.inForce(b.Since) {
		b.classes = []string{b.Class}
		s.Store(b)
		return Began, current
	}
	b.doubt.Store(current.doubt.Load())
	b.check.Store(current.check.Load())
	b.tried.Store(current.tried.Load())
	b.promised = later(b.promised, current.promised)
	if current.muchLarger(b.Cost) {
		b.doubt.CompareAndSwap(inDoubt, doubtOver)
	}
	b.Cost, b.Heard = min(b.Cost, current.Cost), b.Heard || current.Heard
	b.Since, b.pool = current.Since, current.pool
	happened = b.follow(current, remote)
	if b.classes = current.classes; !slices.Contains(b.classes, b.Class) {
		b.classes = append(slices.Clip(b.classes), b.Class)
		happened = Turned
	} else if b.Until.Equal(current.Until) {
		b.Reason = current.Reason
	}
	s.Store(b)
	return happened, nil
}

// follow gives b the end and the ID that it has after a bench that is still in
// force. If replicas are refused at the same time, each reports its own bench to
// the others. They are one bench to all, and the smallest of the IDs is
// its ID, in whichever order a replica hears of them. So one replica sends the
// probe, and what becomes of it counts for all.
func (b *bench) follow(current *bench, remote bool) Happening {
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

// idStep is by how much the ID of a bench that grows gets smaller at most. So
// two replicas hardly choose the same, and a bench can grow millions of times.
const idStep = 1 << 40

// cast puts a bench in doubt that began at since, unless it was checked. It
// returns the bench if it is in doubt now. The caller holds the lock.
func (s *slot) cast(since time.Time) *bench {
	if b := s.Load(); b != nil && b.Since.Equal(since) && b.doubt.CompareAndSwap(noDoubt, inDoubt) {
		return b
	}
	return nil
}

// until returns when the bench ends, or returns the zero time if it has ended.
func (s *slot) until(now time.Time) time.Time {
	if b := s.Load(); b != nil && now.Before(b.Until) {
		return b.Until
	}
	return time.Time{}
}
