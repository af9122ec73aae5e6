package limiter

import (
	"hash/maphash"
	"sync"
)

// maxLeft is how many responses in the background are remembered.
const maxLeft = 10_000

// Left has what is to be known of responses that go on after the reply to their
// request, by their ids, until a reply says what they have used. Of too many,
// the oldest are forgotten. The zero Left is empty.
type Left[T any] struct {
	mu   sync.Mutex
	byID map[uint64]T
	// ids are those of byID in the order in which they came, in a ring that
	// goes on at next. 0: that one is settled.
	ids  []uint64
	next int
}

// Add remembers a response.
func (l *Left[T]) Add(id string, value T) {
	key := maphash.String(seed, id)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byID == nil {
		l.byID = make(map[uint64]T)
	}
	if _, known := l.byID[key]; known {
		return // an id is never used twice
	}
	l.byID[key] = value
	if len(l.ids) < maxLeft {
		l.ids = append(l.ids, key)
		return
	}
	delete(l.byID, l.ids[l.next])
	l.ids[l.next] = key
	l.next = (l.next + 1) % maxLeft
}

// Has reports whether a response is remembered.
func (l *Left[T]) Has(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.byID[maphash.String(seed, id)]
	return ok
}

// Take returns what is remembered of a response, and forgets it.
func (l *Left[T]) Take(id string) (value T, ok bool) {
	key := maphash.String(seed, id)
	l.mu.Lock()
	defer l.mu.Unlock()
	value, ok = l.byID[key]
	delete(l.byID, key)
	return value, ok
}
