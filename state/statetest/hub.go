// Package statetest tests engines of shared state, and what uses them.
//
// Authors of an engine run [Conform] with stores of their engine. It tests what
// the balancer expects of every store: how records, messages, claims and
// entries are kept, bounded and forgotten, and that each call ends with its
// context.
//
//	func TestStore(t *testing.T) {
//		statetest.Conform(t, func(t *testing.T) state.Store {
//			empty(server) // which the test has started
//			return open(t, server)
//		})
//	}
//
// The tests of Conform run one after the other. Each gets one or two stores,
// and the function that opens them empties the engine each time. So no other
// test may use the same data meanwhile.
//
// A [Hub] is in place of a server. Its stores are in memory, and it can make
// them slow, or fail, as servers and networks do. It is safe for concurrent
// use.
package statetest

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// Hub is in place of a server: it has what its stores share, and decides when
// and how they fail.
type Hub struct {
	mu        sync.Mutex
	contents  contents
	faults    faults
	delays    delays
	counts    counts
	listeners map[chan []byte]bool
}

// contents is all that is kept.
type contents struct {
	groups  map[string]map[string]kept
	entries map[string]entry
	claims  map[string]claim
}

// faults has the failures that a hub simulates.
type faults struct {
	// down is why nothing works, and full why nothing is written.
	down, full error
	// refuses is why the entries of these keys are not kept. Without refused,
	// it applies to all entries.
	refuses error
	refused []string
	// deaf reports whether listeners hear no messages.
	deaf bool
	// hangs is closed when a hub that hangs goes on.
	hangs chan struct{}
	// suspended has a channel for each store that is, closed when it goes on.
	suspended map[*byte]chan struct{}
}

// delays are how long things take: each is the time for one key of Find, and
// busyUntil when Find can look for the next one.
type delays struct {
	put, load, find, each time.Duration
	busyUntil             time.Time
}

// counts are how often a method was called, or a claim made.
type counts struct{ finds, claims int }

// NewHub returns a hub that works.
func NewHub() *Hub {
	h := &Hub{listeners: make(map[chan []byte]bool), faults: faults{suspended: make(map[*byte]chan struct{})}}
	h.Flush()
	return h
}

// set changes the hub, or reads it, under its lock.
func (h *Hub) set(change func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change()
}

// Flush forgets all that is kept.
func (h *Hub) Flush() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.contents = contents{make(map[string]map[string]kept), make(map[string]entry), make(map[string]claim)}
}

// Fail makes all uses fail, and ends those that go on, until the error is nil.
func (h *Hub) Fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults.down = err
	if err != nil {
		for l := range h.listeners {
			close(l)
			delete(h.listeners, l)
		}
	}
}

// FailWrites makes Put, Claim and Keep fail, and nothing else, until the error
// is nil. The messages of Put are sent, as by a server that is full or
// read-only.
func (h *Hub) FailWrites(err error) { h.set(func() { h.faults.full = err }) }

// LoseMessages loses the messages to stores that listen, but no records.
func (h *Hub) LoseMessages(lose bool) { h.set(func() { h.faults.deaf = lose }) }

// Delay sets how long records and claims take to the store, and how long its
// answers take back.
func (h *Hub) Delay(put, load time.Duration) {
	h.set(func() { h.delays.put, h.delays.load = put, load })
}

// Hang makes Put, Load and Claim wait until the hub goes on, as a server that
// is stopped by SIGSTOP does.
func (h *Hub) Hang() (goOn func()) {
	hangs := make(chan struct{})
	h.set(func() { h.faults.hangs = hangs })
	return func() {
		h.set(func() { h.faults.hangs = nil })
		close(hangs)
	}
}

// Suspend stops the replica of the store, as SIGSTOP stops a process: what is
// sent to it waits for it.
func (h *Hub) Suspend(s state.Store, suspend bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	id := s.(memory).id
	if suspend {
		h.faults.suspended[id] = make(chan struct{})
		return
	}
	close(h.faults.suspended[id])
	delete(h.faults.suspended, id)
}

// SetBack sets the clock back by which records are kept.
func (h *Hub) SetBack(by time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, group := range h.contents.groups {
		for key, k := range group {
			if !k.until.IsZero() {
				k.until = k.until.Add(by)
				group[key] = k
			}
		}
	}
}

// Len returns how many records of a group are kept.
func (h *Hub) Len(group string) (n int) {
	h.set(func() { n = len(h.contents.groups[group]) })
	return n
}

// SlowDown makes every answer to Find take so long.
func (h *Hub) SlowDown(by time.Duration) { h.set(func() { h.delays.find = by }) }

// Cost makes Find take so long for each key, one call after the other.
func (h *Hub) Cost(each time.Duration) { h.set(func() { h.delays.each = each }) }

// Refuse makes Keep fail, and nothing else, until the error is nil: for entries
// with these keys, or for all if none is named.
func (h *Hub) Refuse(err error, keys ...string) {
	h.set(func() { h.faults.refuses, h.faults.refused = err, keys })
}

// refusal returns why an entry is not kept, or nil.
func (h *Hub) refusal(key string) error {
	if h.faults.refused == nil || slices.Contains(h.faults.refused, key) {
		return cmp.Or(h.faults.down, h.faults.full, h.faults.refuses)
	}
	return cmp.Or(h.faults.down, h.faults.full)
}

// Finds returns how often Find was called.
func (h *Hub) Finds() (n int) {
	h.set(func() { n = h.counts.finds })
	return n
}

// Claims returns how many claims were made.
func (h *Hub) Claims() (n int) {
	h.set(func() { n = h.counts.claims })
	return n
}

// Entries returns the entries that are kept.
func (h *Hub) Entries() (entries []state.Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.contents.entries {
		entries = append(entries, e.Entry)
	}
	return entries
}

// Store returns a store of the hub.
func (h *Hub) Store() state.Store { return memory{h, new(byte)} }
