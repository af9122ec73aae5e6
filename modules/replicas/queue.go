package replicas

import (
	"context"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// queue holds the items to send. If it is full, the oldest item is dropped,
// because newer items matter more. A dropped item is made up for later:
// replicas compare their cooldowns, and find owners by asking the accounts.
type queue[T any] struct {
	mu    sync.Mutex
	items []T
	limit int
	// more is given when items are added. A receiver may find no items.
	more signal
}

// signal wakes one goroutine, which waits already or will wait later.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) give() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// item is an event of a pool, or a difference that a comparison found.
type item struct {
	kind     kind
	backend  string
	member   string
	cooldown pool.Cooldown
	order    order
	// replace reports whether the store's record is an order that no replica
	// can have given, so that it must be replaced.
	replace bool
	at      time.Time
}

// maxQueue is the maximum number of items that wait, and maxBatch the maximum
// number of items that are sent together.
const (
	maxQueue = 1024
	maxBatch = 128
)

func newQueue[T any](limit int) *queue[T] {
	return &queue[T]{limit: limit, more: newSignal()}
}

// add adds an item without waiting. It returns how many items were dropped.
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

// take waits for items and removes them. It returns nil when the context is
// done.
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
