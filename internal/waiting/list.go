package waiting

import (
	"iter"
	"slices"
	"time"
)

// list is a list with at least one place in it. The lock of its lists guards
// it.
type list struct {
	lists *Lists
	key   Key
	// places are in order. called is the one of them that tries right now, or
	// nil, and changed reports whether Wake was called since it was called.
	places  []*Place
	called  *Place
	changed bool
	// pause is how long after a request the next one goes. gate is when that
	// may go because of the one before, and round numbers the refusals: a first
	// byte counts in its own round only.
	pause time.Duration
	gate  time.Time
	round int
	timer *time.Timer
}

// heads are the first requests of each tier. A nil list has none.
func (s *list) heads() iter.Seq[*Place] {
	return func(yield func(*Place) bool) {
		for i := 0; s != nil && i < len(s.places); i++ {
			if (i == 0 || s.places[i-1].who.Tier != s.places[i].who.Tier) && !yield(s.places[i]) {
				return
			}
		}
	}
}

// head is the first request of a tier, or nil.
func (s *list) head(tier int) *Place {
	for p := range s.heads() {
		if p.who.Tier == tier {
			return p
		}
	}
	return nil
}

// next returns the request that tries next, and when: the first one, unless it
// yields to one of a worse tier that tries earlier. One whose time has come
// does not.
func (s *list) next(now time.Time) (p *Place, due time.Time) {
	for head := range s.heads() {
		at := head.next.At
		if s.gate.After(at) {
			at = s.gate
		}
		if p == nil || due.After(now) && at.Before(due) {
			p, due = head, at
		}
		if !head.next.Yields {
			break
		}
	}
	return p, due
}

// retry has the first request of each tier try now.
func (s *list) retry(now time.Time) {
	for p := range s.heads() {
		p.next.At = now
	}
}

// rivals are the requests that take places from one of this caller and tier. A
// nil list has none.
func (s *list) rivals(who Who) (rivals []*Place) {
	if s == nil {
		return nil
	}
	if !s.lists.apart {
		return s.places
	}
	return slices.DeleteFunc(slices.Clone(s.places), func(p *Place) bool { return p.who.Tier != who.Tier })
}

func (s *list) has(p *Place) bool { return slices.Contains(s.places, p) }

// losesTo returns the place that a request takes when all are taken: the last
// one of the caller that has most of them in the worst tier. In its own tier, a
// request takes one if its caller has none, and the other caller keeps one, or
// if its caller has less than half of them, and the other one more. nil: it
// takes none.
func (s *list) losesTo(who Who, rivals []*Place) (loses *Place) {
	worst, has, most := rivals[len(rivals)-1].who.Tier, make(map[string]int), 0
	for _, p := range rivals {
		if p.who.Tier == worst || p.who.Caller == who.Caller {
			has[p.who.Caller]++
		}
	}
	half := (s.lists.places + 1) / 2
	switch {
	case worst > who.Tier:
	case worst == who.Tier && has[who.Caller] == 0:
		most = 1
	case worst == who.Tier && has[who.Caller] < half:
		most = half
	default:
		return nil
	}
	for _, p := range slices.Backward(rivals) {
		if p.who.Tier == worst && p != s.called && has[p.who.Caller] > most {
			loses, most = p, has[p.who.Caller]
		}
	}
	return loses
}

// advance ends the waits that are over, calls the first request if it may try,
// and sets the timer for what is next.
func (s *list) advance(now time.Time) {
	for _, p := range slices.Clone(s.places) {
		if p == s.called || now.Before(p.until) {
			continue
		}
		if next, due := s.next(now); p == next && s.called == nil && !due.After(p.until) {
			continue // only the timer is late
		}
		p.remove(now)
		p.end(Over)
	}
	if len(s.places) == 0 {
		s.drop()
		return
	}
	next, due := s.next(now)
	if s.called == nil && !now.Before(due) {
		s.called, s.changed = next, false
		next.end(Turn)
	}
	var at time.Time // zero: only the request that is called has something to do
	for _, p := range s.places {
		if p != s.called && (at.IsZero() || p.until.Before(at)) {
			at = p.until
		}
	}
	if s.called == nil && due.Before(at) {
		at = due
	}
	switch {
	case at.IsZero():
		s.stop()
	case s.timer == nil:
		s.timer = time.AfterFunc(at.Sub(now), s.ring)
	default:
		s.timer.Reset(at.Sub(now))
	}
}

func (s *list) ring() {
	s.lists.mu.Lock()
	defer s.lists.mu.Unlock()
	if s.lists.byKey[s.key] == s {
		s.advance(time.Now())
	}
}

func (s *list) stop() {
	if s.timer != nil {
		s.timer.Stop()
	}
}

// drop forgets the list. No request waits in it.
func (s *list) drop() {
	s.stop()
	if s.lists.byKey[s.key] == s {
		delete(s.lists.byKey, s.key)
	}
}
