package waiting

import (
	"slices"
	"time"
)

// list is a list with at least one place in it. The lock of its lists guards it.
type list struct {
	lists *Lists
	key   Key
	// places are in order. called is the one of them that tries right now, or nil, and changed reports
	// whether Wake was called since it was called.
	places  []*Place
	called  *Place
	changed bool
	// next is what the latest try has found out. gate is when the next request may go because of
	// the one before, and round numbers the refusals: a first byte counts in its own round only.
	next  Return
	gate  time.Time
	round int
	timer *time.Timer
}

func (s *list) has(p *Place) bool { return slices.Contains(s.places, p) }

// losesTo returns the place that a request takes when all are taken: the last one of the caller that has most of
// them in the worst tier. In its own tier, a request takes one only if its caller has none, and the other caller
// keeps one. nil: it takes none.
func (s *list) losesTo(who Who) (loses *Place) {
	worst, has, most := s.places[len(s.places)-1].who.Tier, make(map[string]int), 0
	for _, p := range s.places {
		if p.who.Tier == worst || p.who.Caller == who.Caller {
			has[p.who.Caller]++
		}
	}
	if worst == who.Tier && has[who.Caller] == 0 {
		most = 1
	} else if worst <= who.Tier {
		return nil
	}
	for _, p := range slices.Backward(s.places) {
		if p.who.Tier == worst && p != s.called && has[p.who.Caller] > most {
			loses, most = p, has[p.who.Caller]
		}
	}
	return loses
}

// advance ends the waits that are over, calls the first request if it may try, and sets the timer
// for what is next.
func (s *list) advance(now time.Time) {
	for _, p := range slices.Clone(s.places) {
		if p == s.called || now.Before(p.until) {
			continue
		}
		if p == s.places[0] {
			if s.called == nil && !s.due().After(p.until) {
				continue // only the timer is late
			}
			s.next.At = now
		}
		p.remove()
		p.end(Over)
	}
	if len(s.places) == 0 {
		s.drop()
		return
	}
	due := s.due()
	if s.called == nil && !now.Before(due) {
		s.called, s.changed = s.places[0], false
		s.called.end(Turn)
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

func (s *list) due() time.Time {
	if s.gate.After(s.next.At) {
		return s.gate
	}
	return s.next.At
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
