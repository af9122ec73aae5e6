// Package pool decides which backend gets a request: which backends may be
// called now, which one is next, and the shortest wait. It knows how a cooldown
// begins, grows and ends, and at which member the requests of a key live. It
// gets the time only from its arguments, and does not depend on HTTP or Caddy.
//
// Its words, which the rest of the project uses in the same sense:
//
//   - A member is a backend as one pool sees it, with a priority and a weight.
//   - Health is the state of a backend. Pools share it, and it outlives them.
//   - A cooldown is a time in which a backend gets no requests: for one model, or
//     for every model if it concerns the whole backend. Envoy calls it an
//     ejection.
//   - A throttle is a cooldown that the backend asked for: the backend is not called
//     before the throttle ends.
//   - A member is unreachable if it could not be reached, until it is reached
//     again. A recheck tries that in the background.
//   - A guess is a throttle for which the backend named no time. While no other
//     member is left, one request at a time tries it now and then.
//   - A silent member accepts requests and sends nothing: see package latency. It
//     is a suspect without a cooldown, and so is a member that fails its health
//     checks.
//   - A failure is every other reason for a cooldown. It is only a suspicion: its
//     backend is a suspect, which is called only when no other backend is left.
//   - A probe is the one request that goes first when a cooldown has ended, in the
//     half-open state of a circuit breaker. The others follow when it was not
//     refused, or when enough time for a refusal has passed.
//   - Doubt, a word of ours: a throttle may apply only to requests of the cost that was refused.
//     If one request met a throttle everywhere, be it of a rate or of a budget,
//     perhaps it was only too large. The throttles that it started are then in
//     doubt, and one much smaller request may check each of them.
package pool

