package waiting

import (
	"cmp"
	"iter"
	"slices"
	"time"
)

// queue holds the requests that wait for one thing, such as a backend or a
// limit of a caller. When that accepts requests again, the queue calls its
// first request, which then tries. The next request is called after that one
// has gone or has given up.
//
// The requests of a more important tier are first. Within a tier, the callers
// take turns: a caller's next request gets the turn after that of its latest
// one, or the tier's current turn if that is higher. So a caller with a hundred
// waiting requests does not keep away one with a single request. Within a turn,
// the request that came first is first.
//
// After a throttle, requests do not go all at once, because only a reply shows
// whether the backend has room again. The first one to go is a probe. The next
// one goes when the probe has its first byte or has taken long, and the others
// follow at intervals: see gate.
//
// The lock of its Queues guards a queue.
type queue struct {
	of  *Queues
	key Key
	// lines has the requests of each tier.
	lines []line
	// called is the request that the queue has called and that tries right now,
	// or nil.
	called *Ticket
	// probe is the first request that has gone since the backend throttled. It
	// is nil if none has.
	probe *Ticket
	// gate is when the next request may go because of the one before. When the
	// probe has its first byte, the next one may go at open.
	gate, open time.Time
	timer      *time.Timer
}

// line has the requests of one tier in a queue, in order.
type line struct {
	positions []*position
	// places is how many of them hold a place in this queue.
	places int
	// first is the request that was first when the queue last advanced.
	first *Ticket
	// turn is the highest turn of those that have gone, and callers are those
	// of which requests wait.
	turn    uint64
	callers map[string]turns
}

// turns are the turns of a caller's requests in a line.
type turns struct {
	waiting int
	last    uint64
}

// position is a request in a queue. Its tier, turn and number are its order.
type position struct {
	*Ticket
	in   *queue
	turn uint64
	Return
}

func (s *position) line() *line { return &s.in.lines[s.waiter.Tier] }

func compare(a, b *position) int {
	return cmp.Or(cmp.Compare(a.waiter.Tier, b.waiter.Tier), cmp.Compare(a.turn, b.turn),
		cmp.Compare(a.number, b.number))
}

// yields reports whether worse tiers may go before the request, whose time has
// not come.
func (s *position) yields(now time.Time) bool { return s.Yields && now.Before(s.At) }

// positionOf returns the position in the queue of a request that comes now, or
// that comes back with its ticket.
func (q *queue) positionOf(t *Ticket, waiter Waiter, number uint64) *position {
	s := &position{Ticket: t, in: q}
	if t == nil {
		s.Ticket = &Ticket{waiter: waiter, number: number}
	}
	if waiter.Tier < len(q.lines) {
		l := &q.lines[waiter.Tier]
		s.turn = l.turn
		if caller, ok := l.callers[waiter.Caller]; ok {
			s.turn = max(l.turn, caller.last+1)
		}
	}
	for _, before := range s.positions {
		if before.in.key == q.key {
			s.turn = min(s.turn, before.turn)
		}
	}
	return s
}

// enter puts the request into the queues of its returns.
func (t *Ticket) enter(now time.Time, returns []Return) {
	l := t.of
	positions := make([]*position, 0, len(returns))
	for _, r := range returns {
		q := l.byKey[r.Key]
		if q == nil {
			q = &queue{of: l, key: r.Key}
			l.byKey[r.Key] = q
		}
		for len(q.lines) <= t.waiter.Tier {
			q.lines = append(q.lines, line{callers: make(map[string]turns)})
		}
		if r.At.After(now) && !r.Yields || q.probe == t { // it throttles
			q.probe, q.gate = nil, time.Time{}
		}
		s := q.positionOf(t, t.waiter, t.number)
		s.Return, s.Places = r, min(max(r.Places, 1), maxPlaces)
		line := s.line()
		at, _ := slices.BinarySearchFunc(line.positions, s, compare)
		line.positions = slices.Insert(line.positions, at, s)
		caller := line.callers[t.waiter.Caller]
		line.callers[t.waiter.Caller] = turns{caller.waiting + 1, max(caller.last, s.turn)}
		positions = append(positions, s)
	}
	t.positions, t.waits = positions, true
	l.waiting.Add(1)
	bodies.Add(t.size)
}

// exit takes the request out of its queues, if it waits.
func (t *Ticket) exit() {
	if t.called != nil {
		t.called.called = nil
	}
	t.called, t.changed = nil, false
	if !t.waits {
		return
	}
	t.holdIn(nil)
	for _, s := range t.positions {
		line := s.line()
		if at, ok := slices.BinarySearchFunc(line.positions, s, compare); ok {
			line.positions = slices.Delete(line.positions, at, at+1)
		}
		caller := line.callers[t.waiter.Caller]
		if caller.last == s.turn && s.turn > 0 { // the caller's next request gets this turn
			caller.last--
		}
		if caller.waiting--; caller.waiting > 0 {
			line.callers[t.waiter.Caller] = caller
		} else {
			delete(line.callers, t.waiter.Caller)
		}
	}
	t.waits = false
	t.of.waiting.Add(-1)
	bodies.Add(-t.size)
}

