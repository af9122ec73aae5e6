package websocket

import (
	"math"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Budget limits the memory of the messages that all WebSockets hold: messages
// that are not complete, that wait for a backend, or that may be sent to
// another backend.
//
// A message may grow only while it is no longer than the budget that remains.
// So one message gets at most half of the budget, the next one half of the
// rest, and so on. However many long messages clients send, and however slowly,
// short messages still find room.
type Budget struct {
	limit int64
	used  atomic.Int64
}

// NewBudget returns a budget of limit bytes.
func NewBudget(limit int64) *Budget { return &Budget{limit: limit} }

// most is the largest budget of a process. It is smaller if a quarter of the
// process's memory limit is less.
const most = 512 << 20

// Memory returns the budget of the process.
var Memory = sync.OnceValue(func() *Budget {
	limit := debug.SetMemoryLimit(-1) // Caddy sets it to what the container may use
	if limit == math.MaxInt64 {
		return NewBudget(most)
	}
	return NewBudget(min(most, limit/4))
})

// Used returns how many bytes are held.
func (b *Budget) Used() int64 { return b.used.Load() }

// take reserves n more bytes for a message that holds size bytes. It reports
// false, and reserves nothing, if the message would be too long.
func (b *Budget) take(size, n int64) bool {
	for {
		used := b.used.Load()
		if size+n > b.limit-(used+n) {
			return false
		}
		if b.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

func (b *Budget) give(n int64) { b.used.Add(-n) }

// message is a complete message that is held, or the beginning of one. The
// budget is charged for its capacity.
type message struct {
	text   []byte
	budget *Budget
}

// firstCapacity is the first allocation for a message.
const firstCapacity = 1 << 10

// grow makes room for n more bytes. all is the length of the message as far as
// it is known, which limits spare room. Memory is allocated as bytes arrive,
// not for the length that a frame announces. It reports false if the budget is
// used up.
func (m *message) grow(n, all int) bool {
	capacity := cap(m.text)
	if len(m.text)+n <= capacity {
		return true
	}
	wanted := max(min(2*capacity, all), len(m.text)+n, min(firstCapacity, all))
	if !m.budget.take(int64(capacity), int64(wanted-capacity)) {
		return false
	}
	m.text = append(make([]byte, 0, wanted), m.text...)
	return true
}

// release drops the message and returns its memory to the budget.
func (m *message) release() {
	if m.budget != nil {
		m.budget.give(int64(cap(m.text)))
	}
	*m = message{}
}
