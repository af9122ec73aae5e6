// Package statetest helps to test engines of shared state, and what uses them:
// a store in memory, which can fail, and what every store has to do.
package statetest

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// Hub is what stores in memory share, in place of a server.
type Hub struct {
	mu        sync.Mutex
	down      error
	full      error
	deaf      bool
	putDelay  time.Duration
	loadDelay time.Duration
	groups    map[string]map[string]kept
	entries   map[string]entry
	finds     int
	slow      time.Duration
	cost      time.Duration
	busyUntil time.Time
	refuses   error
	refused   []string
	claims    map[string]claim
	claimed   int
	listeners map[chan []byte]bool
	// suspended has a channel for each store that is, closed when it goes on.
	suspended map[*byte]chan struct{}
}

type claim struct {
	by    *byte
	until time.Time
}

type kept struct {
	state.Record
	until    time.Time // zero: forever
	finished bool
}

func (k kept) over(now time.Time) bool { return !k.until.IsZero() && !now.Before(k.until) }

func (k kept) outlasts(other kept) bool {
	return !other.until.IsZero() && (k.until.IsZero() || k.until.After(other.until))
}

type entry struct {
	state.Entry
	until time.Time
}

// near reports whether another record is taken for this one.
func (k kept) near(other kept) bool {
	return k.Version != other.Version && !k.finished && !k.until.IsZero() && !other.until.IsZero() && k.until.Sub(other.until).Abs() < other.Near
}

// NewHub returns a hub that works.
func NewHub() *Hub {
	h := &Hub{listeners: make(map[chan []byte]bool), suspended: make(map[*byte]chan struct{})}
	h.Flush()
	return h
}

// Flush forgets all that is kept.
func (h *Hub) Flush() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.groups, h.claims, h.entries = make(map[string]map[string]kept), make(map[string]claim), make(map[string]entry)
}

// Fail makes all uses fail, and ends those that go on, until the error is nil.
func (h *Hub) Fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.down = err
	if err != nil {
		for l := range h.listeners {
			close(l)
			delete(h.listeners, l)
		}
	}
}

// FailWrites makes Put, Claim and Keep fail, and nothing else, until the error is
// nil. The messages of Put are sent, as by a server that is full or read-only.
func (h *Hub) FailWrites(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.full = err
}

// LoseMessages loses the messages to stores that listen, but no records.
func (h *Hub) LoseMessages(lose bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deaf = lose
}

// Delay sets how long records and claims take to the store, and how long its answers
// take back.
func (h *Hub) Delay(put, load time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.putDelay, h.loadDelay = put, load
}

// Suspend stops the replica of the store, as SIGSTOP stops a process: what is sent
// to it waits for it.
func (h *Hub) Suspend(s state.Store, suspend bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	id := s.(memory).id
	if suspend {
		h.suspended[id] = make(chan struct{})
		return
	}
	close(h.suspended[id])
	delete(h.suspended, id)
}

// SetBack sets the clock back by which records are kept.
func (h *Hub) SetBack(by time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, group := range h.groups {
		for key, k := range group {
			if !k.until.IsZero() {
				k.until = k.until.Add(by)
				group[key] = k
			}
		}
	}
}

// Len is how many records are kept of a group.
func (h *Hub) Len(group string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.groups[group])
}

// SlowDown has every answer to Find take so long.
func (h *Hub) SlowDown(by time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.slow = by
}

// Cost has Find take so long for each key, one call after the other.
func (h *Hub) Cost(each time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cost = each
}

// Refuse makes Keep fail, and nothing else, until the error is nil: for entries
// with these keys, or for all if none is named.
func (h *Hub) Refuse(err error, keys ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refuses, h.refused = err, keys
}

// refusal is why an entry is not kept.
func (h *Hub) refusal(key string) error {
	if h.refused == nil || slices.Contains(h.refused, key) {
		return cmp.Or(h.down, h.full, h.refuses)
	}
	return cmp.Or(h.down, h.full)
}

// Finds is how often Find was called.
func (h *Hub) Finds() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.finds
}

// Claims is how many claims were made.
func (h *Hub) Claims() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.claimed
}

// Entries are those that are kept.
func (h *Hub) Entries() (entries []state.Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.entries {
		entries = append(entries, e.Entry)
	}
	return entries
}

// Store returns a store of the hub.
func (h *Hub) Store() state.Store { return memory{h, new(byte)} }

type memory struct {
	*Hub
	id *byte
}

// running waits while the store is suspended. It returns how long Put and Load
// take.
func (m memory) running() (put, load time.Duration) {
	m.mu.Lock()
	goesOn, put, load := m.suspended[m.id], m.putDelay, m.loadDelay
	m.mu.Unlock()
	if goesOn != nil {
		<-goesOn
	}
	return put, load
}

// Put implements state.Store.
func (m memory) Put(ctx context.Context, records []state.Record) error {
	delay, _ := m.running()
	if err := wait(ctx, delay); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down != nil {
		return m.down
	}
	var errs []error
	for _, r := range records {
		if r.Message = slices.Clone(r.Message); !m.deaf {
			for l := range m.listeners {
				l <- r.Message
			}
		}
		if m.full != nil {
			errs = append(errs, m.full)
			continue
		}
		errs = append(errs, m.keep(r, time.Now()))
	}
	return errors.Join(errs...)
}

