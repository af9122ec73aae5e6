package limiter

import (
	"cmp"
	"hash/maphash"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// The maximum of concurrent requests holds for all replicas together. Each
// replica reports how many requests of a caller it has in flight, and adds up
// what the others report. As of other limits, it may use its part of what is
// left immediately. A request that needs more waits as a [Claim] until the
// others know of it.
//
// Unlike use, the number in flight also falls, and others may hear that later.
// So what counts as known is the smallest number that any of them may believe:
// the smallest of the latest report that has surely arrived and of all later
// ones. The others leave room for that many, so that a replica needs no part
// for a request that replaces one that has ended. And a report has the largest
// number since the report before it, so that a busy replica does not lose its
// room whenever a request ends.
//
// Requests at another replica count while that replica is heard. When it has
// vanished, it has probably crashed. But it may also have lost only its
// connection, and use an equal part on its own. So for a while at most that
// much is held back for it, as of other limits: see Hold. The same holds for a
// replica whose report comes before its sign of life.
//
// A replica that does not hear the others may have an equal part of the
// maximum, and at least one request. In the first minute, requests that the
// others had before still run, and it takes nothing from the room for these.
//
// An upload counts only at its own replica, until the request is admitted. If
// others counted it, uploads at two replicas could refuse each other.

// concurrent is the part of a caller's state that replicas need to share its
// maximum of concurrent requests. The caller's mutex guards it.
type concurrent struct {
	// peak is the largest number of requests in flight since the latest report.
	// reported is the number in that report.
	peak, reported int64
	// told is the smallest number that the other replicas may believe. sent is
	// the smallest number of the reports since the latest one that is not yet
	// confirmed. It is negative if there is none.
	told, sent int64
	// figures are the numbers at the other replicas, ordered by key. others is
	// their sum, which is valid until the time until, or for ever if that is 0.
	figures       []flightFigure
	others, until int64
	// apart is when this replica stopped hearing the others.
	apart int64
	// left reports whether this replica leaves the others. Its report then has
	// no requests.
	left bool
}

// flightFigure is the number of requests in flight at another replica.
type flightFigure struct {
	replica string
	// key is a hash of the replica's id, and version orders its reports, as in
	// figure. heard is when the latest one was heard.
	key, version uint64
	heard, n     int64
	// runs reports whether the replica counts as running. If not, at most an
	// equal part of the maximum counts until the time heldUntil.
	runs      bool
	heldUntil int64
}

// maxInFlight is the largest number of requests that another replica can
// report, so that sums do not overflow.
const maxInFlight = 1 << 32

// unknownFor is how long the requests of a replica count that is not known to
// run. Its sign of life comes within that time. repeated is the longest time
// between two reports of a replica that runs.
const unknownFor, repeated = 5 * time.Second, 90 * time.Second

// unheardFor is how long requests that ran at the other replicas when this one
// stopped hearing them count as still running.
const unheardFor = int64(time.Minute)

// begin counts a further request in flight.
func (c *Limiter) begin() {
	c.inFlight++
	c.concurrent.peak = max(c.concurrent.peak, c.admittedInFlight())
}

// admittedInFlight returns how many requests in flight the other replicas
// should know of: all but uploads.
func (c *Limiter) admittedInFlight() int64 { return int64(c.inFlight - c.uploads) }

// elsewhere returns how many requests are in flight at the other replicas, as
// far as that is known.
func (c *Limiter) elsewhere(at int64) int64 {
	if until := c.concurrent.until; until != 0 && at >= until {
		c.addUpInFlight(at)
	}
	return c.concurrent.others
}

// addUpInFlight adds up the requests at the other replicas.
func (c *Limiter) addUpInFlight(at int64) {
	f := &c.concurrent
	f.others, f.until = 0, 0
	if c.sharing == (Sharing{}) {
		return // a report that comes after the end of sharing
	}
	shared := c.sharing.Replicas
	if r := c.reports.running.Load(); r != nil {
		shared = max(shared, r.shared)
	}
	for i := range f.figures {
		switch other := &f.figures[i]; {
		case other.runs:
			f.others += other.n
		case at < other.heldUntil:
			f.others += min(other.n, c.equal(shared))
			if f.until == 0 || other.heldUntil < f.until {
				f.until = other.heldUntil
			}
		}
	}
}

// equal returns an equal part of the maximum for each of some replicas, at
// least one request.
func (c *Limiter) equal(replicas int) int64 { return max(1, int64(c.maxRequests/max(1, replicas))) }

// free returns how many requests the other replicas leave.
func (c *Limiter) free(at int64) int64 { return max(0, int64(c.maxRequests)-c.elsewhere(at)) }

// slots returns how many requests this replica may have in flight without
// asking the others.
func (c *Limiter) slots(at int64) int64 {
	n, free := int64(max(1, c.sharing.Replicas)), c.free(at)
	slots := free
	if told := c.concurrent.told; told < free {
		slots = told + (free-told)/n
	}
	switch {
	case !c.sharing.Apart:
		return slots
	case at-c.concurrent.apart < unheardFor:
		return min(c.equal(c.sharing.Replicas), max(1, slots))
	}
	return c.equal(c.sharing.Replicas)
}

// tooMany returns the refusal of a further request if this replica has as many
// requests in flight as slots says, or nil.
func (c *Limiter) tooMany(at int64, slots func(at int64) int64) *ratelimit.Refusal {
	if c.maxRequests == 0 {
		return nil
	}
	used, most := int64(c.inFlight), slots(at)
	if used < most {
		return nil
	}
	r := &ratelimit.Refusal{Reason: ratelimit.TooMany, Allowed: int64(c.maxRequests), Used: used + c.elsewhere(at),
		Requested: 1, Wait: time.Second}
	if c.sharing.Apart {
		r.Allowed, r.Used = most, used
	}
	return r
}

// Upload counts a request as in flight while its body is received, before it
// can be admitted. If the caller has too many requests at all replicas, it
// returns the refusal. Otherwise Uploaded must be called later. An upload needs
// no part: no backend gets the request before it is admitted.
func (c *Limiter) Upload() *ratelimit.Refusal {
	c.mu.Lock()
	defer c.mu.Unlock()
	slots := c.free
	if c.sharing.Apart {
		slots = c.slots
	}
	refusal := c.tooMany(c.clock.latest, slots)
	if refusal == nil {
		c.inFlight++
		c.uploads++
	}
	return refusal
}

// Uploaded records that the body was received or that its upload was aborted.
func (c *Limiter) Uploaded() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inFlight--
	c.uploads--
}

