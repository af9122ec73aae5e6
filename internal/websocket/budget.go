package websocket

import (
	"math"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// Budget bounds the memory of the messages that all WebSockets hold: those that
// are not complete, that wait for a backend, or that may have to be sent to
// another one.
//
// No message may become longer than what is left after it. So one message gets
// at most half of the budget, the next one half of the rest, and so on: however
// many long messages clients send, and however slowly, short ones still find
// room.
type Budget struct {
	limit int64
	used  atomic.Int64
}

// NewBudget returns a budget of so many bytes.
func NewBudget(limit int64) *Budget { return &Budget{limit: limit} }

// most is how large the budget of a process is, unless its memory is limited to
// less than four times that.
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

// take reports whether a message that holds so many bytes may hold n more,
// which it then does.
func (b *Budget) take(held, n int64) bool {
	for {
		used := b.used.Load()
		if held+n > b.limit-(used+n) {
			return false
		}
		if b.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

func (b *Budget) give(n int64) { b.used.Add(-n) }

// message is a message that is held, or the beginning of one. The budget has
// its capacity.
type message struct {
	text   []byte
	budget *Budget
}

// firstCapacity is how much is allocated for a message at first.
const firstCapacity = 1 << 10

// grow makes room for n more bytes, of which the message will have no more than
// so many in all. Memory is allocated as bytes come, and not as a frame
// promises. It reports false if the budget is used up.
func (m *message) grow(n, all int) bool {
	has := cap(m.text)
	if len(m.text)+n <= has {
		return true
	}
	wanted := max(min(2*has, all), len(m.text)+n, min(firstCapacity, all))
	if !m.budget.take(int64(has), int64(wanted-has)) {
		return false
	}
	m.text = append(make([]byte, 0, wanted), m.text...)
	return true
}

// release forgets the message.
func (m *message) release() {
	if m.budget != nil {
		m.budget.give(int64(cap(m.text)))
	}
	*m = message{}
}
