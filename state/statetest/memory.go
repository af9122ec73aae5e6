package statetest

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// memory is a store of a hub. Its id distinguishes it from others.
type memory struct {
	*Hub
	id *byte
}

// running waits while the store is suspended. It returns how long Put and Load
// take.
func (m memory) running() (put, load time.Duration) {
	m.mu.Lock()
	goesOn, put, load := m.faults.suspended[m.id], m.delays.put, m.delays.load
	m.mu.Unlock()
	if goesOn != nil {
		<-goesOn
	}
	return put, load
}

// Put implements state.Store.
func (m memory) Put(ctx context.Context, records []state.Record) error {
	delay, _ := m.running()
	if err := m.wait(ctx, delay); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.faults.down != nil {
		return m.faults.down
	}
	var errs []error
	for _, r := range records {
		if r.Message = slices.Clone(r.Message); !m.faults.deaf {
			news := r.Message
			if r.News != nil {
				news = slices.Clone(r.News)
			}
			for l := range m.listeners {
				if len(news) > 0 {
					l <- news
				}
			}
		}
		if m.faults.full != nil {
			errs = append(errs, m.faults.full)
			continue
		}
		errs = append(errs, m.keep(r, time.Now()))
	}
	return errors.Join(errs...)
}

// Load implements state.Store.
func (m memory) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	_, delay := m.running()
	loaded, now, err := m.load(groups)
	if err := m.wait(ctx, delay); err != nil {
		return nil, now, err
	}
	m.running()
	return loaded, now, err
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
		if before, ok := m.contents.entries[e.Key]; ok && now.Before(before.until) && (before.Firm || !e.Firm) {
			next.Entry = before.Entry
		}
		m.contents.entries[e.Key] = next
	}
	return failed, err
}

// Find implements state.Store.
func (m memory) Find(ctx context.Context, keys []string) ([]state.Entry, error) {
	m.mu.Lock()
	m.counts.finds++
	now, slow := time.Now(), m.delays.find
	if m.delays.each > 0 {
		if m.delays.busyUntil.Before(now) {
			m.delays.busyUntil = now
		}
		m.delays.busyUntil = m.delays.busyUntil.Add(time.Duration(len(keys)) * m.delays.each)
		slow += m.delays.busyUntil.Sub(now)
	}
	m.mu.Unlock()
	if err := m.wait(ctx, slow); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now = time.Now()
	found := make([]state.Entry, len(keys))
	for i, key := range keys {
		found[i].Key = key
		if e, ok := m.contents.entries[key]; ok && now.Before(e.until) {
			found[i] = e.Entry
			found[i].TTL = e.until.Sub(now)
		}
	}
	return found, m.faults.down
}

// Claim implements state.Store.
func (m memory) Claim(ctx context.Context, claims []state.Claim) (won []bool, err error) {
	delay, _ := m.running()
	if err := m.wait(ctx, delay); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := cmp.Or(m.faults.down, m.faults.full); err != nil {
		return nil, err
	}
	now := time.Now()
	m.counts.claims += len(claims)
	for _, c := range claims {
		if known, ok := m.contents.claims[c.Name]; !ok || !now.Before(known.until) {
			m.contents.claims[c.Name] = claim{m.id, now.Add(c.TTL)}
		}
		won = append(won, m.contents.claims[c.Name].by == m.id)
	}
	return won, nil
}

// Listen implements state.Store.
func (m memory) Listen(ctx context.Context, ready func(), hear func([]byte)) error {
	l := make(chan []byte, 10_000)
	m.mu.Lock()
	err := m.faults.down
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

// wait waits for the delay, and while the hub hangs. It returns an error if the
// context is done first.
func (m memory) wait(ctx context.Context, delay time.Duration) error {
	m.mu.Lock()
	goesOn := m.faults.hangs
	m.mu.Unlock()
	if goesOn != nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-goesOn:
		}
	}
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