// wait counts a request that waits because this replica has its part. No more
// of them wait than may be in flight, because each holds its body. If ok is
// true, waited must be called later.
func (c *Limiter) wait() (ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ok = c.waiting < c.maxRequests; ok {
		c.waiting++
	}
	return ok
}

func (c *Limiter) waited() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting--
}

// tellInFlight requests a report if the other replicas should know of the
// requests in flight. While more than half of the maximum is in flight, that is
// so for each further request, because little is left to make up for it. hurry
// reports whether they should know other changes soon.
func (c *Limiter) tellInFlight(at int64) (hurry bool) {
	if c.maxRequests == 0 {
		return false
	}
	f := &c.concurrent
	hurry = max(f.peak, f.reported)+c.elsewhere(at) > int64(c.maxRequests)/2
	if more := f.peak - f.reported; more > 0 && (hurry || more*urgentPart > c.slots(at)-f.told) {
		c.reports.hurry()
	}
	return hurry
}

// ReportInFlight returns the number of requests in flight for a report. It is
// called after Report. ok is false if the caller has no maximum.
func (c *Limiter) ReportInFlight() (n int64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := &c.concurrent
	switch {
	case c.maxRequests > 0 && !f.left:
		n = f.peak
	case f.reported == 0:
		return 0, false
	}
	if f.peak = c.admittedInFlight(); n > f.peak {
		c.changes.Add(1) // the next report has the lower number
	}
	f.reported, f.told = n, min(f.told, n)
	if f.sent < 0 {
		f.sent = n
	}
	f.sent = min(f.sent, n)
	return n, true
}

// confirmed records that the reports since the latest one that was not
// confirmed are what the other replicas may know. more reports whether there
// are more requests now.
func (f *concurrent) confirmed() (more bool) {
	if f.sent < 0 {
		return false
	}
	f.told, f.sent = f.sent, -1
	return f.peak > f.told
}

// Leave makes the next report say that no request is in flight here, because
// the other replicas no longer count those of this one.
func (cs *Limiters) Leave() {
	cs.mu.RLock()
	defer cs.mu.RUnlock()
	for _, c := range cs.byID {
		c.mu.Lock()
		if c.concurrent.left = true; c.concurrent.reported > 0 {
			c.changes.Add(1)
		}
		c.mu.Unlock()
	}
}