func (m memory) keep(r state.Record, now time.Time) error {
	group := m.groups[r.Group]
	if group == nil {
		group = make(map[string]kept)
		m.groups[r.Group] = group
	}
	next := kept{Record: r, finished: r.Mode == state.Finish}
	if r.TTL > 0 {
		next.until = now.Add(r.TTL)
	}
	maps.DeleteFunc(group, func(_ string, k kept) bool { return k.over(now) })
	before, known := group[r.Key]
	switch {
	case known && r.Mode == state.Extend && before.near(next):
		if before.Version < r.Version {
			next.Record = before.Record
		}
		if before.until.After(next.until) {
			next.until = before.until
		}
	case r.Mode == state.Latest && known && before.Version > r.Version:
		return nil
	case r.Mode == state.Replace, r.Mode == state.Latest:
	case known && before.Version == r.Version:
		next.until, next.finished = before.until, next.finished || before.finished
		if before.finished {
			return nil
		}
	case r.Mode == state.Finish, known && !before.finished && !next.outlasts(before):
		return nil
	}
	if !known && len(group) >= cmp.Or(r.Most, state.MaxRecords) {
		return state.ErrFull
	}
	group[r.Key] = next
	return nil
}

// Load implements state.Store.
func (m memory) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	_, delay := m.running()
	loaded, now, err := m.load(groups)
	if err := wait(ctx, delay); err != nil {
		return nil, now, err
	}
	m.running()
	return loaded, now, err
}

func wait(ctx context.Context, delay time.Duration) error {
	if delay == 0 {
		return ctx.Err()
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(delay):
		return nil
	}
}

func (m memory) load(groups []string) (loaded []state.Kept, now time.Time, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now = time.Now()
	for _, group := range groups {
		for _, k := range m.groups[group] {
			if k.over(now) {
				continue
			}
			one := state.Kept{Group: group, Key: k.Key, Message: k.Message}
			if !k.until.IsZero() {
				one.TTL = k.until.Sub(now)
			}
			loaded = append(loaded, one)
		}
	}
	return loaded, now, m.down
}

// Keep implements state.Store.
func (m memory) Keep(_ context.Context, entries []state.Entry) (failed []int, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	for i, e := range entries {
		if refusal := m.refusal(e.Key); refusal != nil {
			failed, err = append(failed, i), cmp.Or(err, refusal)
			continue
		}
		next := entry{e, now.Add(e.TTL)}
		next.Value = slices.Clone(e.Value)
		if before, ok := m.entries[e.Key]; ok && now.Before(before.until) && (before.Firm || !e.Firm) {
			next.Entry = before.Entry
		}
		m.entries[e.Key] = next
	}
	return failed, err
}

// Find implements state.Store.
func (m memory) Find(ctx context.Context, keys []string) ([]state.Entry, error) {
	m.mu.Lock()
	m.finds++
	now, slow := time.Now(), m.slow
	if m.cost > 0 {
		if m.busyUntil.Before(now) {
			m.busyUntil = now
		}
		m.busyUntil = m.busyUntil.Add(time.Duration(len(keys)) * m.cost)
		slow += m.busyUntil.Sub(now)
	}
	m.mu.Unlock()
	if err := wait(ctx, slow); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now = time.Now()
	found := make([]state.Entry, len(keys))
	for i, key := range keys {
		found[i].Key = key
		if e, ok := m.entries[key]; ok && now.Before(e.until) {
			found[i] = e.Entry
			found[i].TTL = e.until.Sub(now)
		}
	}
	return found, m.down
}

// Claim implements state.Store.
func (m memory) Claim(ctx context.Context, claims []state.Claim) (won []bool, err error) {
	delay, _ := m.running()
	if err := wait(ctx, delay); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := cmp.Or(m.down, m.full); err != nil {
		return nil, err
	}
	now := time.Now()
	m.claimed += len(claims)
	for _, c := range claims {
		if known, ok := m.claims[c.Name]; !ok || !now.Before(known.until) {
			m.claims[c.Name] = claim{m.id, now.Add(c.TTL)}
		}
		won = append(won, m.claims[c.Name].by == m.id)
	}
	return won, nil
}

// Listen implements state.Store.
func (m memory) Listen(ctx context.Context, ready func(), hear func([]byte)) error {
	l := make(chan []byte, 10_000)
	m.mu.Lock()
	err := m.down
	if err == nil {
		m.listeners[l] = true
	}
	m.mu.Unlock()
	if err != nil {
		return err
	}
	ready()
	for {
		select {
		case <-ctx.Done():
			m.mu.Lock()
			delete(m.listeners, l)
			m.mu.Unlock()
			return ctx.Err()
		case message, ok := <-l:
			if !ok {
				return errors.New("the hub is down")
			}
			m.running()
			hear(message)
		}
	}
}

// Close implements state.Store.
func (memory) Close() error { return nil }
