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

// maxShardRows is the maximum number of rows in a shard.
const maxShardRows = 1000

// shard has the use of requests since it was last collected.
type shard struct {
	mu   sync.Mutex
	rows map[dayKey]*Use

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
	use := s.rows[k]
	if use == nil {
		return false
	}
	use.Add(u)
	return true
}

// hold adds a row to the shard, unless the shard has too many.
func (s *shard) hold(k dayKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rows == nil {
		s.rows = make(map[dayKey]*Use)
	}
	if s.rows[k] == nil && len(s.rows) < maxShardRows {
		s.rows[k] = new(Use)
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
	for k, u := range s.rows {
		if *u == (Use{}) {
			delete(s.rows, k)
			continue
		}
		l.at(k.number).add(k.Key, *u)
		*u = Use{}
	}
}
