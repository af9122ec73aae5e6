package ledger

import "sync"

// Requests end at the same time on many cores. So that they do not wait for
// each other, the use of a request is added to one of several shards, chosen at
// random, each with its own lock. Before rows are read, the shards are
// collected.
//
// A shard only takes use for rows that exist. A new row needs the lock of the
// days, because whether there is room for it depends on the other rows.
const shards = 16

// maxHeld is the maximum number of rows in a shard.
const maxHeld = 1000

// shard has the use of requests since it was last collected.
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

// add adds use to a row. It returns false if the shard does not hold the row.
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

// hold adds a row to the shard, unless the shard has too many.
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

// collect adds the use in the shards to the rows. It removes shards' rows that
// were not used since the last time. The caller holds the lock of the days.
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