// hold gives the request a place in the queue that has the most free ones. It
// reports false if none is free.
func (t *Ticket) hold() bool {
	var into *queue
	most := .5 // rounded
	for _, s := range t.positions {
		if free := s.Places - float64(s.in.taken(t.waiter.Tier)); free >= most {
			into, most = s.in, free
		}
	}
	if into == nil {
		return false
	}
	t.holdIn(into)
	return true
}

func (t *Ticket) holdIn(q *queue) {
	if t.holds != nil {
		t.holds.lines[t.waiter.Tier].places--
	}
	if t.holds = q; q != nil {
		q.lines[t.waiter.Tier].places++
	}
}

// taken returns how many places are taken from a tier.
func (q *queue) taken(tier int) (n int) {
	for i := range q.lines {
		if i == tier || !q.of.apart {
			n += q.lines[i].places
		}
	}
	return n
}

// displace takes the place of the last request that comes after this one. It
// reports false if there is none.
func (t *Ticket) displace(now time.Time) bool {
	for _, s := range t.positions {
		last := s.in.lastHolder(t.waiter.Tier)
		if last == nil || compare(last, s) <= 0 {
			continue
		}
		t.holdIn(s.in)
		if last.called == nil { // otherwise it tries right now
			last.holdIn(nil)
			if !last.hold() {
				last.leave(now)
				last.end(Full)
			}
		}
		return true
	}
	return false
}

// lastHolder returns the last request that holds a place in the queue which one
// of this tier may take, or nil.
func (q *queue) lastHolder(tier int) *position {
	for i := range slices.Backward(q.lines) {
		l := &q.lines[i]
		if l.places == 0 || q.of.apart && i != tier {
			continue
		}
		for _, s := range slices.Backward(l.positions) {
			if s.holds == q {
				return s
			}
		}
	}
	return nil
}

// heads are the first requests of each tier.
func (q *queue) heads() iter.Seq[*position] {
	return func(yield func(*position) bool) {
		for i := range q.lines {
			if positions := q.lines[i].positions; len(positions) > 0 && !yield(positions[0]) {
				return
			}
		}
	}
}

// next returns the request that tries next, and when: the first one, unless it
// yields to one of a worse tier that tries earlier. One whose time has come
// does not. It returns nil if no request waits.
func (q *queue) next(now time.Time) (s *position, due time.Time) {
	for head := range q.heads() {
		at := later(head.At, q.gate)
		if s == nil || due.After(now) && at.Before(due) {
			s, due = head, at
		}
		if !head.Yields {
			break
		}
	}
	return s, due
}

// follow sets when the next request may go after this one, which goes: the
// backend accepts requests, whatever the others have found out.
func (q *queue) follow(s *position, now time.Time) {
	for head := range q.heads() {
		head.At = now
	}
	longest := q.of.duration / probeParts
	q.open = now.Add(max(min(s.Every, longest), shortestGap))
	q.gate = q.open
	if q.probe == nil {
		s.probed, q.probe = q, s.Ticket
		q.gate = later(q.open, now.Add(min(s.Pause, longest)))
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// retry makes the first request of each tier try now.
func (q *queue) retry(now time.Time) {
	if q == nil {
		return
	}
	for head := range q.heads() {
		head.At, head.changed = now, true
	}
	q.advance(now)
}

// advance calls the next request if it may try, or sets the timer for that. A
// request that has become the first of its tier may try at once, because its
// own return may be out of date. While the next one tries in another queue,
// nothing happens: it advances all of its queues afterwards.
func (q *queue) advance(now time.Time) {
	if q.timer != nil {
		q.timer.Stop()
	}
	for head := range q.heads() {
		if l := head.line(); l.first != head.Ticket {
			l.first, head.At = head.Ticket, now
		}
	}
	next, due := q.next(now)
	switch {
	case next == nil && !now.Before(q.gate):
		if q.of.byKey[q.key] == q {
			delete(q.of.byKey, q.key)
		}
		// requests that have gone have the queue still, and would keep each
		// other in memory
		q.lines, q.probe = nil, nil
		return
	case next == nil: // the queue is kept, so that the next one that joins does not go too early
		due = q.gate
	case q.called != nil || next.called != nil:
		return
	case !now.Before(due):
		q.called, next.called, next.changed = next.Ticket, q, false
		next.end(Called)
		return
	}
	if q.timer == nil {
		q.timer = time.AfterFunc(due.Sub(now), q.ring)
	} else {
		q.timer.Reset(due.Sub(now))
	}
}

func (q *queue) ring() {
	q.of.mu.Lock()
	defer q.of.mu.Unlock()
	q.advance(time.Now())
}

// advance advances the queues in which the request waits, or last waited.
func (t *Ticket) advance(now time.Time) { advance(now, t.positions) }

func advance(now time.Time, positions []*position) {
	for _, s := range positions {
		s.in.advance(now)
	}
}

func (t *Ticket) end(r Result) {
	t.result = r
	select {
	case t.wake <- struct{}{}:
	default:
	}
}
