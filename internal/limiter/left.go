package limiter

import (
	"hash/maphash"
	"sync"
)

// maxLeft is the maximum number of background responses that are remembered.
const maxLeft = 10_000

// Left remembers a value for each response that goes on after the reply to its
// request, by the response's id, until a later reply reports its use. Such a
// response was asked for with background: the client polls for it, or cancels
// it. If there are too many, the oldest ones are forgotten. The zero Left is
// empty. A Left is safe for concurrent use.
type Left[T any] struct {
	mu   sync.Mutex
	byID map[uint64]T
	// ids is a ring of the keys of byID in the order of Add. next is the index
	// of the oldest one. A key stays in the ring after Take.
	ids  []uint64
	next int
}

// Add remembers a value for a response.
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

// Take returns the value of a response, and forgets it.
func (l *Left[T]) Take(id string) (value T, ok bool) {
	key := maphash.String(seed, id)
	l.mu.Lock()
	defer l.mu.Unlock()
	value, ok = l.byID[key]
	delete(l.byID, key)
	return value, ok
}
