// Package waiting has lists of requests that wait for a backend, or for a limit
// of their caller.
//
// A request joins a list and gets a [Place] in it. The places are in the order
// of tiers, and within a tier in that of joining. A full list has no place for
// a request, unless it is of a better tier than the last one, of a caller that
// has none yet, or of one that has less than half of the places while another
// has more: otherwise one caller could take them all. The first one is called
// when it may try: at the time that the request before it, or an earlier try of
// its own, has found out (Stay). It goes (Go), stays, or leaves (Leave). After
// one has gone, the next one is called at its first byte or after a pause, so
// that requests go one by one. A request that is refused after it went comes
// back to its place (Stay). Each first byte halves the pause until a request is
// refused again. Otherwise a long list would slow down a backend that accepts
// requests again. If tiers keep shares, the first request of a tier that has
// got its own yields to worse tiers until it tries again.
//
// A list has one timer, and no goroutine: the goroutine of each request waits
// for its own call. Nothing is polled: the code that knows of a change calls
// Wake.
package waiting

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Lists are the lists of a pool. A nil *Lists has none, and no request waits.
type Lists struct {
	duration time.Duration
	places   int
	// apart reports whether each tier has places of its own: tiers keep shares.
	apart bool

	// waiting is how many requests wait. If none does, no lock is taken.
	waiting atomic.Int64

	mu     sync.Mutex
	byKey  map[Key]*list
	joined uint64 // how many requests have joined
	closed bool
}

// Key says what the requests of a list wait for: the backends of a model, or
// the limits of a caller.
type Key struct {
	Caller, Model string
	// Tiers are the service tiers of the requests, if backends may throttle
	// these alone.
	Tiers string
	// Set distinguishes requests that may use only some backends.
	Set uint64
}

// Who is the caller of a request, and the tier of the request.
type Who struct {
	Caller string
	Tier   int
}

// Return is what a try has found out.
type Return struct {
	// At is when the next try may succeed.
	At time.Time
	// Pause is how long after a request the next one goes.
	Pause time.Duration
	// Reason is why the try did not succeed.
	Reason any
	// Yields reports whether the tier has got its share. Until the next try,
	// worse tiers may go.
	Yields bool
}

// Place is the place of one request. No two of its methods are called at the
// same time.
type Place struct {
	lists *Lists
	key   Key
	// who waits. The tier and the number are its order.
	who    Who
	number uint64
	until  time.Time
	wake   chan struct{}
	result Result
	// next is what its latest try has found out.
	next Return
	// in is the list that it is in, or was in before it went in this round.
	in    *list
	round int
}

// Result is what becomes of a request that waits.
type Result string

// The results.
const (
	// Turn: the request may try now. A request that waits has this result once
	// it was sent.
	Turn Result = "sent"
	// Over: it has waited for as long as it may.
	Over Result = "over"
	// Full: the list has no place for it, or none any more.
	Full Result = "full"
	// Left: its client has left.
	Left Result = "left"
	// Stopped: the config is unloaded.
	Stopped Result = "stopped"
)

// New returns the lists for these options, with places for all tiers, or apart
// for each tier. nil: it returns nil.
func New(o *Options, apart bool) *Lists {
	if o == nil {
		return nil
	}
	l := &Lists{duration: time.Duration(o.Duration), places: usualPlaces, apart: apart, byKey: make(map[Key]*list)}
	if o.Places != nil {
		l.places = *o.Places
	}
	return l
}

// Until returns until when a request waits that begins now.
func (l *Lists) Until(now time.Time) time.Time { return now.Add(l.duration) }

// Len returns how many requests wait.
func (l *Lists) Len() int {
	if l == nil {
		return 0
	}
	return int(l.waiting.Load())
}

// Next returns what the first request of a list that goes before one of this
// tier has found out. ok reports whether there is one.
func (l *Lists) Next(now time.Time, key Key, tier int) (r Return, ok bool) {
	if l.Len() == 0 {
		return r, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for p := range l.byKey[key].heads() {
		if p.who.Tier <= tier && (p.who.Tier == tier || !p.yields(now)) {
			return p.next, true
		}
	}
	return r, false
}

// Join gives a request a place, in which it waits until a time at most. If it
// gets none, place is nil. If all are taken, another request may lose its own.
// A request that is first tries at once: perhaps something has changed.
func (l *Lists) Join(now time.Time, key Key, who Who, until time.Time, r Return) (place *Place, none Result) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, Stopped
	}
	if rivals := l.byKey[key].rivals(who); len(rivals) >= l.places {
		loses := l.byKey[key].losesTo(who, rivals)
		if loses == nil {
			return nil, Full
		}
		loses.remove(now)
		loses.end(Full)
	}
	l.joined++
	p := &Place{lists: l, key: key, who: who, number: l.joined, until: until, wake: make(chan struct{}, 1), next: r}
	l.insert(p)
	if p.isHead() {
		p.next.At = now
	}
	p.in.advance(now)
	return p, ""
}

