package pool

import (
	"sync/atomic"
	"time"
)

// Cooldown is a period in which a backend gets no requests of a scope.
type Cooldown struct {
	Reason
	// ID identifies the cooldown on all replicas. Each extension gives the
	// cooldown a smaller ID.
	ID uint64
	// Whole reports whether the cooldown covers every model.
	Whole bool
	// Model is the model that cools down. It is empty if the cooldown covers
	// the whole backend, or requests that name no model.
	Model string
	// Tiers is the group of service tiers that it covers. A cooldown of the
	// usual tiers also covers the groups that share their limits: see
	// [ServiceTiers]. It is UsualTiers if the cooldown covers the whole
	// backend.
	Tiers ServiceTiers
	// Operation is the only operation that it covers. It is empty if the
	// cooldown covers all operations.
	Operation    string
	Since, Until time.Time
	// Throttle reports whether the backend asked for the cooldown. Otherwise it
	// is for a failure.
	Throttle bool
	// Guess is the guessed length of a throttle whose backend named no time. It
	// is 0 if the backend named the time Until.
	Guess time.Duration
	// AsksAtOnce reports whether the backend asked to be called again
	// immediately, so that it is not known when it accepts a request.
	AsksAtOnce bool
	// Cost is the cost of the smallest refused request.
	Cost int64
	// Unreachable reports whether the cooldown lasts until the backend is
	// reached. Until is then the time of the next recheck.
	Unreachable bool
	// InDoubt reports whether the cooldown is in doubt. Only snapshots set it.
	InDoubt bool
	// Heard reports whether another replica reported the cooldown.
	Heard bool
}

// Scope returns the scope of a cooldown that does not cover the whole backend.
func (c Cooldown) Scope() Scope { return Scope{c.Model, c.Tiers, c.Operation} }

// inForce reports whether the cooldown is active, so that it keeps requests
// away.
func (c *Cooldown) inForce(now time.Time) bool { return c.Unreachable || now.Before(c.Until) }

// Grace returns how long after the end of the cooldown all other requests wait
// for the result of its probe.
func (c *Cooldown) Grace() time.Duration { return min(time.Second, c.Until.Sub(c.Since)/10) }

// Reason is the reason for a cooldown. The pool passes it to listeners. Of its
// fields, it uses Class, Status and Cause: they decide whether a further
// refusal gives the cooldown a new reason, and whether the backend has executed
// a request.
type Reason struct {
	// Class is the class of the backend's reply.
	Class string
	// Status is the HTTP status of the reply. It is 0 if there was no reply.
	Status int
	// Hint is where the backend said how long the cooldown lasts, if it did.
	Hint string
	// Cause is more specific than the class: dns, refused or certificate for an
	// unreachable backend, or the code of the backend's error.
	Cause string
	// Error is the full text of the error if there was no reply. It contains no
	// secret.
	Error string
}

// cooldownEntry is a cooldown in a slot. After it is stored, only its atomic
// fields change.
type cooldownEntry struct {
	Cooldown
	// extended is when the backend last asked for a longer cooldown.
	extended time.Time
	// probe is when the cooldown's probe was sent.
	probe trial
	// check is when a request was sent to check a cooldown that is in doubt.
	check trial
	// promised is the end of the time that the backend itself named. The rest
	// of the cooldown is a guess, during which a request may try the backend
	// now and then: tried is the latest such attempt.
	promised time.Time
	tried    trial
	// doubt is one of noDoubt, inDoubt and doubtOver.
	doubt atomic.Int32
	// reporter reports the cooldown to its listeners.
	reporter *Pool
	// told reports whether the listeners know that the cooldown is over.
	told atomic.Bool
	// classes are the classes of all reasons for the cooldown so far.
	classes []string
	// causes are all causes so far, if the backend is unreachable.
	causes []string
}

// maxCauses limits the causes of a cooldown, because another replica may report
// any text as a cause.
const maxCauses = 16

const (
	noDoubt int32 = iota
	inDoubt
	doubtOver // a check was refused
)

// checkShare is the factor by which a request must be smaller than the refused
// one to check a cooldown in doubt.
const checkShare = 4

// untried is how long after the end of a cooldown for a failure only a
// retryable request may be its probe. After that, any request may be the probe:
// if all requests are of a kind that cannot be retried, the backend would
// otherwise never be used again.
const untried = time.Minute

// overdue is how long after the end of a cooldown only a request that can fail
// over may be its probe. It applies to cooldowns that were started only by
// refusals, without an execution.
const overdue = 10 * time.Second

// While no other member is left, requests try a throttle of guessed length from
// time to time: after each 1/guessParts of the guess, but not within guessPause
// of the previous try.
const (
	guessParts = 20
	guessPause = 250 * time.Millisecond
)

// trial records when a single request was sent ahead of all others, as
// nanoseconds since the beginning of the cooldown, plus 1. It is 0 if no
// request was sent.
type trial struct{ atomic.Int64 }

func (t *trial) at(c *cooldownEntry) time.Time { return c.Since.Add(time.Duration(t.Load() - 1)) }

// trialAt returns the value of a trial that was sent at this time.
func (c *cooldownEntry) trialAt(at time.Time) int64 { return int64(at.Sub(c.Since)) + 1 }

// pending reports whether the trial was sent so recently that it may still be
// refused. A throttling backend refuses immediately, so no refusal within the
// grace means that the backend accepted the request.
func (t *trial) pending(c *cooldownEntry, now time.Time) bool {
	return t.Load() != 0 && now.Before(t.at(c).Add(c.Grace()))
}

// newCooldownEntry returns the entry of a cooldown that starts or grows now.
// The reporter reports its end.
func newCooldownEntry(c Cooldown, reporter *Pool, now time.Time) *cooldownEntry {
	e := &cooldownEntry{Cooldown: c, extended: now, reporter: reporter}
	if c.Guess == 0 {
		e.promised = c.Until
	}
	return e
}
