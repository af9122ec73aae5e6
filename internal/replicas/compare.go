package replicas

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// compare says that this replica is there, takes in what the store keeps, and
// tells what the store does not keep but should.
func (r *Replica) compare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	links := r.openLinks()
	groups := []string{replicaGroup, drainGroup}
	for _, l := range links {
		for _, backend := range l.names {
			if !slices.Contains(groups, backend) {
				groups = append(groups, backend)
			}
		}
	}
	failed := r.store.Put(ctx, []state.Record{r.alive(time.Now())})
	kept, err := r.store.Load(ctx, groups)
	if err != nil {
		return cmp.Or(failed, err)
	}
	now := time.Now()
	known := make(map[recordKey]record)
	for _, k := range kept {
		r.takeIn(k, known, now)
	}
	for _, l := range links {
		r.tellMissing(l, known, now)
	}
	r.tellUnsent(now)
	return failed
}

// recordKey names a record, and record is what is known of it.
type recordKey struct{ group, key string }

type record struct {
	message
	ttl time.Duration
}

func (r *Replica) takeIn(k state.Kept, known map[recordKey]record, now time.Time) {
	m, err := parse(k.Message)
	if err != nil {
		messagesIn.WithLabelValues("invalid").Inc()
		return
	}
	heard := now
	switch {
	case m.Bench != nil:
		m.Bench.Left = milliseconds(k.TTL)
		m.Bench.Length = max(m.Bench.Length, m.Bench.Left)
	case m.Kind == alive:
		heard = now.Add(k.TTL - lifetime)
	}
	known[recordKey{k.Group, k.Key}] = record{m, k.TTL}
	r.hear(m, heard)
}

// lag is by how much what is left of a bench may differ between replicas, and
// what is not worth telling any more.
const lag = 200 * time.Millisecond

// tellMissing tells of what is known here and not kept by the store: because it
// could not be reached, or lost its data.
func (r *Replica) tellMissing(l *Link, known map[recordKey]record, now time.Time) {
	for _, s := range l.pool.Snapshot(now) {
		backend := l.names[s.Member]
		for _, b := range s.Benches {
			left := b.Until.Sub(now)
			kept, ok := known[recordKey{backend, benchOf(b, now).key()}]
			ok = ok && kept.Bench != nil && (kept.Bench.ID == idOf(b) || kept.Kind != disproved && kept.ttl > left-lag)
			if !ok && left > lag && shared(b) {
				r.enqueue(item{kind: benched, backend: backend, bench: b, at: now})
			}
		}
		r.tellMissingDrain(s.Member, backend, known, now)
	}
}

func (r *Replica) tellMissingDrain(m *pool.Member, backend string, known map[recordKey]record, now time.Time) {
	member := digest(m.Name)
	if _, ok := known[recordKey{drainGroup, backend + member}]; !ok && m.TakenOut() {
		r.enqueue(item{kind: drained, backend: backend, member: member, at: now})
	}
}

// tellUnsent tells once more of drains that did not arrive.
func (r *Replica) tellUnsent(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, out := range r.unsent {
		i := item{kind: resumed, backend: key.backend, member: key.member, at: now}
		if out {
			i.kind = drained
		}
		r.enqueue(i)
	}
}
