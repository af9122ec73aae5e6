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
	called *Place
	// probe is the first request that has gone since the backend throttled. It
	// is nil if none has.
	probe *Place
	// gate is when the next request may go because of the one before. When the
	// probe has its first byte, the next one may go at open.
	gate, open time.Time
	timer      *time.Timer
}

// line has the requests of one tier in a queue, in order.
type line struct {
	spots []*spot
	// places is how many of them hold a place in this queue.
	places int
	// first is the request that was first when the queue last advanced.
	first *Place
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

// spot is a request in a queue. Its tier, turn and number are its order.
type spot struct {
	*Place
	in   *queue
	turn uint64
	Return
}

func (s *spot) line() *line { return &s.in.lines[s.who.Tier] }

func compare(a, b *spot) int {
	return cmp.Or(cmp.Compare(a.who.Tier, b.who.Tier), cmp.Compare(a.turn, b.turn), cmp.Compare(a.number, b.number))
}

// yields reports whether worse tiers may go before the request, whose time has
// not come.
func (s *spot) yields(now time.Time) bool { return s.Yields && now.Before(s.At) }

// spotOf returns the spot in the queue of a request that comes now, or that
// comes back with its place.
func (q *queue) spotOf(p *Place, who Who, number uint64) *spot {
	s := &spot{Place: p, in: q}
	if p == nil {
		s.Place = &Place{who: who, number: number}
	}
	if who.Tier < len(q.lines) {
		l := &q.lines[who.Tier]
		s.turn = l.turn
		if its, ok := l.callers[who.Caller]; ok {
			s.turn = max(l.turn, its.last+1)
		}
	}
	for _, before := range s.spots {
		if before.in.key == q.key {
			s.turn = min(s.turn, before.turn)
		}
	}
	return s
}

// enter puts the request into the queues of its returns.
func (p *Place) enter(now time.Time, returns []Return) {
	l := p.of
	spots := make([]*spot, 0, len(returns))
	for _, r := range returns {
		q := l.byKey[r.Key]
		if q == nil {
			q = &queue{of: l, key: r.Key}
			l.byKey[r.Key] = q
		}
		for len(q.lines) <= p.who.Tier {
			q.lines = append(q.lines, line{callers: make(map[string]turns)})
		}
		if r.At.After(now) && !r.Yields || q.probe == p { // it throttles
			q.probe, q.gate = nil, time.Time{}
		}
		s := q.spotOf(p, p.who, p.number)
		s.Return, s.Places = r, min(max(r.Places, 1), maxPlaces)
		line := s.line()
		at, _ := slices.BinarySearchFunc(line.spots, s, compare)
		line.spots = slices.Insert(line.spots, at, s)
		its := line.callers[p.who.Caller]
		line.callers[p.who.Caller] = turns{its.waiting + 1, max(its.last, s.turn)}
		spots = append(spots, s)
	}
	p.spots, p.waits = spots, true
	l.waiting.Add(1)
	bodies.Add(p.size)
}

// exit takes the request out of its queues, if it waits.
func (p *Place) exit() {
	if p.called != nil {
		p.called.called = nil
	}
	p.called, p.changed = nil, false
	if !p.waits {
		return
	}
	p.holdIn(nil)
	for _, s := range p.spots {
		line := s.line()
		if at, ok := slices.BinarySearchFunc(line.spots, s, compare); ok {
			line.spots = slices.Delete(line.spots, at, at+1)
		}
		its := line.callers[p.who.Caller]
		if its.last == s.turn && s.turn > 0 { // the caller's next request gets this turn
			its.last--
		}
		if its.waiting--; its.waiting > 0 {
			line.callers[p.who.Caller] = its
		} else {
			delete(line.callers, p.who.Caller)
		}
	}
	p.waits = false
	p.of.waiting.Add(-1)
	bodies.Add(-p.size)
}

// hold gives the request a place in the queue that has the most free ones. It
// reports false if none is free.
func (p *Place) hold() bool {
	var into *queue
	most := .5 // rounded
	for _, s := range p.spots {
		if free := s.Places - float64(s.in.taken(p.who.Tier)); free >= most {
			into, most = s.in, free
		}
	}
	if into == nil {
		return false
	}
	p.holdIn(into)
	return true
}

func (p *Place) holdIn(q *queue) {
	if p.holds != nil {
		p.holds.lines[p.who.Tier].places--
	}
	if p.holds = q; q != nil {
		q.lines[p.who.Tier].places++
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
func (p *Place) displace(now time.Time) bool {
	for _, s := range p.spots {
		last := s.in.lastHolder(p.who.Tier)
		if last == nil || compare(last, s) <= 0 {
			continue
		}
		p.holdIn(s.in)
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
func (q *queue) lastHolder(tier int) *spot {
	for i := range slices.Backward(q.lines) {
		l := &q.lines[i]
		if l.places == 0 || q.of.apart && i != tier {
			continue
		}
		for _, s := range slices.Backward(l.spots) {
			if s.holds == q {
				return s
			}
		}
	}
	return nil
}

// heads are the first requests of each tier.
func (q *queue) heads() iter.Seq[*spot] {
	return func(yield func(*spot) bool) {
		for i := range q.lines {
			if spots := q.lines[i].spots; len(spots) > 0 && !yield(spots[0]) {
				return
			}
		}
	}
}

// next returns the request that tries next, and when: the first one, unless it
// yields to one of a worse tier that tries earlier. One whose time has come
// does not. It returns nil if no request waits.
func (q *queue) next(now time.Time) (s *spot, due time.Time) {
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
func (q *queue) follow(s *spot, now time.Time) {
	for head := range q.heads() {
		head.At = now
	}
	longest := q.of.duration / probeParts
	q.open = now.Add(max(min(s.Every, longest), shortestGap))
	q.gate = q.open
	if q.probe == nil {
		s.probed, q.probe = q, s.Place
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
		if l := head.line(); l.first != head.Place {
			l.first, head.At = head.Place, now
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
		q.called, next.called, next.changed = next.Place, q, false
		next.end(Turn)
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
func (p *Place) advance(now time.Time) { advance(now, p.spots) }

func advance(now time.Time, spots []*spot) {
	for _, s := range spots {
		s.in.advance(now)
	}
}

func (p *Place) end(r Result) {
	p.result = r
	select {
	case p.wake <- struct{}{}:
	default:
	}
}
