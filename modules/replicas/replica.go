// Package replicas is the module that shares state between the replicas of a
// balancer: cooldowns and drains of backends, the accounts of stored objects,
// and the use of callers, of quotas of backends, and of tiers. The core and
// other modules know only its interfaces, [seam.ReplicationModule] and
// [seam.Replication].
//
// A handler that names an engine uses the [Replica] of that engine, together
// with all handlers of the process that name the same engine. Its [Link]
// connects its pool with the other replicas: it sends them the events of its
// members, and applies their events to its members. [Owners] asks them for the
// accounts of stored objects. Messages pass through a [state.Store].
//
// An event is sent immediately. Once a second, and whenever the store can be
// reached again, a replica also compares its state with the store's records,
// and corrects the differences on both sides. So a lost message costs a second,
// and a store that has lost its data gets it back.
//
// A request waits for other replicas in only two cases: for the owner of an
// object, and to use more than this replica's part of a limit. While the store
// cannot be reached, each replica goes on alone.
//
// Use of callers has three words, which package limiter defines: a Sharing says
// which part of a limit a replica may use on its own, a Timeline says when a
// replica used a limit, and Spread places use in time of which only the sum is
// known.
//
// [Replica], [Link] and [Owners] are safe for concurrent use.
package replicas

import (
	"context"
	"encoding/json"
	mathrand "math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas/usagesync"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// interval is the time between comparisons with the store. All replicas
	// hear each other's signs of life, so with many replicas it grows by
	// perReplica for each of them, up to longest.
	interval, perReplica, longest = time.Second, 30 * time.Millisecond, 3 * time.Second
	// retry is the pause after the store could not be reached.
	retry = 400 * time.Millisecond
	// patience is the maximum time of an operation of the store.
	patience = time.Second
)

// Groups of records. There is also one group for each backend.
const (
	replicaGroup = "replicas"
	drainGroup   = "drains"
)

// Replica is one of the replicas that share a store.
type Replica struct {
	store  state.Store
	logger atomic.Pointer[zap.Logger]
	queue  *queue[item]
	claims claims
	drains drains
	clock  clock
	peers  peers
	stored ownerStore
	usage  usagesync.Syncer
	hours  keptHours
	// questions are questions of other replicas that wait to be answered.
	questions chan message
	// due wakes compareAgain for a comparison.
	due          signal
	connectivity connectivity
	// runs reports whether the store may be used.
	runs atomic.Bool

	// asking counts this replica's questions that wait for answers.
	asking sync.WaitGroup

	mu    sync.Mutex
	stop  func()          // nil: it was not started
	life  context.Context // nil: it does not run
	links []*Link
	ended map[uint64]ending
}

// ending is the end of a cooldown.
type ending struct {
	disproved bool
	// until is the time after which no replica reports the cooldown any more.
	until time.Time
}

// New returns a replica. It does nothing until Run.
func New(store state.Store, logger *zap.Logger) *Replica {
	r := &Replica{
		store: store, queue: newQueue[item](maxQueue), due: newSignal(), peers: newPeers(),
		claims: claims{due: make(map[recordKey]pool.Cooldown), changed: newSignal()},
		ended:  make(map[uint64]ending), drains: drains{known: make(map[drainKey]order)},
		questions: make(chan message, maxQuestions),
		stored:    ownerStore{queue: newQueue[owned](maxOwned), lookups: ownership.NewLookups()},
	}
	r.logger.Store(logger)
	return r
}

// start runs the replica in the background, unless it is running, and sets its
// logger. The number of replicas is saved in storage under the key.
func (r *Replica) start(logger *zap.Logger, storage certmagic.Storage, key string) {
	r.logger.Store(logger)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stop != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { r.keepNumber(ctx, storage, key) })
	running.Go(func() { r.Run(ctx) })
	r.stop = func() {
		cancel()
		running.Wait()
	}
}

// Destruct implements caddy.Destructor. It ends the replica after its last use.
func (r *Replica) Destruct() error {
	r.mu.Lock()
	stop := r.stop
	r.mu.Unlock()
	if stop != nil {
		stop()
	}
	return r.store.Close()
}

// Run shares state until the context is done. After it returns, the store is no
// longer used.
func (r *Replica) Run(ctx context.Context) {
	r.peers.self.Since = time.Now()
	r.mu.Lock()
	r.life = ctx
	r.mu.Unlock()
	r.runs.Store(true)
	defer r.runs.Store(false)
	running.Store(r, true)
	defer running.Delete(r)
	var tasks sync.WaitGroup
	for _, task := range []func(context.Context){
		r.send, r.listen, r.compareAgain, r.claim, r.sendOwners, r.sendUse, r.answer,
	} {
		tasks.Go(func() { task(ctx) })
	}
	tasks.Wait()
	if r.connectivity.isConnected() {
		_ = r.put(context.WithoutCancel(ctx), []state.Record{r.leave(time.Now())})
	}
	r.mu.Lock()
	r.life = nil
	r.mu.Unlock()
	r.asking.Wait()
}

func (r *Replica) send(ctx context.Context) {
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
		if len(records) > 0 {
			_ = r.put(ctx, records)
		}
	}
}

func (r *Replica) put(ctx context.Context, records []state.Record) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := r.store.Put(ctx, records)
	if err == nil {
		messagesOut.Add(float64(len(records)))
	} else {
		droppedTotal.WithLabelValues("failed").Add(float64(len(records)))
	}
	return err
}

