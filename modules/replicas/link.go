package replicas

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// Link connects a pool with the other replicas, as a listener of the pool. It
// is a seam.Replication.
type Link struct {
	replica *Replica
	key     string // of the replica among those in use
	logger  *zap.Logger
	// storage is where the number of replicas is saved, by the engine's name.
	storage certmagic.Storage
	engine  string
	// secrets are functions that reload the engine's secrets from files, by
	// option.
	secrets map[string]func() error
	pool    *pool.Pool
	config  seam.PeerConfig // without a digest: not known
	// unshare ends sharing the use of callers.
	unshare func()

	mu sync.Mutex
	// names are the digests of the members' backends.
	names map[*pool.Member]string
}

// NewLink returns a link for the members of one pool.
func (r *Replica) NewLink() *Link {
	return &Link{replica: r, unshare: func() {}, names: make(map[*pool.Member]string)}
}

// Name sets the name of a member's backend, which must be the same at all
// replicas. Only a digest of the name leaves the process. If the member had
// another backend before, that backend's state must be cleared first.
func (l *Link) Name(m *pool.Member, name string) {
	l.mu.Lock()
	l.names[m] = digest(name)
	l.mu.Unlock()
	l.replica.due.give()
}

func (l *Link) backends() map[*pool.Member]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.names)
}

// Secrets calls add for each secret of the engine that is in a file. read
// reloads the secret.
func (l *Link) Secrets(add func(name string, read func() error)) {
	for _, option := range slices.Sorted(maps.Keys(l.secrets)) {
		add(option+" of state "+l.engine, l.secrets[option])
	}
}

// Open starts applying events from other replicas to the members of the pool.
func (l *Link) Open(p *pool.Pool) {
	l.pool = p
	r := l.replica
	r.mu.Lock()
	r.links = append(r.links, l)
	r.peers.configure(r.links)
	r.mu.Unlock()
	r.due.give()
}

// Share implements seam.Replication. Limits can share their use only if package
// limiter counts it.
func (l *Link) Share(pool string, limits seam.Limits) {
	if set, ok := limits.(limiter.Set); ok {
		l.ShareUse(pool, set.Limiters())
	}
}

// ShareUse makes the callers of the pool with this name share their limits with
// all replicas, until Close.
func (l *Link) ShareUse(pool string, callers *limiter.Limiters) {
	before, end := l.unshare, l.replica.usage.Share(callersKey(pool), callers)
	l.unshare = func() {
		before()
		end()
	}
	l.replica.due.give()
}

// Replicas returns how many replicas share the store, this one included.
func (l *Link) Replicas() int {
	return l.replica.peers.contact(time.Now()).Replicas
}

// Start makes the replica run, if it does not run yet.
func (l *Link) Start() { l.replica.start(l.logger, l.storage, "openai_lb/replicas_"+l.engine) }

// Close ends the link. The last link also ends the replica.
func (l *Link) Close() error {
	defer l.unshare() // after a last replica has sent what is used
	r := l.replica
	r.mu.Lock()
	r.links = slices.DeleteFunc(r.links, func(other *Link) bool { return other == l })
	r.peers.configure(r.links)
	r.mu.Unlock()
	_, err := inUse.Delete(l.key)
	return err
}

// Happened implements pool.Listener.
func (l *Link) Happened(e pool.Event) {
	if e.Happening == pool.FellSilent || e.Happening == pool.Answered || e.Happening == pool.WasReset {
		// another replica finds out itself, or hears what the order ended
		return
	}
	r, i := l.replica, item{backend: l.backends()[e.Member], cooldown: e.Cooldown, at: time.Now()}
	if order := e.Happening == pool.Drained ||
		e.Happening == pool.Resumed; !order && !concernsOthers(e.Member, e.Cooldown) {
		return
	}
	switch e.Happening {
	case pool.Began, pool.Grew, pool.Turned:
		i.kind = coolingDown
		r.claims.plan(i.backend, e.Cooldown)
	case pool.Doubted:
		i.kind = doubted
	case pool.Disproved:
		i.kind = disproved
		r.claims.drop(i.backend, e.Cooldown)
		r.end(e.Cooldown, true, i.at)
	case pool.Ended:
		r.claims.drop(i.backend, e.Cooldown)
		r.end(e.Cooldown, false, i.at)
		return
	case pool.Drained, pool.Resumed:
		if i.kind, i.member = resumed, digest(e.Member.Name); e.Happening == pool.Drained {
			i.kind = drained
		}
		if i.order.origin = e.Order; !e.Remote {
			r.ordered(e.Member, &i)
		}
	}
	if !e.Remote && (i.member != "" || shareable(e.Cooldown)) {
		r.enqueue(i)
	}
}

func (r *Replica) enqueue(i item) {
	if dropped := r.queue.add(i); dropped > 0 {
		droppedTotal.WithLabelValues("full").Add(float64(dropped))
	}
}

// end remembers for a while that a cooldown is over, so that a replica that
// does not know this cannot start it again.
func (r *Replica) end(c pool.Cooldown, disproved bool, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ended) >= maxEnded {
		maps.DeleteFunc(r.ended, func(_ uint64, e ending) bool { return now.After(e.until) })
	}
	if len(r.ended) >= maxEnded {
		clear(r.ended) // another replica makes up models
	}
	if e := r.ended[c.ID]; !e.disproved {
		r.ended[c.ID] = ending{disproved, now.Add(max(0, c.Until.Sub(now)) + lifetime)}
	}
}

// maxEnded is the maximum number of ended cooldowns that are remembered.
const maxEnded = 4096

// hear applies a message that another replica sent at then, or that the store
// keeps.
func (r *Replica) hear(m message, then, now time.Time) {
	switch m.Kind {
	case alive:
		r.usage.Count(now, r.peers.hear(m, then, now))
	case left:
		r.peers.remove(m.From, now)
	case tierCosts:
		r.hearTierCosts(m, then)
	case asked:
		r.hearQuestion(m)
	case drained, resumed:
		r.hearDrain(m, then, now)
	case coolingDown, doubted, disproved:
		r.hearCooldown(m, now)
	}
}

func (r *Replica) hearCooldown(m message, now time.Time) {
	c, left := m.Cooldown.pool(now)
	member := r.memberOf(m.Backend, c)
	if member == nil {
		return
	}
	r.mu.Lock()
	ended, isOver := r.ended[c.ID]
	r.mu.Unlock()
	switch {
	case m.Kind == disproved:
		if !ended.disproved {
			r.end(c, true, now)
			member.HearDisproved(c)
		}
	case isOver && ended.disproved:
		r.enqueue(item{kind: disproved, backend: m.Backend, cooldown: c, at: now})
	case isOver:
		// its time has passed here
	default:
		member.Hear(c, left, now)
		if m.Kind == doubted {
			member.HearDoubt(c)
		}
	}
}
