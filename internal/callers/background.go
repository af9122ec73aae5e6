package callers

import (
	"hash/maphash"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
)

// maxBackground is for how many responses in the background it is remembered what they were charged with.
const maxBackground = 10_000

// background has the charges of responses that go on after the reply to their request, until a reply says what they have
// used. Of too many, the oldest ones keep their charges.
type background struct {
	mu   sync.Mutex
	byID map[uint64]meter.Reservation
	// ids are those of byID in the order in which they came, in a ring that goes on at next. 0: that one is settled.
	ids  []uint64
	next int
}

var seed = maphash.MakeSeed()

func (b *background) add(id string, r meter.Reservation) {
	key := maphash.String(seed, id)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.byID == nil {
		b.byID = make(map[uint64]meter.Reservation)
	}
	if _, known := b.byID[key]; known {
		return // an id is never used twice
	}
	b.byID[key] = r
	if len(b.ids) < maxBackground {
		b.ids = append(b.ids, key)
		return
	}
	delete(b.byID, b.ids[b.next])
	b.ids[b.next] = key
	b.next = (b.next + 1) % maxBackground
}

func (b *background) has(id string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := b.byID[maphash.String(seed, id)]
	return ok
}

func (b *background) take(id string) (r meter.Reservation, ok bool) {
	key := maphash.String(seed, id)
	b.mu.Lock()
	defer b.mu.Unlock()
	r, ok = b.byID[key]
	delete(b.byID, key)
	return r, ok
}

// Leave ends the request of a response that goes on in the background. It is charged with all output that it may have,
// until a reply to any request says what it has used. id may be empty.
func (a *Admission) Leave(now time.Time, id string) {
	if !a.Open() {
		return
	}
	if later := a.reservation.Leave(now); id != "" {
		a.kept.background.add(id, later)
	}
	a.kept.saver.Changed()
}

// Awaits reports whether a response with this id has been left in the background, and not been settled.
func (a *Admission) Awaits(id string) bool {
	return id != "" && a.kept != nil && a.kept.background.has(id)
}

// SettleLeft replaces the charge of a response that was left in the background by what it has cost. Any
// caller's request may have found that out.
func (a *Admission) SettleLeft(now time.Time, id string, cost meter.Cost) {
	if left, ok := a.kept.background.take(id); ok {
		left.Settle(now, cost)
		a.kept.saver.Changed()
	}
}
