package replicas

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// compare sends a sign of life, waits for spread, loads the records of the
// store and applies them, and sends the records that the store lacks.
func (r *Replica) compare(ctx context.Context, spread time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, spread+patience)
	defer cancel()
	read := r.peers.toRead(time.Now())
	failed := r.showLife(ctx)
	if failed == nil && spread > 0 && !pause(ctx, spread) {
		return ctx.Err()
	}
	links := r.openLinks()
	groups := append(r.usage.Groups(time.Now()), drainGroup)
	if read {
		groups = append(groups, replicaGroup)
	}
	for _, l := range links {
		groups = slices.AppendSeq(groups, maps.Values(l.backends()))
	}
	slices.Sort(groups)
	groups = slices.Compact(groups)
	sent := time.Now()
	kept, shown, err := r.store.Load(ctx, groups)
	now := time.Now()
	if now.Sub(sent) > patience {
		err = cmp.Or(err, errors.New("the answer came too late")) // what is left of each record is less by now
	}
	if err != nil {
		return cmp.Or(failed, err)
	}
	if read {
		r.peers.wereRead(sent)
	}
	missing := r.missing()
	r.connectivity.misses(r, missing)
	r.clock.set(shown, sent, now)
	if missing == nil { // or else the far servers did not answer
		r.stored.patience.took(now.Sub(sent))
	}
	r.usage.Follow(now, r.clock.ahead())
	known, sizes := make(map[recordKey]record), make(map[string]int)
	for _, k := range r.usage.Loaded(kept, now) {
		sizes[k.Group]++
		r.apply(k, known, now)
	}
	for _, l := range links {
		r.sendMissing(l, known, sizes, now)
	}
	r.repeatOrders(links, known, now)
	if r.connectivity.isWhole() {
		r.peers.forget(now)
	}
	return failed
}

// missing returns an error that names the servers of the store that cannot be
// reached, while others can. It returns nil if there are none.
func (r *Replica) missing() error {
	if spread, ok := r.store.(state.SpreadStore); ok {
		return spread.Missing()
	}
	return nil
}

func (r *Replica) showLife(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	now := time.Now()
	if err := r.store.Put(ctx, append(r.tierCosts(now), r.alive(now))); !errors.Is(err, state.ErrFull) {
		return err
	}
	return nil // it is in touch
}

// recordKey identifies a record of the store. record is the content of the
// record and its state in the store.
type recordKey struct{ group, key string }

type record struct {
	message
	ttl time.Duration
	// foreign reports whether the message cannot be read, as if a replica of
	// another version wrote it. partial reports whether a server of the store
	// lacks the record.
	foreign, partial bool
}

func (r *Replica) apply(k state.Kept, known map[recordKey]record, now time.Time) {
	m, err := parse(k.Message)
	if err != nil {
		r.invalid(err)
		known[recordKey{k.Group, k.Key}] = record{foreign: true} // and not overwritten
		return
	}
	known[recordKey{k.Group, k.Key}] = record{message: m, ttl: k.TTL, partial: k.Partial}
	switch m.Kind {
	case drained, resumed:
		r.hearDrain(m, time.Time{}, now)
	case alive:
		r.usage.Count(now, r.peers.hear(m, now.Add(min(k.TTL-lifetime, -r.clock.age(m, now))), now))
	case left:
		r.peers.remove(m.From, now)
	case tierCosts, asked:
		// shares are sent again soon, and a question is over by then
	default:
		// the rest may be a little longer than the message says, if two
		// cooldowns are one; it is much longer if the store's clock was set
		// back, or if the store was suspended before it kept the message
		told, more := m.Cooldown.Left-r.clock.age(m, now).Milliseconds(), m.Cooldown.Length/10+slack.Milliseconds()
		m.Cooldown.Left = max(0, min(milliseconds(k.TTL), m.Cooldown.Length+m.Cooldown.Length/10, told+more))
		m.Cooldown.Length = max(m.Cooldown.Length, m.Cooldown.Left)
		r.hear(m, now, now)
	}
}

// slack is how long a message may take without being late, and the largest
// error of reading the store's clock. A message is late if this replica or the
// store was suspended after it was sent.
const slack = 500 * time.Millisecond

// lag is how much the rest of a cooldown may differ between replicas, and the
// longest rest that is not worth a message.
const lag = 200 * time.Millisecond

// sendMissing sends the cooldowns that the store lacks, because it could not be
// reached or has lost its data. If a backend's group has no room for a
// cooldown, that one waits until another cooldown is over.
func (r *Replica) sendMissing(l *Link, known map[recordKey]record, sizes map[string]int, now time.Time) {
	// before the snapshot, in which a backend with a new name has no cooldowns
	// of the name before
	names := l.backends()
	for _, s := range l.pool.Snapshot(now) {
		backend := names[s.Member]
		for _, c := range s.Cooldowns {
			left := c.Until.Sub(now)
			told := cooldownOf(c, now)
			kept, there := known[recordKey{backend, told.key()}]
			ok := there && !kept.partial &&
				(kept.foreign || kept.Cooldown != nil && (kept.Cooldown.ID == idOf(c) ||
					kept.Kind != disproved && kept.ttl > left-lag))
			i := item{kind: coolingDown, backend: backend, cooldown: c, at: now}
			if c.InDoubt {
				i.kind = doubted
				ok = ok && (kept.Kind != coolingDown || kept.Cooldown.ID != idOf(c))
			}
			if ok || left <= lag || !shareable(c) || !concernsOthers(s.Member, c) ||
				!there && sizes[backend] >= told.most() {
				continue
			}
			if !there {
				sizes[backend]++
			}
			r.enqueue(i)
		}
	}
}
