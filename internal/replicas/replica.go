// Package replicas lets the replicas of a balancer share what they know. It
// tells other replicas what happens to the members of pools here, and tells
// these members what happened elsewhere. A [state.Store] moves the messages.
//
// What happens is told at once. Once a second, and whenever the store can be
// reached again, a replica also compares what is kept in the store with what it
// knows, and makes up for the difference on either side. So a message that is
// lost costs a second, and a store that lost its data gets it back.
//
// They also share which account has which stored object: [Owners].
//
// No request waits for any of that, except for an answer about an owner. While
// the store cannot be reached, replicas go on by themselves.
package replicas

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	mathrand "math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/owners"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// interval is how often a replica compares what it knows with the store.
	interval = time.Second
	// retry is how long it waits after it could not be reached.
	retry = 400 * time.Millisecond
	// patience is how long any use of the store may take.
	patience = time.Second
	// lifetime is how long a replica counts after it was last heard.
	lifetime = 10 * time.Second
)

// Groups of records besides those of each backend.
const (
	replicaGroup = "replicas"
	drainGroup   = "drains"
)

// Replica is one of those that share a store.
type Replica struct {
	id     string
	host   string
	store  state.Store
	queue  *queue[item]
	claims *claims
	drains drains
	clock  clock
	// due wakes who compares.
	due    chan struct{}
	logger atomic.Pointer[zap.Logger]
	touch  touch
	// owned are owners that the store is to keep.
	owned   *queue[owned]
	lookups lookups
	// runs reports whether the store may be used.
	runs atomic.Bool

	mu    sync.Mutex
	began time.Time
	links []*Link
	ended map[uint64]ending
	peers map[string]Peer
}

// ending is what is known of a bench that is over.
type ending struct {
	disproved bool
	// until is when nobody can tell of the bench any more.
	until time.Time
}

// Peer is a replica, this one included.
type Peer struct {
	ID   string `json:"id"`
	Host string `json:"host"`
	// Since is when it began, and Heard when it was last heard of.
	Since time.Time `json:"since"`
	Heard time.Time `json:"heard"`
}

// New returns a replica, which does nothing until Run.
func New(store state.Store, logger *zap.Logger) *Replica {
	id := make([]byte, digestSize/2)
	rand.Read(id)
	r := &Replica{
		id: hex.EncodeToString(id), store: store, queue: newQueue[item](maxQueue), owned: newQueue[owned](maxOwned), claims: newClaims(), due: make(chan struct{}, 1),
		drains: drains{known: make(map[drainKey]order)}, ended: make(map[uint64]ending), peers: make(map[string]Peer),
		lookups: lookups{callers: make(map[owners.Caller]*turns)},
	}
	if host, err := os.Hostname(); err == nil && len(host) <= maxHost {
		r.host = host
	}
	r.SetLogger(logger)
	return r
}

// SetLogger has the replica log there from now on.
func (r *Replica) SetLogger(l *zap.Logger) { r.logger.Store(l) }

// Run shares until the context is done. When it returns, the store is not in
// use any more.
func (r *Replica) Run(ctx context.Context) {
	r.mu.Lock()
	r.began = time.Now()
	r.mu.Unlock()
	r.runs.Store(true)
	defer r.runs.Store(false)
	inUse(r, true)
	defer inUse(r, false)
	var tasks sync.WaitGroup
	for _, task := range []func(context.Context){r.tell, r.listen, r.compareAgain, r.claim, r.tellOwners} {
		tasks.Go(func() { task(ctx) })
	}
	tasks.Wait()
}

// tell tells others what happens here.
func (r *Replica) tell(ctx context.Context) {
	for {
		items := r.queue.take(ctx)
		if items == nil {
			return
		}
		var records []state.Record
		for _, i := range items {
			if record, ok := r.record(i, time.Now()); ok {
				records = append(records, record)
			}
		}
		if len(records) == 0 {
			continue
		}
		if err := r.put(ctx, records); err != nil {
			droppedTotal.WithLabelValues("failed").Add(float64(len(records)))
		}
	}
}

func (r *Replica) put(ctx context.Context, records []state.Record) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := r.store.Put(ctx, records)
	if err == nil {
		messagesOut.Add(float64(len(records)))
	}
	return err
}

