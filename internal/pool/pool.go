// Package pool decides which backend gets a request: which backends may be
// called now, which one is next, and, if none may be called, the shortest wait.
// It keeps cooldowns, and remembers which member gets the requests of a
// session. It gets the time only from its arguments, and does not depend on
// Caddy. Of HTTP, it knows status codes and header fields.
//
// # The life of a request
//
// An [Ask] describes a request: what it means at each member, its cost, its
// tier and its affinity. These are the steps of a request at one member:
//
//	m := p.Pick(ask, now)                  // and reserves a place there
//	if m == nil {
//		return p.Wait(ask, now)            // or p.Why(ask, now)
//	}
//	defer m.Release()                      // gives the place back
//	mark := m.DeductFor(model, cost, tier, now) // or m.Deduct(model, cost)
//	… // send it
//	m.Reached()                            // any reply came
//	m.Served(scope, started)               // or m.Answered, or m.CoolDown
//	mark.Return()                          // only if it was not executed
//
// [Member.DeductFor] and [Member.Deduct] both subtract the request's cost from
// what is left of the member's limits. DeductFor also counts the cost in the
// use of the request's tier, which matters only if tiers keep shares.
// [Member.Served] and [Member.Answered] both end cooldowns. Served also
// remembers that the member has the model, which a reply about a client's
// mistake does not show. [Member.CoolDown] starts or extends a cooldown after a
// refusal or a failure. If the request fails over, the member's [At] in the Ask
// gets a [Bar], and Pick is called again. Before the first pick, [Pool.Demand]
// counts the request's tier as active.
//
// A [Wait] tracks how long a request waits for its first byte, and moves it
// away from a silent member.
//
// # Order of the members
//
// [Pool.Pick] ranks the members for the request:
//
//   - Ready members come first. Among these, those that are predicted to be
//     full come last.
//   - Drained members come next.
//   - Members that need a probe come next, if the request should not be that
//     probe: see the fields Once and Streamed of [Ask]. Otherwise they are
//     ready.
//   - Suspects come next, and members of whose probe the result is not known.
//   - Members that throttle for a guessed time come last.
//
// All other members get no request. Within the best rank, the best priority
// wins, and within that, members whose limits have room. The members that are
// left are equally good. Among them, the session of the request (see
// [Affinity]), its [Maker], its policy or the weights decide, in this order.
//
// # Terms
//
// These terms have the same meaning in the rest of the project:
//
//   - A member is a backend as one pool sees it, with a priority and a weight.
//     [Health] is the state of a backend. Pools share it, and it outlives them.
//   - A member is drained if its weight is 0, or by an operator's order.
//   - A quota is a limit that the operator sets on what a member gets. While it
//     has no room for a request, the member gets the request as little as if it
//     throttled, but it has no cooldown: see [Over].
//   - A member's limits have room unless its replies, and the requests sent
//     since, show that too little is left: see package quota. Limits only
//     change the order of members, unless tiers keep shares.
//   - A cooldown is a period in which a backend gets no requests for one model,
//     or none at all if it covers the whole backend. Envoy calls it an
//     ejection. It is either a throttle or for a failure.
//   - A throttle is a cooldown that the backend asked for. A member throttles
//     while it has one.
//   - If the backend named the time, no request is sent there before the end of
//     the throttle. The one exception is a throttle in doubt.
//   - If the backend named no time, the length of the throttle is a guess.
//     While no other member is left, one request at a time tries it now and
//     then.
//   - A throttle is in doubt if the request that it refused met a throttle at
//     every member, be it of a rate or of a budget, because the request may
//     simply have been too large. One request that is much smaller may then
//     check each of these throttles.
//   - A failure is any reason for a cooldown but a throttle. It does not prove
//     that the next request would fail.
//   - A member is unreachable after a connection to it failed, until a
//     connection succeeds. That is a failure, too. Rechecks try it in the
//     background.
//   - A silent member accepts requests and sends nothing: see package latency.
//   - A suspect is a member with a cooldown for a failure, a silent member, or
//     one that fails its health checks. It is called only when all members that
//     are left are suspects, or throttle for a guessed time.
//   - A probe is the single request that is sent first when a cooldown has
//     ended, as in the half-open state of a circuit breaker. Other requests
//     follow when it was not refused, or when enough time for a refusal has
//     passed.
//
// # Concurrent use
//
// The methods of Pool, Member, Health and Relocations are safe for concurrent
// use. In the usual case, Pick takes no lock. The exported fields of a Pool and
// of its members must not change after requests have begun. An Ask, its Maker
// and a Wait belong to one request, and one goroutine at a time uses them. A
// [Listener] is called by the goroutines of requests and of timers, without a
// lock.
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

// Random returns a random number in [0, 1). Tests replace it with a seeded
// generator.
var Random = rand.Float64

