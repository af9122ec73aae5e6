package replicas

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// queue holds what is to be told. It is bounded: the oldest goes first, for what
// is newer says more. What was lost is found again when replicas compare what
// they know.
type queue struct {
	mu    sync.Mutex
	items []item
	// more has an element while there are items, or were.
	more chan struct{}
}

// item is an event of a pool's, or what a comparison found.
type item struct {
	kind    kind
	backend string
	member  string
	bench   pool.Bench
	at      time.Time
}

// maxQueue is how many items wait at most, and maxBatch how many go at a time.
const (
	maxQueue = 1024
	maxBatch = 128
)

func newQueue() *queue { return &queue{more: make(chan struct{}, 1)} }

// add never waits. It reports how many items are lost by it.
func (q *queue) add(i item) (lost int) {
	q.mu.Lock()
	if len(q.items) == maxQueue {
		q.items = slices.Delete(q.items, 0, 1)
		lost = 1
	}
	q.items = append(q.items, i)
	q.mu.Unlock()
	q.wake()
	return lost
}

func (q *queue) wake() {
	select {
	case q.more <- struct{}{}:
	default:
	}
}

// take waits for items. It returns nil when the context is done.
func (q *queue) take(ctx context.Context) []item {
	select {
	case <-ctx.Done():
		return nil
	case <-q.more:
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(len(q.items), maxBatch)
	taken := slices.Clone(q.items[:n])
	q.items = slices.Delete(q.items, 0, n)
	if len(q.items) > 0 {
		q.wake()
	}
	return taken
}

func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items)
}