func (r *Replica) sendUse(ctx context.Context) {
	r.usage.Run(ctx, r.put, func() usagesync.Contact {
		contact := r.peers.contact(time.Now())
		contact.Whole, contact.Cut = r.connectivity.reach()
		return contact
	})
}

// record returns the store's record of an item. ok is false if the item need no
// longer be sent.
func (r *Replica) record(i item, now time.Time) (record state.Record, ok bool) {
	m := r.message(i.kind, i.at, now)
	m.Backend = i.backend
	switch i.kind {
	case drained, resumed:
		m.Member, m.Order, m.By, m.Reason = i.member, i.order.number, i.order.origin.By, i.order.origin.Reason
		if record, ok = r.recordOrder(i, now); !ok {
			return record, false
		}
	case disproved:
		m.Cooldown = cooldownOf(i.cooldown, now)
		record = state.Record{Group: i.backend, Mode: state.Finish, TTL: time.Second}
	default:
		m.Cooldown = cooldownOf(i.cooldown, now)
		record = state.Record{Group: i.backend, Mode: state.Extend,
			TTL: time.Duration(m.Cooldown.Left) * time.Millisecond, Near: i.cooldown.Grace()}
		if record.TTL <= 0 {
			return record, false
		}
	}
	if m.Cooldown != nil {
		record.Key, record.Version, record.Most = m.Cooldown.key(), m.Cooldown.ID, m.Cooldown.most()
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

func (r *Replica) listen(ctx context.Context) {
	for {
		err := r.store.Listen(ctx, func() { r.usage.Missed(); r.due.give() }, func(text []byte) {
			m, err := parse(text)
			if usagesync.IsReport(text) {
				m.Kind, err = used, r.usage.Hear(text, time.Now())
			}
			if err != nil {
				r.invalid(err)
				return
			}
			messagesIn.WithLabelValues(string(m.Kind)).Inc()
			now := time.Now()
			if m.From == r.peers.self.ID && m.Kind == alive && now.Sub(time.UnixMicro(m.Sent)) < interval {
				r.peers.cameBack(now)
				r.connectivity.heard(r)
			}
			if m.From == r.peers.self.ID && m.Cooldown != nil {
				return
			}
			if m.Kind == coolingDown {
				cooldownDelay.Observe(max(0, now.Sub(time.UnixMicro(m.Sent)).Seconds()))
			}
			late := r.clock.age(m, now)
			if late < slack {
				late = 0 // it took no longer than messages do
			}
			if m.Cooldown != nil {
				m.Cooldown.Left = max(0, m.Cooldown.Left-late.Milliseconds())
			}
			r.hear(m, now.Add(-late), now)
		})
		if ctx.Err() != nil {
			return
		}
		r.connectivity.notHeard(r, err)
		reconnectsTotal.Inc()
		if !pause(ctx, retry) {
			return
		}
	}
}

// pause waits for about the given time, randomized so that replicas do not all
// come back at the same time. It returns false if the context is done first.
func pause(ctx context.Context, about time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(jitter(about)):
		return true
	}
}

func jitter(about time.Duration) time.Duration { return about*4/5 + mathrand.N(about*2/5) }

// compareAgain compares this replica's state with the store's records
// repeatedly.
func (r *Replica) compareAgain(ctx context.Context) {
	for spread := time.Duration(0); ; {
		err := r.compare(ctx, spread)
		if ctx.Err() != nil {
			return
		}
		r.connectivity.compared(r, err)
		wait, then := r.pace(time.Now())
		if err != nil {
			wait, then = jitter(retry), 0
		}
		select {
		case <-ctx.Done():
			return
		case <-r.due:
			spread = 0
		case <-time.After(wait):
			spread = then
		}
	}
}

// pace returns the time until the next comparison, and the time from its sign
// of life until it reads the store. Many replicas send their signs of life at
// the same moments of the store's clock, because the store delivers messages
// together that it receives together. They do the same with reports of callers'
// use. They read the store at different times.
func (r *Replica) pace(now time.Time) (wait, spread time.Duration) {
	every := time.Duration(len(r.peers.list(now))) * perReplica
	if every <= interval {
		return jitter(interval), 0
	}
	every = min((every + interval - 1).Truncate(interval), longest)
	return usagesync.UntilMoment(now.Add(r.clock.ahead()), every), mathrand.N(patience)
}

// memberOf returns a member of the backend, or nil. It prefers a member to
// which the cooldown applies.
func (r *Replica) memberOf(backend string, c pool.Cooldown) (other *pool.Member) {
	for _, l := range slices.Backward(r.openLinks()) {
		for m, name := range l.backends() {
			if name != backend {
				continue
			}
			if other = m; m.Meets(c) {
				return m
			}
		}
	}
	return other
}

func (r *Replica) openLinks() []*Link {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.links)
}

// keepNumber saves the number of replicas whenever it changes. So a replica
// that starts while the store cannot be reached knows how many replicas share
// the limits of callers.
func (r *Replica) keepNumber(ctx context.Context, storage certmagic.Storage, key string) {
	text, _ := storage.Load(ctx, key) // without a number, it is as at the first start
	saved, _ := strconv.Atoi(string(text))
	r.usage.Expect(time.Now(), saved)
	failed := 0 // the number of which the log says that it is not saved
	for pause(ctx, lifetime) {
		n := r.usage.Replicas()
		if n <= 0 || n == saved {
			continue
		}
		if err := storage.Store(ctx, key, []byte(strconv.Itoa(n))); err == nil {
			saved, failed = n, 0
		} else if failed != n {
			failed = n
			r.logger.Load().Error("could not save the number of replicas", zap.String("key", key), zap.Error(err))
		}
	}
}
