// Package waiting has queues of requests that wait for a backend, or for a
// limit of their caller.
//
// There is a queue for each backend and model, and one for each caller's
// limits. Requests that cost no tokens have a queue of their own there, because
// they do not wait for limits of tokens. A request that several backends may
// serve waits in the queues of all of them, and leaves all at once.
//
// A queue has as many places as its backend is expected to accept requests
// before they would give up ([Return.Places]). Each request holds a place in
// one of its queues: the one with the most free places. If none is free, the
// request takes the place of the last one that comes after it in the order, or
// does not wait at all. A request that loses its place waits no longer, unless
// another of its queues has a free one. If tiers keep shares, each has places
// of its own.
//
// The order in a queue is by tier, then by turns of the callers, then by
// arrival. The turns are start-time fair queuing: the second request of a
// caller comes after the first ones of the others, so that no caller takes the
// places of all.
//
// The first request of a queue is called when the backend is expected to accept
// it. It then goes (Go), stays because it found out about a later time (Stay),
// or leaves (Leave). The first one that goes after the backend throttled is a
// probe: the others follow at the first byte of its reply, or after a pause.
// From then on they follow each other as fast as the backend accepts requests
// ([Return.Every]). A request that is refused after it went comes back to the
// front (Stay). If tiers keep shares, the first request of a tier that has got
// its own yields to worse tiers until its time comes.
//
// A queue has one timer and no goroutine: the goroutine of each request waits
// for its own call. Nothing is polled: the code that knows of a change calls
// Wake.
package waiting

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Longest is the longest wait that may be configured.
const Longest = 10 * time.Second

// maxPlaces is how many places a queue has at most.
const maxPlaces = 1000

// probeParts divides the longest wait: the requests behind a probe wait for no
// longer than one part.
const probeParts = 20

// shortestGap is the shortest time between two requests of a queue, so that
// they reach the backend in their order.
const shortestGap = time.Millisecond

// maxBodies is how many bytes the bodies of all requests that wait in this
// process may have together.
const maxBodies = 256 << 20

var bodies atomic.Int64

// mostBodies returns how large the bodies that wait may be in all before one
// more of this tier may not. Each tier leaves a ninth to each better one, and
// requests that wait for a limit of their caller leave half to the others.
func mostBodies(key Key, tier int) int64 {
	if key.Caller != "" {
		return maxBodies / 2
	}
	return maxBodies * int64(9-tier) / 9
}

// Queues are the queues of a pool. A nil *Queues has none, and no request
// waits.
type Queues struct {
	duration time.Duration
	// apart reports whether each tier has places of its own, because tiers keep
	// shares.
	apart bool

	// waiting is how many requests wait. If none does, no lock is taken.
	waiting atomic.Int64

	mu     sync.Mutex
	byKey  map[Key]*queue
	joined uint64 // how many requests have joined
	closed bool
}

// Key says what the requests of a queue wait for: a backend, or the limits of a
// caller.
type Key struct {
	Caller string
	// Backend is the index of the backend, and Model its name of the model, or
	// a model for which the caller has limits of its own.
	Backend int
	Model   string
	// Tiers are the service tiers of the requests, if the backend may throttle
	// these alone.
	Tiers string
	// Tokenless reports whether the requests cost no tokens, so that only
	// limits of requests apply. It is false for backends.
	Tokenless bool
}

// Waiter is the caller of a request, and the tier of the request.
type Waiter struct {
	Caller string
	Tier   int
}

// Return says when a backend, or a limit of the caller, may accept a request.
type Return struct {
	Key Key
	// At is when the next try may succeed.
	At time.Time
	// Places is how many requests like this one are accepted before it gives
	// up. Less than one counts as one.
	Places float64
	// Pause is how long the others wait for the first byte of the first one.
	Pause time.Duration
	// Every is how long after a request the next one may go.
	Every time.Duration
	// Reason is why the try did not succeed.
	Reason any
	// Yields reports whether the tier has got its share. Until At, worse tiers
	// may go.
	Yields bool
}

// Ticket is what a request has while it waits: its positions in queues, and its
// place. No two of its methods are called at the same time.
type Ticket struct {
	of     *Queues
	waiter Waiter
	number uint64 // in the order of arrival
	until  time.Time
	size   int64 // of its body
	// positions are where it waits, or where it last did. waits reports whether
	// it does.
	positions []*position
	waits     bool
	// holds is the queue in which it holds a place.
	holds *queue
	// called is the queue that has called it. It is nil unless it tries right
	// now. changed reports whether Wake was called since.
	called  *queue
	changed bool
	wake    chan struct{}
	result  Result
	// probed is the queue whose probe the request was when it went.
	probed *queue
}

// Result is what becomes of a request that waits.
type Result string

// The results.
const (
	// Called: the request may try now. A request that waits has this result
	// once it was sent.
	Called Result = "sent"
	// Over: it has waited for as long as it may.
	Over Result = "over"
	// Full: there is no place for it, or none any more.
	Full Result = "full"
	// Left: its client has left.
	Left Result = "left"
	// Stopped: the config is unloaded.
	Stopped Result = "stopped"
)