// HeardInFlight records how many requests another replica has in flight for a
// caller. Version is that of [Limiters.Heard].
func (cs *Limiters) HeardInFlight(now time.Time, id ratelimit.CallerID, replica string, version uint64, n int64) {
	if c := cs.heardOf(now, id); c != nil {
		c.HeardInFlight(now, replica, version, n)
	}
}

// HeardInFlight records how many requests another replica has in flight. Of its
// reports, the one with the greatest version counts.
func (c *Limiter) HeardInFlight(now time.Time, replica string, version uint64, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n < 0 {
		return
	}
	at, key := c.roll(now), maphash.String(seed, replica)
	f := &c.concurrent
	i, known := slices.BinarySearchFunc(f.figures, key,
		func(f flightFigure, key uint64) int { return cmp.Compare(f.key, key) })
	isRecent := now.Sub(time.UnixMicro(int64(min(version, 1<<62)))) < repeated
	switch {
	case known && f.figures[i].version >= version:
		return
	case !known:
		runs := c.reports.running.Load().runs(replica)
		if !runs && !isRecent || len(f.figures) == maxFigures {
			return
		}
		f.figures = slices.Insert(f.figures, i, flightFigure{replica: replica, key: key, runs: runs})
	}
	other := &f.figures[i]
	if n = min(n, maxInFlight); n == other.n && other.runs {
		other.version, other.heard = version, at
		return
	}
	other.version, other.heard, other.n = version, at, n
	if !other.runs && isRecent {
		other.heldUntil = max(other.heldUntil, at+int64(unknownFor))
	}
	c.addUpInFlight(at)
	if c.sharing.Replicas > 1 && f.peak > f.reported {
		c.tellInFlight(at) // less is left than when these requests were admitted
	}
}

// running are the other replicas whose requests in flight count. It does not
// change.
type running struct {
	// writers are prefixes of the ids of those that run.
	writers  []string
	vanished []Vanished
	// shared is the number of all of them, and this one.
	shared int
}

// runs reports whether a replica counts as running.
func (r *running) runs(replica string) bool {
	return r != nil && slices.ContainsFunc(r.writers,
		func(writer string) bool { return strings.HasPrefix(replica, writer) })
}

// heldUntil returns until when the requests of a replica count that does not
// run. It returns before if it has not vanished.
func (r *running) heldUntil(replica string, before, ahead int64) int64 {
	for _, v := range r.vanished {
		if strings.HasPrefix(replica, v.Writer) {
			return v.Until.UnixNano() + ahead
		}
	}
	return before
}

// Running sets the replicas whose requests in flight count: those that run, by
// prefixes of their ids, and those that have vanished. Of the latter, at most
// an equal part of a caller's maximum counts, which shared replicas share.
func (cs *Limiters) Running(now time.Time, writers []string, vanished []Vanished, shared int) {
	cs.mu.RLock()
	defer cs.mu.RUnlock()
	if r := cs.reports.running.Load(); r != nil && r.shared == shared && slices.Equal(r.writers, writers) &&
		slices.Equal(r.vanished, vanished) {
		return
	}
	cs.reports.running.Store(&running{writers, vanished, shared})
	for _, c := range cs.byID {
		c.countRunning(now)
	}
}

// countRunning applies the set of running replicas. It forgets those that have
// ended after a while: the report of a replica that starts may come a little
// before its sign of life.
func (c *Limiter) countRunning(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := &c.concurrent
	if f.figures == nil {
		return
	}
	at, all := c.roll(now), c.reports.running.Load()
	for i := range f.figures {
		other := &f.figures[i]
		ran := other.runs
		if other.runs = all.runs(other.replica); ran && !other.runs {
			other.heldUntil = 0 // it has ended, unless it has vanished
		}
		other.heldUntil = all.heldUntil(other.replica, other.heldUntil, c.clock.ahead)
	}
	f.figures = slices.DeleteFunc(f.figures, func(other flightFigure) bool {
		return !other.runs && at >= other.heldUntil && at-other.heard >= int64(repeated)
	})
	c.addUpInFlight(at)
}

// shift moves all times, because the clock was set.
func (f *concurrent) shift(by int64) {
	f.apart += by
	if f.until != 0 {
		f.until += by
	}
	for i := range f.figures {
		f.figures[i].heard += by
		f.figures[i].heldUntil += by
	}
}