// Pool is a set of members to choose from. Its methods are safe for concurrent
// use. A pool lives as long as its configuration: New starts it, and Close
// stops its timer. What it has learned about backends is in the [Health] of its
// members, which outlives it.
type Pool struct {
	// Members are ordered by priority.
	Members []*Member
	// Relocations keeps the requests of a session at one member: see
	// [Affinity]. It is nil if sessions do not matter.
	Relocations *Relocations
	// Watches reports whether the pool watches for silent members: see package
	// latency.
	Watches bool
	// Steers reports whether limits decide where requests go: see package
	// quota. A member whose limits have no room comes after the other members
	// of its priority, and weights follow limits. A limit never excludes a
	// member: a wrong try costs only a refusal, but a wrong skip wastes paid
	// capacity.
	Steers bool
	// Replicas returns how many replicas use the members. Without it, only this
	// one does.
	Replicas func() int

	// Callers shares members that throttle among callers. It is nil if they get
	// by how much they ask for.
	Callers *quota.Callers

	listeners []Listener
	returns   returns
	// draws are the sums of the configured weights: see sumsOf.
	draws []float64
	// follows reports whether any weights follow limits.
	follows bool
	learned learnedWeights
}

// Member is a backend as one pool sees it. Its methods are safe for concurrent
// use. Its exported fields must not change once the pool serves requests.
//
// The methods have four kinds of users:
//
//   - Requests: see the package comment.
//   - Operators: Drain, Resume and Reset change the member. Drained, TakenOut,
//     InFlight, LearnedWeights and [Pool.Snapshot] show its state.
//   - Health checks and rechecks: PassedCheck, FailedCheck, StartRecheck,
//     Reached, StillUnreachable and EndRecheck.
//   - Other replicas: Hear and the methods whose names begin with Hear apply
//     the events of their members.
type Member struct {
	Name string
	// Index is the member's place in its pool.
	Index int
	// Account is the account that the member belongs to.
	Account string
	// Priority ranks the members: the lowest number is called first.
	Priority int
	// Weight is the member's share within its priority. A member with weight 0
	// is drained.
	Weight int
	// FollowsLimits reports whether the weight follows the member's limits,
	// because the operator gave no weight.
	FollowsLimits bool
	// MaxRequests is the maximum number of concurrent requests. It is 0 if
	// there is no maximum.
	MaxRequests int64
	// Models are the models that the config lists, by their names at the
	// member. With AnyModel, the member also takes any other model.
	Models   []string
	AnyModel bool
	// Names maps the model names that clients use to the member's names. If it
	// is nil, clients may name any model. Deployment is the member's name for
	// all models that Names does not rename. If it is empty, the member gets
	// the client's name.
	Names      map[string]string
	Deployment string
	// ServiceTier is the service tier of all requests that the member gets. It
	// is empty if each request keeps its own.
	ServiceTier string
	// SharedLimits reports whether all models draw on the same limits, so that
	// they have one meter.
	SharedLimits bool
	// Checks is the member's state outside the pool. It may be nil.
	Checks Checks

	pool   *Pool
	health *Health
	// before is the nearest earlier member with the same backend. It may be
	// nil.
	before    *Member
	namesakes *namesakes
	// failing reports whether the latest health check of the member failed.
	failing atomic.Bool
	lately  lately
	digest  digest // of the name
	account account
}

// Checks is the state of a member outside the pool. If it has a method
// InFlight() int64, that method counts the member's requests instead of Pick
// and Release.
type Checks interface {
	// Healthy reports whether the member passes active health checks.
	Healthy() bool
	// Full reports whether the member can take no more requests.
	Full() bool
}

// New returns a pool of the members, and sorts them by priority. The listeners
// receive the members' events until Close. No member may be in two pools.
func New(members []*Member, listeners ...Listener) *Pool {
	slices.SortStableFunc(members, func(a, b *Member) int { return a.Priority - b.Priority })
	p := &Pool{Members: members, listeners: listeners}
	latest := make(map[*Health]*Member)
	for i, m := range members {
		m.Index, m.pool, m.digest, m.before = i, p, digestOf(m.Name), latest[m.health]
		latest[m.health] = m
	}
	p.draws = p.sumsOf((*Member).configuredShare)
	p.follows = p.compares()
	p.findAccounts()
	p.watchReturns()
	return p
}

// NewMember returns a member with this name and health, and with priority and
// weight 1.
func NewMember(name string, health *Health) *Member {
	return &Member{Name: name, Priority: 1, Weight: 1, health: health, namesakes: health.namesakesOf(name)}
}

// Pick chooses the member that gets the request next, and reserves a place at
// it until Release or Unpick. It returns nil if the request can go to no
// member.
func (p *Pool) Pick(r *Ask, now time.Time) *Member {
	for {
		m, best, steered := p.choose(r, now)
		if m.Member == nil {
			return nil
		}
		if !m.reserve() {
			continue // another request took the last place
		}
		var taken rights
		if best.rank < suspect && !m.claim(r, now, &taken) || best.rank >= suspect && !m.claimTry(r, now, &taken) {
			taken.giveBack()
			m.Release()
			continue // another request became the probe, or tries it
		}
		if r.Quotas != nil {
			r.Quotas.taken = taken
		}
		p.count(m.Member, now)
		if r.Steered = r.Steered[:0]; steered {
			p.findSteered(r, best, now)
		}
		return m.Member
	}
}