func (l *Lists) insert(p *Place) {
	s := l.byKey[p.key]
	if s == nil {
		s = &list{lists: l, key: p.key, pause: l.pause(p.next)}
		l.byKey[p.key] = s
	}
	p.in = s
	at, _ := slices.BinarySearchFunc(s.places, p, compare)
	s.places = slices.Insert(s.places, at, p)
	l.waiting.Add(1)
}

// pause keeps a full list from lasting longer than a wait.
func (l *Lists) pause(r Return) time.Duration {
	return min(r.Pause, l.duration/time.Duration(l.places))
}

func compare(a, b *Place) int {
	return cmp.Or(cmp.Compare(a.who.Tier, b.who.Tier), cmp.Compare(a.number, b.number))
}

// Wait waits until the request may try, or no longer waits.
func (p *Place) Wait(done <-chan struct{}) Result {
	select {
	case <-p.wake:
	case <-done:
	}
	l := p.lists
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-done:
		p.leave(time.Now())
		return Left
	default:
		return p.result
	}
}

// Stay keeps the place, because a try did not succeed, or gives it back to a
// request that has gone and was refused.
func (p *Place) Stay(now time.Time, r Return) {
	l := p.lists
	l.mu.Lock()
	defer l.mu.Unlock()
	p.next = r
	back := !p.in.has(p)
	if back && !l.closed {
		l.insert(p)
	}
	s := p.in
	if refused := back || !r.Yields; refused {
		s.round++
		s.pause, s.gate = l.pause(r), time.Time{}
	} else if r.Pause > 0 {
		s.pause = l.pause(r)
	}
	if s.called == p {
		s.called = nil
	}
	if s.changed && s.called == nil { // otherwise it counts for the one that tries
		s.changed = false
		s.retry(now)
	}
	if len(s.places) > 0 && s.places[0] != p { // it may go before this one does
		s.places[0].next.At = now
	}
	if l.closed {
		p.remove(now)
		p.end(Stopped)
	}
	s.advance(now)
}

// Go ends the wait of a request that is called: it goes on.
func (p *Place) Go(now time.Time) {
	l := p.lists
	l.mu.Lock()
	defer l.mu.Unlock()
	s := p.in
	p.remove(now)
	p.round = s.round
	s.gate, s.changed = now.Add(s.pause), false
	s.advance(now)
}

// FirstByte records that a request that has gone got the first byte of its
// reply.
func (p *Place) FirstByte(now time.Time) {
	l := p.lists
	if l.Len() == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := p.in
	if l.byKey[s.key] == s && p.round == s.round {
		s.pause /= 2
		s.gate = now
		s.advance(now)
	}
}

// Leave ends the wait of a request that is called, but does not go.
func (p *Place) Leave(now time.Time) {
	p.lists.mu.Lock()
	defer p.lists.mu.Unlock()
	p.leave(now)
}

func (p *Place) leave(now time.Time) {
	if p.in.has(p) {
		p.remove(now)
		p.in.advance(now)
	}
}

// remove takes the request out of its list. If it was the first one or is
// called, the next one tries: it may have more room. If it was the first one of
// its tier, the next one of the tier does.
func (p *Place) remove(now time.Time) {
	s := p.in
	if !s.has(p) {
		return
	}
	wasNext, wasHead := s.called == p || s.places[0] == p, p.isHead()
	s.places = slices.DeleteFunc(s.places, func(other *Place) bool { return other == p })
	s.lists.waiting.Add(-1)
	if s.called == p {
		s.called = nil
	}
	if wasNext {
		s.retry(now)
	} else if next := s.head(p.who.Tier); wasHead && next != nil {
		next.next.At = now
	}
}

// isHead reports whether the request is the first one of its tier.
func (p *Place) isHead() bool { return p.in.head(p.who.Tier) == p }

// yields reports whether worse tiers may go before the request, which has not
// come to its time.
func (p *Place) yields(now time.Time) bool { return p.next.Yields && now.Before(p.next.At) }

func (p *Place) end(r Result) {
	p.result = r
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Wake has the first requests of each list for this caller, or for backends if
// caller is empty, try again, because something has changed.
func (l *Lists) Wake(now time.Time, caller string) {
	if l.Len() == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, s := range l.byKey {
		if key.Caller != caller {
			continue
		}
		s.changed = s.called != nil
		s.retry(now)
		s.advance(now)
	}
}

// Close ends all waits, and no further request waits.
func (l *Lists) Close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, s := range l.byKey {
		for _, p := range slices.Clone(s.places) {
			if p != s.called {
				p.remove(time.Now())
				p.end(Stopped)
			}
		}
		if s.called == nil {
			s.drop()
		}
	}
}
