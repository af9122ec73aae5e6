package ledger

import "sync"

// Requests end at the same moment on many cores. So that they do not wait for
// each other, what one has used goes into one of the shards, chosen at random,
// which has a lock of its own. Whoever reads the rows collects the shards
// first.
//
// A shard only takes what belongs to a row that is there already. A new row
// needs the lock of the days, because it depends on the other rows whether
// there is room for it.
const shards = 16

// maxHeld is how many rows a shard has at most.
const maxHeld = 1000

// shard has what requests have used since it was collected.
type shard struct {
	mu   sync.Mutex
	held map[dayKey]*Use

	_ [64]byte // so that two shards do not share a cache line
}

// dayKey is the key of a row on the page of a day.
type dayKey struct {
	number int64
	Key
}

// add adds to a row. It returns false if the shard does not hold the row.
func (s *shard) add(k dayKey, u Use) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := s.held[k]
	if held == nil {
		return false
	}
	held.Add(u)
	return true
}

// hold makes the shard hold a row, unless it holds too many.
func (s *shard) hold(k dayKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held == nil {
		s.held = make(map[dayKey]*Use)
	}
	if s.held[k] == nil && len(s.held) < maxHeld {
		s.held[k] = new(Use)
	}
}

// collect adds what the shards hold to the rows. A shard no longer holds a row
// that was not used since the last time. The caller holds the lock of the days.
func (l *Ledger) collect() {
	for i := range l.shards {
		l.shards[i].collect(l)
	}
}

func (s *shard) collect(l *Ledger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, u := range s.held {
		if *u == (Use{}) {
			delete(s.held, k)
			continue
		}
		l.at(k.number).add(k.Key, *u)
		*u = Use{}
	}
}
