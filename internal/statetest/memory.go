// Package statetest helps to test engines of shared state, and what uses them:
// a store in memory, which can fail, and what every store has to do.
package statetest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// Hub is what stores in memory share, in place of a server.
type Hub struct {
	mu        sync.Mutex
	down      error
	deaf      bool
	groups    map[string]map[string]kept
	claims    map[string]time.Time
	listeners map[chan []byte]bool
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

// NewHub returns a hub that works.
func NewHub() *Hub {
	h := &Hub{listeners: make(map[chan []byte]bool)}
	h.Flush()
	return h
}

// Flush forgets all that is kept.
func (h *Hub) Flush() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.groups, h.claims = make(map[string]map[string]kept), make(map[string]time.Time)
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

// LoseMessages keeps messages from those who listen, but no records.
func (h *Hub) LoseMessages(lose bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deaf = lose
}

// Len is how many records are kept of a group.
func (h *Hub) Len(group string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.groups[group])
}

// Store returns a store of the hub.
func (h *Hub) Store() state.Store { return memory{h} }

type memory struct{ *Hub }

// Put implements state.Store.
func (m memory) Put(_ context.Context, records []state.Record) error {
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
	before, known := group[r.Key]
	known = known && !before.over(now)
	switch {
	case r.Mode == state.Replace:
	case known && before.Version == r.Version:
		next.until, next.finished = before.until, next.finished || before.finished
		if before.finished {
			return nil
		}
	case r.Mode == state.Finish, known && !before.finished && !next.outlasts(before):
		return nil
	}
	if !known && len(group) >= state.MaxRecords {
		return state.ErrFull
	}
	group[r.Key] = next
	return nil
}

// Load implements state.Store.
func (m memory) Load(_ context.Context, groups []string) (loaded []state.Kept, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
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
	return loaded, m.down
}

// Claim implements state.Store.
func (m memory) Claim(_ context.Context, name string, ttl time.Duration) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down != nil {
		return false, m.down
	}
	now := time.Now()
	if until, ok := m.claims[name]; ok && now.Before(until) {
		return false, nil
	}
	m.claims[name] = now.Add(ttl)
	return true, nil
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
			hear(message)
		}
	}
}

// Close implements state.Store.
func (memory) Close() error { return nil }
