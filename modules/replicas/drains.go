package replicas

import (
	"fmt"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// drains remembers the latest order to drain or resume each member. Orders have
// numbers, so that all replicas agree which order is the latest, regardless of
// what they hear first and whether the store keeps it. Each replica repeats the
// orders that it knows and the store lacks.
type drains struct {
	mu    sync.Mutex
	known map[drainKey]order
}

type drainKey struct{ backend, member string }

// order is the latest order for a member.
type order struct {
	// number is the time of the order by the store's clock, in microseconds,
	// but at least one more than the number of the previous order. It is 0 if
	// the time is not known.
	number int64
	// out reports whether the order takes the member out of use.
	out bool
	// origin is the order as the operator gave it.
	origin pool.Order
	// sent is when a replica last sent the order.
	sent time.Time
	// given is the local time of an order that was given here before the
	// store's clock was known. It is zero for other orders.
	given time.Time
}

const (
	// remembered is how long an order to resume a member is repeated. An order
	// to drain it is repeated while it is in effect.
	remembered = state.MaxTTL
	// repeat is the time after which an order that the store lacks is sent
	// again.
	repeat = 2 * interval
)

// before reports whether other is later than o. Of two orders with the same
// number, the one that resumes the member is later.
func (o order) before(other order) bool {
	return o.number < other.number || o.number == other.number && o.out && !other.out
}

func (o order) kind() kind {
	if o.out {
		return drained
	}
	return resumed
}

// version returns a text for the order. Texts are ordered as before orders the
// orders.
func (o order) version() string { return fmt.Sprintf("%019d %s", o.number, o.kind()) }

// left returns how long an order to resume a member is still repeated.
func (o order) left(storeTime int64) time.Duration {
	return min(remembered, remembered-time.Duration(storeTime-o.number)*time.Microsecond)
}

func (m *message) order(sent time.Time) order {
	o := order{number: m.Order, out: m.Kind == drained, origin: pool.Order{By: m.By, Reason: m.Reason}, sent: sent}
	if m.Order > 0 {
		o.origin.Time = time.UnixMicro(m.Order)
	}
	return o
}

// date returns the time by the store's clock. If that clock is not known, it
// returns the local time, and exact is false.
func (r *Replica) date(here time.Time) (micros int64, exact bool) {
	if storeTime := r.clock.at(here); storeTime > 0 {
		return storeTime, true
	}
	return here.UnixMicro(), false
}

// ordered numbers an order that was given here.
func (r *Replica) ordered(m *pool.Member, i *item) {
	r.drains.mu.Lock()
	defer r.drains.mu.Unlock()
	key := drainKey{i.backend, i.member}
	i.order.out, i.order.sent = i.kind == drained, i.at
	storeTime, exact := r.date(i.at)
	if i.order.number = max(storeTime, r.drains.known[key].number+1); !exact {
		i.order.given = i.at
	}
	r.drains.known[key] = i.order
	m.HearDrained(i.order.out, i.order.origin) // perhaps an older order was applied just now
}

// hearDrain applies an order from another replica or from the store if it is
// the latest one.
func (r *Replica) hearDrain(m message, sent, now time.Time) {
	r.drains.mu.Lock()
	defer r.drains.mu.Unlock()
	key, o := drainKey{m.Backend, m.Member}, m.order(sent)
	known, ok := r.drains.known[key]
	if ok && o.before(known) || !r.believes(o, now) {
		return
	}
	if ok && !known.before(o) { // it is the same order
		if o.origin.By == "" && o.origin.Reason == "" { // sent by an earlier version
			o.origin = known.origin
		}
		if known.sent.After(sent) {
			o.sent = known.sent
		}
	}
	if r.applyOrder(key, o) {
		r.drains.known[key] = o
	}
}

// believes reports whether a replica can have given the order: its number is
// not too far in the future. It may be ahead of the store's clock, because that
// clock may have been set back.
func (r *Replica) believes(o order, now time.Time) bool {
	storeTime, _ := r.date(now)
	return o.number <= storeTime+remembered.Microseconds()
}

// applyOrder applies an order, and reports whether its member exists here.
func (r *Replica) applyOrder(key drainKey, o order) (there bool) {
	for _, l := range r.openLinks() {
		for member, backend := range l.backends() {
			if backend == key.backend && digest(member.Name) == key.member {
				member.HearDrained(o.out, o.origin)
				there = true
			}
		}
	}
	return there
}

// repeatOrders sends the orders again that are later than those in the store.
func (r *Replica) repeatOrders(links []*Link, known map[recordKey]record, now time.Time) {
	r.drains.mu.Lock()
	defer r.drains.mu.Unlock()
	for _, l := range links {
		for m, backend := range l.backends() {
			key := drainKey{backend, digest(m.Name)}
			if _, ok := r.drains.known[key]; ok {
				continue
			}
			if drain := m.TakenOut(); drain != nil {
				r.drains.known[key] = order{out: true, origin: *drain} // from before the members were shared
			}
		}
	}
	storeTime, _ := r.date(now)
	for key, o := range r.drains.known {
		if !o.given.IsZero() {
			o.number, o.given = r.clock.at(o.given), time.Time{}
			r.drains.known[key] = o
		}
		if !o.out && o.left(storeTime) <= 0 || !r.applyOrder(key, o) {
			delete(r.drains.known, key)
			continue
		}
		kept, there := known[recordKey{drainGroup, key.backend + key.member}]
		wrong := there && !kept.foreign && !r.believes(kept.order(now), now)
		if there && !wrong && !kept.partial && (kept.foreign || !kept.order(now).before(o)) ||
			now.Sub(o.sent) < repeat {
			continue
		}
		o.sent = now
		r.drains.known[key] = o
		r.enqueue(item{kind: o.kind(), backend: key.backend, member: key.member, order: o, replace: wrong, at: now})
	}
}

// recordOrder returns the store's record of an order, without its message. ok
// is false if the order is too old to be sent.
func (r *Replica) recordOrder(i item, now time.Time) (record state.Record, ok bool) {
	record = state.Record{Group: drainGroup, Key: i.backend + i.member, Mode: state.Latest, Version: i.order.version()}
	if i.replace {
		record.Mode = state.Replace
	}
	if !i.order.out {
		storeTime, _ := r.date(now)
		record.TTL = i.order.left(storeTime)
	}
	return record, i.order.out || record.TTL > 0
}