// New returns the queues for waits of this duration, or nil if it is 0. The
// places are for all tiers together, or apart for each tier.
func New(duration time.Duration, apart bool) *Queues {
	if duration == 0 {
		return nil
	}
	return &Queues{duration: duration, apart: apart, byKey: make(map[Key]*queue)}
}

// Until returns until when a request waits that begins now.
func (l *Queues) Until(now time.Time) time.Time { return now.Add(l.duration) }

// Len returns how many requests wait.
func (l *Queues) Len() int {
	if l == nil {
		return 0
	}
	return int(l.waiting.Load())
}

// Ahead returns the return of a request that goes before one that comes now. ok
// reports whether there is one, or whether the next one of the queue must not
// go yet. t is the ticket of a request that has waited, or nil. A request that
// yields goes only before others of its caller: what is left may be due to
// other callers of its tier.
func (l *Queues) Ahead(now time.Time, key Key, waiter Waiter, t *Ticket) (r Return, ok bool) {
	if l.Len() == 0 {
		return r, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	q := l.byKey[key]
	if q == nil {
		return r, false
	}
	s := q.positionOf(t, waiter, l.joined+1)
	for head := range q.heads() {
		isFirst := head.Ticket != t && compare(head, s) < 0 && (head.waiter == waiter || !head.yields(now))
		if isFirst || q.gate.After(now) {
			return head.Return, true
		}
	}
	return r, false
}

// Join gives a request a ticket, with which it waits until a time at most. size
// is that of its body. If there is no place for it, t is nil. A request that
// becomes the first one tries at once: perhaps something has changed.
func (l *Queues) Join(now time.Time, waiter Waiter, until time.Time, size int,
	returns ...Return) (t *Ticket, none Result) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, Stopped
	}
	if len(returns) == 0 || bodies.Load()+int64(size) > mostBodies(returns[0].Key, waiter.Tier) {
		return nil, Full
	}
	l.joined++
	t = &Ticket{of: l, waiter: waiter, number: l.joined, until: until, size: int64(size), wake: make(chan struct{}, 1)}
	t.enter(now, returns)
	if !t.hold() && !t.displace(now) {
		t.exit()
		t.advance(now)
		return nil, Full
	}
	t.advance(now)
	return t, ""
}

// Wait waits until the request may try, or no longer waits.
func (t *Ticket) Wait(done <-chan struct{}) Result {
	timer := time.NewTimer(time.Until(t.until))
	defer timer.Stop()
	select {
	case <-t.wake:
	case <-timer.C:
	case <-done:
	}
	l, now := t.of, time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-done:
		t.leave(now)
		return Left
	default:
	}
	t.advance(now) // if its turn comes just now, only a timer is late
	if t.result == "" {
		t.leave(now)
		t.result = Over
	}
	return t.result
}

// Stay keeps the place, because a try did not succeed, or gives it back to a
// request that has gone and was refused.
func (t *Ticket) Stay(now time.Time, returns ...Return) {
	l := t.of
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		t.leave(now)
		t.end(Stopped)
		return
	}
	changed, before := t.changed, t.positions
	t.exit()
	t.result = "" // from here on, it may be called: a request that it displaces advances its queues
	select {
	case <-t.wake: // the wait ended at the same time
	default:
	}
	t.enter(now, returns)
	if !t.hold() && !t.displace(now) {
		t.holdIn(t.positions[0].in) // one more than is expected to be accepted
	}
	if changed {
		for _, s := range t.positions {
			s.At = now
		}
	}
	advance(now, before)
	t.advance(now)
}

// Go ends the wait of a request that is called: it goes to the backend of a
// queue.
func (t *Ticket) Go(now time.Time, key Key) {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	for _, s := range t.positions {
		s.line().turn = max(s.line().turn, s.turn)
		if q := s.in; q.key == key {
			q.follow(s, now)
		}
	}
	t.leave(now)
}

// FirstByte records that a request that has gone got the first byte of its
// reply.
func (t *Ticket) FirstByte(now time.Time) {
	if t.of.Len() == 0 {
		return
	}
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	if q := t.probed; q != nil && q.probe == t {
		q.gate = q.open
		q.advance(now)
	}
}

// Leave ends the wait of a request that is called, but does not go.
func (t *Ticket) Leave(now time.Time) {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	t.leave(now)
}

func (t *Ticket) leave(now time.Time) {
	t.exit()
	t.advance(now)
}

// Wake makes the first requests of the queues for this caller and for its
// limits of these models, or of all queues for backends if caller is empty, try
// again, because something has changed.
func (l *Queues) Wake(now time.Time, caller string, models ...string) {
	if l.Len() == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if caller != "" {
		for _, tokenless := range [...]bool{true, false} {
			l.byKey[Key{Caller: caller, Tokenless: tokenless}].retry(now)
			for _, model := range models {
				l.byKey[Key{Caller: caller, Model: model, Tokenless: tokenless}].retry(now)
			}
		}
		return
	}
	for key, q := range l.byKey {
		if key.Caller == "" {
			q.retry(now)
		}
	}
}

// Close ends all waits, and no further request waits.
func (l *Queues) Close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, q := range l.byKey {
		for i := range q.lines {
			for _, s := range slices.Clone(q.lines[i].positions) {
				if s.called == nil && s.waits {
					s.exit()
					s.end(Stopped)
				}
			}
		}
		q.advance(time.Now())
	}
}
