package replicas

import (
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// drains remembers the orders to take members out of use, and to put them back.
// The latest order holds. So what was read from the store does not count for a
// member for which an order has come since, from here or elsewhere.
type drains struct {
	mu sync.Mutex
	// orders counts orders, and their arrival at the store.
	orders uint64
	known  map[drainKey]order
}

type drainKey struct{ backend, member string }

// order is the latest one for a member.
type order struct {
	number uint64
	out    bool
	// unsent tells that it is ours, and that the store may not know it.
	unsent bool
}

// keep remembers the latest order for a member. The caller holds the lock.
func (d *drains) keep(key drainKey, out, unsent bool) {
	d.orders++
	d.known[key] = order{d.orders, out, unsent}
}

// ordered takes in an order that was given here.
func (d *drains) ordered(m *pool.Member, i item) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := i.kind == drained
	d.keep(drainKey{i.backend, i.member}, out, true)
	m.HearDrained(out) // perhaps it was overruled by an older one just now
}

// sent takes in that the store knows an order of ours.
func (d *drains) sent(i item) {
	d.mu.Lock()
	defer d.mu.Unlock()
	key := drainKey{i.backend, i.member}
	if o := d.known[key]; o.unsent && o.out == (i.kind == drained) {
		d.keep(key, o.out, false)
	}
}

// now is the number of the latest order.
func (d *drains) now() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.orders
}

// since reports whether an order for the member has come since that one.
func (d *drains) since(key drainKey, number uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.known[key].number > number
}

// hearDrain takes in an order that another replica tells.
func (r *Replica) hearDrain(m message) {
	d := &r.drains
	d.mu.Lock()
	defer d.mu.Unlock()
	key := drainKey{m.Backend, m.Member}
	if d.known[key].unsent {
		return // it is older than what we have to tell
	}
	if r.applyDrain(m) {
		d.keep(key, m.Kind == drained, false)
	}
}

// takeInDrain takes in an order that the store kept when the latest one was
// that of the number.
func (r *Replica) takeInDrain(m message, number uint64) {
	d := &r.drains
	d.mu.Lock()
	defer d.mu.Unlock()
	if o := d.known[drainKey{m.Backend, m.Member}]; !o.unsent && o.number <= number {
		r.applyDrain(m)
	}
}

// applyDrain reports whether there is such a member.
func (r *Replica) applyDrain(m message) (there bool) {
	for _, l := range r.openLinks() {
		for member, backend := range l.backends() {
			if backend == m.Backend && digest(member.Name) == m.Member {
				member.HearDrained(m.Kind == drained)
				there = true
			}
		}
	}
	return there
}

// tellMissingDrain tells of a member that is out of use, if the store did not
// know that when the latest order was that of the number.
func (r *Replica) tellMissingDrain(m *pool.Member, backend string, known map[recordKey]record, number uint64, now time.Time) {
	member := digest(m.Name)
	if _, ok := known[recordKey{drainGroup, backend + member}]; !ok && m.TakenOut() && !r.drains.since(drainKey{backend, member}, number) {
		r.enqueue(item{kind: drained, backend: backend, member: member, at: now})
	}
}

// tellUnsent tells once more of drains that did not arrive.
func (r *Replica) tellUnsent(now time.Time) {
	r.drains.mu.Lock()
	defer r.drains.mu.Unlock()
	for key, o := range r.drains.known {
		if !o.unsent {
			continue
		}
		i := item{kind: resumed, backend: key.backend, member: key.member, at: now}
		if o.out {
			i.kind = drained
		}
		r.enqueue(i)
	}
}