func (p *Pool) count(m *Member, now time.Time) {
	if p.Relocations != nil {
		m.lately.add(now)
	}
}

// rank orders members by how well they can serve a request now. Within a rank,
// priority and weight decide.
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

// grade is how good a choice a member is for a request. Members of the same
// grade are equally good.
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

// peers yields the members of a grade.
func (p *Pool) peers(best grade, r *Ask, now time.Time) iter.Seq[*Member] {
	return func(yield func(*Member) bool) {
		for _, m := range p.Members {
			if p.isOf(best, m, r, now) && !yield(m) {
				return
			}
		}
	}
}

// choose returns the member for the request, and its grade. steered reports
// whether members were left out only because their limits have no room.
//
// It first draws a member of the first priority by weight alone. Nearly always,
// that one is as good as a member can be, and then it is the choice: the others
// need not be looked at. Otherwise choose makes one pass over all members.
// Among members of the best grade, each replaces the one chosen so far with a
// probability of its weight divided by the sum of the weights so far. One
// random number suffices: after each decision, its unused part is again
// uniformly distributed.
//
// Either way, each member of the best grade is chosen in proportion to its
// weight. Let the open members of the first priority that have room have the
// part g of its weights, and one of them the part w. It is drawn with the
// probability w, and chosen by the pass with (1-g) * w/g. The sum is w/g. If
// there are none, the pass alone decides.
func (p *Pool) choose(r *Ask, now time.Time) (to place, best grade, steered bool) {
	best.rank = nobody
	at := quota.At(now)
	a := &r.Affinity
	byKey := p.Relocations != nil && a.Key != 0
	if !byKey && a.Maker == nil && r.Policy == nil && len(p.Members) > 0 {
		if m := p.draw(r); m.rank(r, now) == open && !p.isSpent(m, r, at) {
			return m.place(), grade{rank: open, priority: m.Priority}, false
		}
	}
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
	if byKey {
		return p.chooseByKey(r, a, now, chosen, best), best, steered
	}
	if a.Maker != nil {
		if m := p.chooseForMaker(r, a.Maker, now, best); m != nil {
			return m.place(), best, steered
		}
	}
	if r.Policy != nil {
		if m := r.Policy(slices.Collect(p.peers(best, r, now))); m != nil {
			chosen = m
		}
	}
	return chosen.place(), best, steered
}

// shortestWait is the shortest wait that a client is told if reserved shares
// make it wait, because the remaining limits change with each reply.
const shortestWait = time.Second

// Wait returns the shortest wait until a member can serve the request. While
// other members throttle, silent members do not count, because the time of
// their return is not known, nor do members that do not suit the request.
func (p *Pool) Wait(r *Ask, now time.Time) time.Duration {
	soonest := time.Duration(math.MaxInt64)
	throttles := slices.ContainsFunc(p.Members, func(m *Member) bool { return m.Throttles(r, now) })
	for _, m := range p.Members {
		at := &r.At[m.Index]
		if !at.takes() || throttles && (at.Bar == Unfit || m.silence(r) != nil) && !m.Throttles(r, now) {
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
	if at := &r.At[m.Index]; !at.takes() || !r.mayTry(at) || m.Full() || r.IsOver(m, now) || m.isReserved(r, now) {
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

// FailedCheck records that the member has failed a health check. The member is
// a suspect until it passes one.
func (m *Member) FailedCheck(reason Reason) {
	if !m.failing.Swap(true) {
		m.tell(Event{Happening: CheckFailed, Reason: reason})
	}
}

func (m *Member) healthy() bool {
	return !m.failing.Load() && (m.Checks == nil || m.Checks.Healthy())
}

// Full reports whether the member has its maximum of concurrent requests.
func (m *Member) Full() bool {
	return m.MaxRequests > 0 && m.InFlight() >= m.MaxRequests || m.Checks != nil && m.Checks.Full()
}

// InFlight returns how many requests the members with this name and backend
// serve.
func (m *Member) InFlight() int64 {
	if others, ok := m.Checks.(interface{ InFlight() int64 }); ok {
		return others.InFlight()
	}
	return m.namesakes.inFlight.Load()
}

// place is a member with the limit that applies to a request there.
type place struct {
	*Member
	// limit is the maximum number of concurrent requests. It is 0 if there is
	// no maximum.
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

// Release gives back the place that Pick or PickAnswering reserved. It is
// called once for each reserved place, however the request ended, and never if
// they returned nil. If the request was not sent, so that its result will never
// be known, Unpick or Undo is called instead.
func (m *Member) Release() { m.namesakes.inFlight.Add(-1) }
