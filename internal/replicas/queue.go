package replicas

import (
	"context"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// queue holds the items to send. It is bounded: the oldest item is dropped
// first, because newer items say more. The content of a dropped item is found
// again: cooldowns when replicas compare their states, owners by asking the
// accounts.
type queue[T any] struct {
	mu    sync.Mutex
	items []T
	limit int
	// more is given while there are items, or were.
	more signal
}

// signal wakes one goroutine, now or when it waits next.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) give() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// item is an event of a pool, or what a comparison found.
type item struct {
	kind     kind
	backend  string
	member   string
	cooldown pool.Cooldown
	order    order
	// replace reports whether the store keeps an order that no replica has
	// given.
	replace bool
	at      time.Time
}

// maxQueue is how many items wait at most, and maxBatch how many go at a time.
const (
	maxQueue = 1024
	maxBatch = 128
)

func newQueue[T any](limit int) *queue[T] {
	return &queue[T]{limit: limit, more: newSignal()}
}

// add never waits. It reports how many items were dropped for it.
func (q *queue[T]) add(i T) (dropped int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) == q.limit {
		q.items = q.items[1:]
		dropped = 1
	}
	q.items = append(q.items, i)
	q.more.give()
	return dropped
}

// take waits for items. It returns nil when the context is done.
func (q *queue[T]) take(ctx context.Context) []T {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-q.more:
			if items := q.next(); len(items) > 0 {
				return items
			}
		}
	}
}

func (q *queue[T]) next() []T {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(len(q.items), maxBatch)
	taken := q.items[:n:n]
	if q.items = q.items[n:]; len(q.items) > 0 {
		q.more.give()
	} else {
		q.items = nil
	}
	return taken
}

func (q *queue[T]) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items)
}