// record is what the store keeps of an item. It returns false if there is
// nothing to tell any more.
func (r *Replica) record(i item, now time.Time) (record state.Record, ok bool) {
	m := message{Version: version, Kind: i.kind, From: r.id, Sent: i.at.UnixMicro(), At: r.clock.at(now), Backend: i.backend}
	switch i.kind {
	case drained, resumed:
		m.Member, m.Order, m.By, m.Reason = i.member, i.order.number, i.order.said.By, i.order.said.Reason
		if record, ok = r.recordOrder(i, now); !ok {
			return record, false
		}
	case disproved:
		m.Bench = benchOf(i.bench, now)
		record = state.Record{Group: i.backend, Mode: state.Finish, TTL: time.Second}
	default:
		m.Bench = benchOf(i.bench, now)
		record = state.Record{Group: i.backend, Mode: state.Extend, TTL: time.Duration(m.Bench.Left) * time.Millisecond, Near: i.bench.Grace()}
		if record.TTL <= 0 {
			return record, false
		}
	}
	if m.Bench != nil {
		record.Key, record.Version, record.Most = m.Bench.key(), m.Bench.ID, m.Bench.most()
	}
	record.Message = m.text()
	return record, true
}

func (m *message) text() []byte {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // it has only strings and numbers
	}
	return text
}

// listen hears what happens elsewhere.
func (r *Replica) listen(ctx context.Context) {
	for {
		err := r.store.Listen(ctx, r.compareSoon, func(text []byte) {
			m, err := parse(text)
			if err != nil {
				messagesIn.WithLabelValues("invalid").Inc()
				return
			}
			messagesIn.WithLabelValues(string(m.Kind)).Inc()
			now := time.Now()
			if m.From == r.id && m.Kind == alive && now.Sub(time.UnixMicro(m.Sent)) < interval {
				r.touch.heard(r)
			}
			if m.From == r.id && m.Bench != nil {
				return
			}
			if m.Kind == benched {
				benchDelay.Observe(max(0, now.Sub(time.UnixMicro(m.Sent)).Seconds()))
			}
			late := r.lateBy(m, now)
			if m.Bench != nil {
				m.Bench.Left = max(0, m.Bench.Left-late.Milliseconds())
			}
			r.hear(m, now.Add(-late), now)
		})
		if ctx.Err() != nil {
			return
		}
		r.touch.lost(r, err)
		reconnectsTotal.Inc()
		if !pause(ctx, retry) {
			return
		}
	}
}

// lateBy returns how late a message is read, or 0 if it took no longer than
// messages do. A late one was sent before this replica or the store was suspended.
func (r *Replica) lateBy(m message, now time.Time) time.Duration {
	if age := r.clock.age(m, now); age >= slack {
		return age
	}
	return 0
}

// pause waits for about so long. It returns false if the context is done first.
// No two replicas wait for equally long, so that they do not all come back at
// once.
func pause(ctx context.Context, about time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(jitter(about)):
		return true
	}
}

// jitter returns about as long.
func jitter(about time.Duration) time.Duration { return about*4/5 + mathrand.N(about*2/5) }

// compareAgain compares what is known here with what the store keeps, again and
// again.
func (r *Replica) compareAgain(ctx context.Context) {
	for {
		err := r.compare(ctx)
		if ctx.Err() != nil {
			return
		}
		r.touch.compared(r, err)
		wait := interval
		if err != nil {
			wait = retry
		}
		select {
		case <-ctx.Done():
			return
		case <-r.due:
		case <-time.After(jitter(wait)):
		}
	}
}

func (r *Replica) compareSoon() {
	select {
	case r.due <- struct{}{}:
	default:
	}
}

// Peers returns the replicas that share the store, the oldest first.
func (r *Replica) Peers(now time.Time) []Peer {
	r.mu.Lock()
	defer r.mu.Unlock()
	peers := make([]Peer, 0, len(r.peers))
	for id, p := range r.peers {
		if now.Sub(p.Heard) >= lifetime {
			delete(r.peers, id)
			continue
		}
		peers = append(peers, p)
	}
	slices.SortFunc(peers, func(a, b Peer) int { return cmp.Or(a.Since.Compare(b.Since), strings.Compare(a.ID, b.ID)) })
	return peers
}

// alive is the record that says that this replica is there.
func (r *Replica) alive(now time.Time) state.Record {
	m := message{Version: version, Kind: alive, From: r.id, Sent: now.UnixMicro(), At: r.clock.at(now), Host: r.host, Since: r.began.UnixMilli()}
	return state.Record{Group: replicaGroup, Key: r.id, Mode: state.Replace, TTL: lifetime, Message: m.text()}
}

// memberOf returns a member of the backend, or nil.
func (r *Replica) memberOf(backend string) *pool.Member {
	for _, l := range slices.Backward(r.openLinks()) {
		if m := l.member(backend); m != nil {
			return m
		}
	}
	return nil
}

func (r *Replica) openLinks() []*Link {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.links)
}
