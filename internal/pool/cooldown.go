package pool

import (
	"sync/atomic"
	"time"
)

// Cooldown is a time in which a backend gets no requests.
type Cooldown struct {
	Reason
	// ID identifies the cooldown, also between replicas. A cooldown that grew
	// has a new ID, which is smaller than before.
	ID uint64
	// Whole reports whether the cooldown covers every model.
	Whole bool
	// Model is the model that cools down. It is empty if the cooldown covers
	// the whole backend, or requests that name no model.
	Model string
	// Tiers are the service tiers whose requests it covers. Those that meet the
	// cooldowns of the usual ones are covered by a cooldown of the usual ones
	// as well. They are UsualTiers if it covers the whole backend.
	Tiers ServiceTiers
	// Operation is the only operation that it covers. It is empty if it covers
	// all of them.
	Operation    string
	Since, Until time.Time
	// Throttle reports whether the backend asked for the cooldown. Otherwise it
	// is for a failure.
	Throttle bool
	// Guess is the length that we guessed for a throttle, because the backend
	// named no time. 0: it named Until.
	Guess time.Duration
	// Cost is the cost of the smallest request that was refused.
	Cost int64
	// Unreachable reports whether the cooldown lasts until the backend is
	// reached. Until is then the time of the next recheck.
	Unreachable bool
	// InDoubt reports, in a snapshot, whether the cooldown is in doubt.
	InDoubt bool
	// Heard reports whether another replica reported the cooldown.
	Heard bool
}

// Scope returns the scope of the cooldown, unless it covers the whole backend.
func (c Cooldown) Scope() Scope { return Scope{c.Model, c.Tiers, c.Operation} }

// inForce reports whether the cooldown is active: it keeps requests away.
func (c *Cooldown) inForce(now time.Time) bool { return c.Unreachable || now.Before(c.Until) }

// Grace returns how long after the cooldown's end all requests wait for the
// result of the probe.
func (c *Cooldown) Grace() time.Duration { return min(time.Second, c.Until.Sub(c.Since)/10) }

// Reason is the reason for a cooldown. The pool only passes it to listeners.
type Reason struct {
	// Class is the class of the backend's reply.
	Class string
	// Status is the reply's HTTP status, or 0 if there was no reply.
	Status int
	// Hint is where the backend said how long the cooldown lasts, if it did.
	Hint string
	// Cause is a more specific word than the class: dns, refused or certificate
	// for an unreachable backend, or the code of the backend's error.
	Cause string
	// Error is the error in full if there was no reply. It contains no secret.
	Error string
}

// cooldownEntry is a cooldown in a slot. Only the times of its probe and its
// check change.
type cooldownEntry struct {
	Cooldown
	// extended is when the backend last asked for more.
	extended time.Time
	// probe is when the cooldown's probe was sent.
	probe trial
	// check is when a request was sent to check a cooldown that is in doubt.
	check trial
	// promised is until when the backend itself asked for the cooldown. The
	// rest of the cooldown is a guess, and tried is when a request last tried
	// the backend during that.
	promised time.Time
	tried    trial
	// doubt is one of noDoubt, inDoubt and doubtOver.
	doubt atomic.Int32
	// reporter reports the cooldown to its listeners.
	reporter *Pool
	// told reports whether the listeners know that the cooldown is over.
	told atomic.Bool
	// classes are the classes of the reasons that the cooldown had so far.
	classes []string
	// causes are the causes for which the backend was unreachable so far,
	// during the cooldown.
	causes []string
}

// maxCauses is how many causes a cooldown is known for. Other replicas may
// report any.
const maxCauses = 16

const (
	noDoubt int32 = iota
	inDoubt
	doubtOver // a check was refused
)

// checkShare is how many times smaller than the refused request one must be to
// check a cooldown that is in doubt.
const checkShare = 4

// untried is for how long after its end a cooldown for a failure waits for a
// probe that can be sent again. If only requests come that cannot be sent
// again, one of them is then the probe: otherwise the backend would never be
// used again.
const untried = time.Minute

// overdue is for how long after its end a cooldown of which nothing was
// executed waits for a probe that can go on elsewhere.
const overdue = 10 * time.Second

// While no other member is left, a guess is tried again and again: each time
// after a part of it has passed, but no sooner than the pause.
const (
	guessParts = 20
	guessPause = 250 * time.Millisecond
)

// trial is a request that goes first: when it was sent, as nanoseconds since
// its cooldown began, plus 1. 0: no request was sent.
type trial struct{ atomic.Int64 }

func (t *trial) at(c *cooldownEntry) time.Time { return c.Since.Add(time.Duration(t.Load() - 1)) }

func (t *trial) claim(c *cooldownEntry, now time.Time) bool {
	return t.CompareAndSwap(0, int64(now.Sub(c.Since))+1)
}

// pending reports whether the trial is too young for its silence to mean that
// it was not refused. A throttled backend refuses at once.
func (t *trial) pending(c *cooldownEntry, now time.Time) bool {
	return t.Load() != 0 && now.Before(t.at(c).Add(c.Grace()))
}

// newCooldownEntry returns the entry of a cooldown that the backend asked for
// now, and that the reporter reports.
func newCooldownEntry(c Cooldown, reporter *Pool, now time.Time) *cooldownEntry {
	e := &cooldownEntry{Cooldown: c, extended: now, reporter: reporter}
	if c.Guess == 0 {
		e.promised = c.Until
	}
	return e
}
