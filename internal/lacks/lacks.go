// Package lacks remembers for a minute that a backend cannot do one thing: it
// does not have a model or a path, or a server in front of it refuses requests
// of one kind.
//
// None of this is a reason for a cooldown, because the backend serves
// everything else. But without a memory, each request for a missing model would
// be sent to every backend first. So a [Set] holds the names that a backend
// lacks, and a choice passes the backend over for them. A name is forgotten
// after [Lasts], and at once when a request for it is served
// (TestANameIsLackedForAMinuteOrUntilItIsThere).
//
// A firewall is recognized by [Streaks]: it refuses several different requests
// in a row, all for the same model and operation. One refused request, however
// often a client repeats it, proves nothing about the next one
// (TestAStreakIsOfDifferentRequestsOfAUse).
//
// Clients can invent any number of names, so both types hold a limited number
// of entries (TestMadeUpNamesTakeLimitedMemory, TestStreaksAreBounded). Both
// are asked about in every request. While they are empty, which is the usual
// case, they take no lock.
package lacks

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Lasts is how long it is remembered that a backend lacks something.
const Lasts = time.Minute

// maxNames limits what a Set remembers: clients can make up any number of
// names.
const maxNames = 1024

// Set has the names of things that a backend lacks. The zero Set is empty and
// ready to use.
//
// It is asked for each request, and nearly always empty: then it takes no lock.
// When it is full, a name that it forgets is any one of those that it has.
type Set struct {
	length atomic.Int32
	mu     sync.Mutex
	until  map[string]time.Time
}

// Add records that the backend lacks the name now.
func (s *Set) Add(name string, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.until == nil {
		s.until = make(map[string]time.Time)
	}
	if _, known := s.until[name]; !known && len(s.until) >= maxNames {
		s.makeRoom(now)
	}
	s.until[name] = now.Add(Lasts)
	s.length.Store(int32(len(s.until)))
}

// makeRoom forgets a few names: of those that it sees, all that are over, or
// else the last one.
func (s *Set) makeRoom(now time.Time) {
	seen, last := 0, ""
	for name, until := range s.until {
		if last = name; !until.After(now) {
			delete(s.until, name)
		}
		if seen++; seen == 16 {
			break
		}
	}
	if len(s.until) >= maxNames {
		delete(s.until, last)
	}
}

// Any reports whether the set is not empty.
func (s *Set) Any() bool { return s.length.Load() > 0 }

// Has reports whether the backend lacked the name a short time ago.
func (s *Set) Has(name string, now time.Time) bool {
	if !s.Any() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	until, known := s.until[name]
	if known && !until.After(now) {
		delete(s.until, name)
		s.length.Store(int32(len(s.until)))
		return false
	}
	return known
}

// Remove records that the backend has the name.
func (s *Set) Remove(name string) {
	if !s.Any() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.until, name)
	s.length.Store(int32(len(s.until)))
}

// Clear empties the set.
func (s *Set) Clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.until = nil
	s.length.Store(0)
}

// inARow is how many different requests must be refused, with no other reply in
// between, before it is the fault of the backend and not of a request.
const inARow = 3

// Use is an operation with a model, by its name at the backend.
type Use struct{ Model, Operation string }

// Streaks count the requests of each use that were refused in a row. What a
// firewall lets pass for one model or operation says nothing about another. The
// same request again, which an SDK sends up to three times, counts once. The
// zero Streaks are ready to use.
//
// They are asked for each reply, and nearly always empty: Any takes no lock.
// When they are full, the streak that ends is any one of them.
type Streaks struct {
	length atomic.Int32
	mu     sync.Mutex
	of     map[Use]*streak
}

// streak is the digests of the requests that were refused.
type streak struct {
	refused [inARow]uint64
	length  int
}

// Refused records that a request with this digest was refused. It reports
// whether that ends a streak: the next request begins a new one.
func (s *Streaks) Refused(use Use, digest uint64) (ends bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	streak := s.of[use]
	if streak == nil {
		streak = s.begin(use)
	}
	if slices.Contains(streak.refused[:streak.length], digest) {
		return false
	}
	streak.refused[streak.length] = digest
	if streak.length++; streak.length < inARow {
		return false
	}
	s.end(use)
	return true
}

// begin begins the streak of a use. The caller holds the lock.
func (s *Streaks) begin(use Use) *streak {
	if s.of == nil {
		s.of = make(map[Use]*streak)
	}
	if len(s.of) >= maxNames {
		for other := range s.of {
			delete(s.of, other)
			break
		}
	}
	added := new(streak)
	s.of[Use{strings.Clone(use.Model), strings.Clone(use.Operation)}] = added
	s.length.Store(int32(len(s.of)))
	return added
}

// end ends the streak of a use. The caller holds the lock.
func (s *Streaks) end(use Use) {
	delete(s.of, use)
	s.length.Store(int32(len(s.of)))
}

// Any reports whether there is a streak.
func (s *Streaks) Any() bool { return s.length.Load() > 0 }

// Passed records another reply.
func (s *Streaks) Passed(use Use) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(use)
}

// Clear ends all streaks.
func (s *Streaks) Clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.of = nil
	s.length.Store(0)
}
