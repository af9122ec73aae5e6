// Package background remembers what belongs to responses that go on after the
// replies to their requests.
package background

import (
	"hash/maphash"
	"sync"
)

// maxResponses is the maximum number of responses that are remembered.
const maxResponses = 10_000

var seed = maphash.MakeSeed()

// Responses remembers a value for each response that goes on after the reply to
// its request, by the response's id, until a later reply reports its use. Such
// a response was asked for with background: the client polls for it, or cancels
// it. If there are too many, the oldest ones are forgotten. The zero Responses
// is empty. It is safe for concurrent use.
type Responses[T any] struct {
	mu   sync.Mutex
	byID map[uint64]T
	// ids is a ring of the keys of byID in the order of Add. next is the index
	// of the oldest one. A key stays in the ring after Take.
	ids  []uint64
	next int
}

// Add remembers a value for a response.
func (r *Responses[T]) Add(id string, value T) {
	key := maphash.String(seed, id)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byID == nil {
		r.byID = make(map[uint64]T)
	}
	if _, known := r.byID[key]; known {
		return // an id is never used twice
	}
	r.byID[key] = value
	if len(r.ids) < maxResponses {
		r.ids = append(r.ids, key)
		return
	}
	delete(r.byID, r.ids[r.next])
	r.ids[r.next] = key
	r.next = (r.next + 1) % maxResponses
}

// Has reports whether a response is remembered.
func (r *Responses[T]) Has(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.byID[maphash.String(seed, id)]
	return ok
}

// Take returns the value of a response, and forgets it.
func (r *Responses[T]) Take(id string) (value T, ok bool) {
	key := maphash.String(seed, id)
	r.mu.Lock()
	defer r.mu.Unlock()
	value, ok = r.byID[key]
	delete(r.byID, key)
	return value, ok
}