import (
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Random returns a random number from 0 up to but not including 1. Tests
// replace it by one with a seed.
var Random = rand.Float64

// Pool is a set of members to choose from.
type Pool struct {
	// Members are in the order of their priorities.
	Members []*Member
	// Relocations, if it is set, keeps requests of one key at one member: see
	// [Affinity].
	Relocations *Relocations
	// Watches reports whether silences matter: see package latency.
	Watches bool
	// Steers makes members' limits decide where requests go: see package quota.
	// A member that has no room left comes after the others of its priority,
	// and weights follow limits. Limits change nothing else: a wrong try costs
	// a refusal, and a wrong skip wastes capacity that is paid for.
	Steers bool

	listeners []Listener
	returns   returns
	// follows reports whether the weights of any members follow their limits.
	follows bool
	learned learnedWeights
}

// Member is a backend as one pool sees it.
type Member struct {
	Name string
	// Index is the member's place in its pool.
	Index int
	// Account is the account that the member belongs to.
	Account string
	// Priority ranks the members: the lowest number comes first.
	Priority int
	// Weight is the member's share within its priority. 0 drains it.
	Weight int
	// FollowsLimits reports whether the weight follows the member's limits,
	// because the operator gave none.
	FollowsLimits bool
	// MaxRequests is how many requests it gets at a time. 0: no limit.
	MaxRequests int64
	// Models are the models that the config names, by their names at the
	// member. With AnyModel, it takes any other model as well.
	Models   []string
	AnyModel bool
	// Names are the names of models at the member, by the names that clients
	// use. Without them, clients may name any model. Deployment is the name at
	// the member of each model that Names does not rename. Without it, that is
	// the name that the client used.
	Names      map[string]string
	Deployment string
	// ServiceTier is that of all requests that the member gets. It is empty if
	// each has its own.
	ServiceTier string
	// Checks is the state that the pool does not know. It may be nil.
	Checks Checks

	pool   *Pool
	health *Health
	// before is the latest member before this one that stands for the same
	// backend, or nil.
	before    *Member
	namesakes *namesakes
	// failing reports whether the latest health check of the member failed.
	failing atomic.Bool
	lately  lately
	digest  digest // of the name
	account account
}

// Checks is state of a member outside the pool. With a method InFlight() int64,
// it also counts its requests, which then need no Release.
type Checks interface {
	// Healthy reports whether the member passes active health checks.
	Healthy() bool
	// Full reports whether the member can take no more requests.
	Full() bool
}

// New returns a pool of the members, which it sorts by priority. The listeners
// receive their events until the pool is closed.
func New(members []*Member, listeners ...Listener) *Pool {
	slices.SortStableFunc(members, func(a, b *Member) int { return a.Priority - b.Priority })
	p := &Pool{Members: members, listeners: listeners}
	latest := make(map[*Health]*Member)
	for i, m := range members {
		m.Index, m.pool, m.digest, m.before = i, p, digestOf(m.Name), latest[m.health]
		latest[m.health] = m
	}
	p.follows = p.compares()
	p.findAccounts()
	p.watchReturns()
	return p
}

// NewMember returns a member with this name and health, of priority and weight
// 1.
func NewMember(name string, health *Health) *Member {
	return &Member{Name: name, Priority: 1, Weight: 1, health: health, namesakes: health.namesakesOf(name)}
}

// Pick chooses the member that gets the request next, and reserves a place at
// it until Release. It returns nil if no member is left.
func (p *Pool) Pick(r *Ask, now time.Time) *Member {
	for {
		m, its, steered := p.choose(r, now)
		if m.Member == nil {
			return nil
		}
		if !m.reserve() {
			continue // another request took the last place
		}
		if its.rank < suspect && !m.claim(r, now) || its.rank >= suspect && !m.claimTry(r, now) {
			m.Release()
			continue // another request became the probe, or tries it
		}
		p.count(m.Member, now)
		if r.Steered = r.Steered[:0]; steered {
			p.findSteered(r, its, now)
		}
		return m.Member
	}
}

func (p *Pool) count(m *Member, now time.Time) {
	if p.Relocations != nil {
		m.lately.add(now)
	}
}

// rank orders the members to which a request may go. Within a rank, priority
// and weight decide.
type rank int

const (
	open        rank = iota
	paused           // open, but predicted to be full
	drained          // open or paused, but drained
	unproved         // open, but a probe is due that the request should not be
	unprovedToo      // both drained and unproved
	suspect          // has a cooldown for a failure, or waits for a probe
	suspectToo       // both drained and suspect
	guess            // throttles for a time that we guessed, and may be tried
	guessToo         // both drained and a guess
	nobody           // must not be called
)

// grade is how good a choice a member is for a request. Members of one grade
// are as good as each other.
type grade struct {
	rank     rank
	priority int
	// spent reports whether the member's limits have no room for the request.
	spent bool
}

func (p *Pool) isOf(best grade, m *Member, r *Ask, now time.Time) bool {
	if m.Priority != best.priority {
		return false
	}
	return m.rank(r, now) == best.rank && p.isSpent(m, r, quota.At(now)) == best.spent
}

// tier yields the members that are of this grade.
func (p *Pool) tier(best grade, r *Ask, now time.Time) iter.Seq[*Member] {
	return func(yield func(*Member) bool) {
		for _, m := range p.Members {
			if p.isOf(best, m, r, now) && !yield(m) {
				return
			}
		}
	}
}

// choose finds the best member left for the request, in one pass: among those
// of the best grade, each replaces the one chosen so far with the probability
// of its share of the weights seen. One random number is enough: what is left
// of it after each decision is as random as before. steered reports whether
// members were left out only because their limits have no room.
func (p *Pool) choose(r *Ask, now time.Time) (to place, best grade, steered bool) {
	best.rank = nobody
	at := quota.At(now)
	var chosen *Member
	var total, random float64
	var steers bool // a member is paused
	for _, m := range p.Members {
		if best.rank == open && m.Priority > best.priority {
			break
		}
		rank := m.rank(r, now)
		steers = steers || rank == paused
		if rank == nobody || rank > best.rank || rank == best.rank && m.Priority > best.priority {
			continue
		}
		switch spent := p.isSpent(m, r, at); {
		case rank < best.rank:
			best, total, steered = grade{rank, m.Priority, spent}, 0, false
		case spent && !best.spent:
			steered = true
			continue
		case !spent && best.spent:
			best.spent, total, steered = false, 0, true
		}
		weight := r.share(m)
		total += weight
		switch at := random * total; {
		case total == weight:
			chosen, random = m, Random()
		case at < weight:
			chosen, random = m, at/weight
		default:
			random = (at - weight) / (total - weight)
		}
	}
	if chosen == nil {
		return place{}, best, false
	}
	steered = steered || steers && best.rank == open
	a := &r.Affinity
	if p.Relocations != nil && a.Key != 0 {
		return p.chooseByKey(r, a, now, chosen, best), best, steered
	}
	if a.Maker != nil {
		if m := p.chooseForMaker(r, a.Maker, now, best); m != nil {
			return m.place(), best, steered
		}
	}
	if r.Policy != nil {
		if m := r.Policy(slices.Collect(p.tier(best, r, now))); m != nil {
			chosen = m
		}
	}
	return chosen.place(), best, steered
}

// shortestWait is the shortest wait for what is reserved that a client is told:
// what is left changes with each reply.
const shortestWait = time.Second

// Wait returns the shortest wait of the members that can serve the request. A
// silent one does not count while others throttle: it is not known when it
// returns.
func (p *Pool) Wait(r *Ask, now time.Time) time.Duration {
	soonest := time.Duration(math.MaxInt64)
	throttles := slices.ContainsFunc(p.Members, func(m *Member) bool { return m.Throttles(r, now) })
	for _, m := range p.Members {
		if !r.At[m.Index].takes() || throttles && m.silence(r) != nil && !m.Throttles(r, now) {
			continue
		}
		wait := m.returns(r, now).Sub(now)
		if above := m.quotaWait(r, now); above > 0 {
			wait = max(wait, above, shortestWait)
		}
		soonest = min(soonest, wait)
	}
	return soonest
}

// rank returns how good a choice the member is for the request.
func (m *Member) rank(r *Ask, now time.Time) (rank rank) {
	if at := &r.At[m.Index]; !at.takes() || !r.mayTry(at) || m.Full() || m.isReserved(r, now) {
		return nobody
	}
	switch standing := m.standing(r, now); {
	case standing == throttleCooldown:
		return nobody
	case standing == guessCooldown:
		rank = guess
	case standing > trialDue || !m.healthy():
		rank = suspect
	case standing == trialDue && r.Once, standing == refusalDue && r.Streamed:
		rank = unproved
	}
	if silence := m.silence(r); silence != nil {
		rank = max(rank, r.At[m.Index].rankIf(silence, r.Once, now))
	}
	switch {
	case rank == open && m.Drained():
		return drained
	case rank == open && m.isPaused(r, now):
		return paused
	case m.Drained():
		rank++
	}
	return rank
}

// PassedCheck records that the member has passed a health check.
func (m *Member) PassedCheck() {
	m.Reached()
	if m.failing.Swap(false) {
		m.tell(Event{Happening: CheckPassed})
	}
}

// FailedCheck records that the member has failed a health check. It is a
// suspect until it passes one.
func (m *Member) FailedCheck(why Reason) {
	if !m.failing.Swap(true) {
		m.tell(Event{Happening: CheckFailed, Reason: why})
	}
}

func (m *Member) healthy() bool {
	return !m.failing.Load() && (m.Checks == nil || m.Checks.Healthy())
}

// Full reports whether the member has as many requests as it may get.
func (m *Member) Full() bool {
	return m.MaxRequests > 0 && m.InFlight() >= m.MaxRequests || m.Checks != nil && m.Checks.Full()
}

// InFlight returns how many requests the member and others of its name serve.
func (m *Member) InFlight() int64 {
	if others, ok := m.Checks.(interface{ InFlight() int64 }); ok {
		return others.InFlight()
	}
	return m.namesakes.inFlight.Load()
}

// place is a member with the room that it has for a request.
type place struct {
	*Member
	// limit is how many requests it may have at a time. 0: no limit.
	limit int64
}

func (m *Member) place() place { return place{m, m.MaxRequests} }

func (p place) hasRoom() bool { return p.limit == 0 || p.InFlight() < p.limit }

func (p place) reserve() bool {
	if n := p.namesakes.inFlight.Add(1); p.limit > 0 && n > p.limit {
		p.Release()
		return false
	}
	return true
}

// Release frees the place that Pick reserved.
func (m *Member) Release() { m.namesakes.inFlight.Add(-1) }
