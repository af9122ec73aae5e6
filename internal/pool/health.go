package pool

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Health is the state of one backend. Reading it takes no lock.
type Health struct {
	// whole are the cooldowns that count for every model.
	whole cooldownSet
	// models are the cooldowns that count for one model each. It has only
	// models that had a cooldown.
	models cooldownTable
	// served are models that the backend has served.
	served nameSet[string]
	// ended are the operations, each with a model, of which it has sent a
	// stream with an end mark.
	ended nameSet[latency.Use]
	// last is the cooldown of the latest refusal.
	last atomic.Pointer[Cooldown]
	// latencies tracks whether the backend answers.
	latencies latency.Table
	// quotas has how much of its limits is used.
	quotas quota.Table
	// paces reports whether a model's quota may ask requests to pass the
	// backend over, as after a throttle.
	paces atomic.Bool
	// unreachable is its cooldown if it cannot be reached at all.
	unreachable unreachable
	// names is what is known of members, by their names.
	names sync.Map

	mu sync.Mutex // guards the writing of all of it
	// pools are those in use that have a member with this health.
	pools []*Pool
	// identity distinguishes the credentials with which the backend is called.
	identity string
}

// Scope is the scope of a cooldown that is not for the whole backend: the
// requests for a model, by its name at the backend, that have one of these
// service tiers.
type Scope struct {
	Model string
	Tiers ServiceTiers
	// Operation limits it to one operation, as [Ask] has it. It is empty for
	// all of them. A key may lack the permission for one of them, and serves
	// the others. No throttle is about one operation.
	Operation string
}

// noCooldowns stands for the cooldowns of an unknown model.
var noCooldowns = new(cooldownSet)

// Limits on the memory that clients can make us use, whatever models they name.
const (
	// maxModels is how many models are remembered that a backend has served.
	maxModels = 256
	// maxModelName is how many bytes of a name distinguish models.
	maxModelName = 256
)

// ModelKey shortens the name of a model, and makes it safe to show.
func ModelKey(model string) string {
	if len(model) <= maxModelName {
		if utf8.ValidString(model) {
			return model // nearly all
		}
		return ValidText(model)
	}
	return strings.Clone(CutText(model, maxModelName))
}

// Destruct implements caddy.Destructor, so that a usage pool can hold Health.
func (*Health) Destruct() error { return nil }

// StartFresh clears the member's state if it was learned with another identity.
// Its cooldowns then end.
func (m *Member) StartFresh(identity string) {
	h := m.health
	h.mu.Lock()
	var over []*cooldownEntry
	if h.identity != "" && h.identity != identity {
		over = h.endAll()
		h.models.clear()
		h.served.Store(nil)
		h.ended.Store(nil)
		h.last.Store(nil)
		h.latencies.Clear()
		h.quotas.Clear()
	}
	h.identity = identity
	h.mu.Unlock()
	for _, c := range over {
		m.tellEnd(c, false)
	}
}

// endAll ends all cooldowns, which may be nil, and forgets the failures that
// count towards one. The caller holds the lock.
func (h *Health) endAll() (over []*cooldownEntry) {
	over = append(over, h.unreachable.Swap(nil))
	for c := range h.all() {
		throttle, failure := c.end()
		over = append(over, throttle, failure)
	}
	return over
}

// namesakes is what members of one name and one backend have in common.
type namesakes struct {
	// inFlight is how many requests they serve.
	inFlight atomic.Int64
	// drained is the order by which an operator took them out of use, or nil.
	drained atomic.Pointer[Order]
}

func (h *Health) namesakesOf(name string) *namesakes {
	value, _ := h.names.LoadOrStore(name, new(namesakes))
	return value.(*namesakes)
}

func (h *Health) of(its Scope) *cooldownSet {
	its.Model = ModelKey(its.Model)
	return cmp.Or(h.models.find(its), noCooldowns)
}

// ofOperation returns the cooldowns of a scope's operation alone. There are
// none for requests without an operation.
func (h *Health) ofOperation(its Scope) *cooldownSet {
	if its.Operation == "" {
		return noCooldowns
	}
	return h.of(its)
}

// remember returns the cooldowns of a scope, to be written to. The caller holds
// the lock.
func (m *Member) remember(its Scope, now time.Time) *cooldownSet {
	its.Model = ModelKey(its.Model)
	return m.health.models.add(m, its, now)
}

func (h *Health) hasServed(model string) bool { return h.served.has(ModelKey(model)) }

func (h *Health) rememberServed(model string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.served.add(ModelKey(model))
}

// standing returns the worst standing of a request by the member's cooldowns.
func (m *Member) standing(r *Ask, now time.Time) (worst standing) {
	if m.health.hasNoCooldown() {
		return ready
	}
	for _, s := range r.slots(m) {
		if s.Load() != nil {
			worst = max(worst, s.standing(r.Cost, now))
		}
	}
	return worst
}

// returns returns when the member's cooldowns end for a request.
func (m *Member) returns(r *Ask, now time.Time) (end time.Time) {
	if m.health.hasNoCooldown() {
		return end
	}
	for _, s := range r.slots(m) {
		end = later(end, s.until(now))
	}
	return end
}

// hasNoCooldown reports whether the backend has no cooldown, and none of its
// models ever had one. That is the usual case.
func (h *Health) hasNoCooldown() bool {
	return h.models.sets.Load() == nil && h.whole.throttle.Load() == nil && h.whole.failure.Load() == nil && h.unreachable.Load() == nil
}

// scopes are the cooldowns that count for a request: of the usual service
// tiers, and of the request's own ones if these are others. Each is that of all
// operations and that of the request's operation. None is nil.
type scopes struct{ usual, own, usualOfOperation, ownOfOperation *cooldownSet }

// slots returns all that count for a request, those of throttles first.
func (h *Health) slots(c scopes) [9]*slot {
	whole := &h.whole
	return [...]*slot{
		&whole.throttle, &c.usual.throttle, &c.own.throttle,
		&whole.failure, &c.usual.failure, &c.own.failure, &c.usualOfOperation.failure, &c.ownOfOperation.failure, &h.unreachable.slot,
	}
}

// claim takes the right to send a request to a member that is ready for it.
func (m *Member) claim(r *Ask, now time.Time) bool {
	if p := m.silence(r); p != nil && r.At[m.Index].isFollowed() && !p.Try(now) {
		return false
	}
	if m.health.hasNoCooldown() {
		return true
	}
	for _, s := range r.slots(m) {
		if s.Load() == nil {
			continue
		}
		ok, over := s.claim(r.Cost, now)
		m.tellEnd(over, false)
		if !ok {
			return false
		}
	}
	return true
}

// claimTry takes the right to try a member although it throttles.
func (m *Member) claimTry(r *Ask, now time.Time) bool {
	for _, s := range r.throttles(m) {
		if !s.claimTry(r.Cost, now) {
			return false
		}
	}
	return true
}

// Served records that the member has the model, and ends the cooldowns that an
// attempt of this scope, which started at started, has disproved.
func (m *Member) Served(its Scope, started time.Time) {
	if !m.health.hasServed(its.Model) {
		m.health.rememberServed(its.Model)
	}
	m.Answered(its, started)
}

// Answered ends the cooldowns that an attempt, which started at started, has
// disproved. Unlike Served, it does not record the model: a reply about a
// mistake of the client does not show that the model exists.
func (m *Member) Answered(its Scope, started time.Time) {
	if m.health.hasNoCooldown() {
		return
	}
	all := Scope{Model: its.Model, Tiers: its.Tiers}
	sets := scopes{noCooldowns, noCooldowns, noCooldowns, noCooldowns}
	if its.Tiers.meetUsual() {
		sets.usual = m.health.of(Scope{Model: its.Model})
		sets.usualOfOperation = m.health.ofOperation(Scope{Model: its.Model, Operation: its.Operation})
	}
	if its.Tiers != UsualTiers {
		sets.own, sets.ownOfOperation = m.health.of(all), m.health.ofOperation(its)
	}
	for _, s := range m.health.slots(sets) {
		if s.Load() != nil {
			m.tellDisproved(s.clear(started), false, started)
		}
	}
	m.health.of(all).rests.served(started)
}

// Knows reports whether the config names the model, or the member has served
// it. Clients can make up any other model.
func (m *Member) Knows(model string) bool {
	key := ModelKey(model)
	return m.health.hasServed(key) || slices.ContainsFunc(m.Models, func(known string) bool { return ModelKey(known) == key })
}

// Refusal is a reply that starts or extends a cooldown.
type Refusal struct {
	Reason
	// Throttle reports whether the backend asked for the cooldown. Otherwise
	// the cooldown is for a failure.
	Throttle bool
	// Whole reports whether it concerns every model.
	Whole bool
	// Unreachable reports whether the backend could not be reached, so that the
	// cooldown lasts until it is reached.
	Unreachable bool
	// Model is what the member calls the model that was asked for.
	Model string
	// Tiers are the service tiers that it concerns.
	Tiers ServiceTiers
	// Operation is the only operation that it concerns. It is empty for all.
	Operation string
	// Cost is the cost of the request.
	Cost int64
	// Wait is how long the cooldown lasts.
	Wait time.Duration
	// Longest is set if the backend asked to be called again immediately: it is
	// how long the cooldown may become if the backend repeats that.
	Longest time.Duration
	// Guess reports whether the backend named no time, so that Wait is a guess.
	Guess bool
	// Started is when the request was sent.
	Started time.Time
}

// CoolDown starts or extends a cooldown of the member. It reports whether this
// refusal started the cooldown.
func (m *Member) CoolDown(r Refusal, now time.Time) (began bool) {
	if r.Longest > 0 {
		shortest := r.Wait
		r.Wait = m.rest(&r, now)
		r.Guess = r.Wait > shortest
	}
	if r.Unreachable {
		r.Wait = firstPause // or longer: see put
	}
	c := Cooldown{Reason: r.Reason, ID: rand.Uint64(), Whole: r.Whole, Since: now, Until: now.Add(r.Wait), Throttle: r.Throttle, Unreachable: r.Unreachable, Cost: r.Cost}
	if r.Guess {
		c.Guess = r.Wait
	}
	if !r.Whole {
		c.Model, c.Tiers, c.Operation = ModelKey(r.Model), r.Tiers, strings.Clone(r.Operation) // which may be a part of a long path
	}
	m.health.last.Store(&c)
	return m.put(c, now, false) == Began
}

// rest returns how long the member rests that asked to be called again at once.
func (m *Member) rest(r *Refusal, now time.Time) time.Duration {
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	return m.cooldowns(r.Whole, Scope{r.Model, r.Tiers, r.Operation}, now).rests.next(r.Wait, r.Longest, r.Started, now)
}

// put starts or extends a cooldown, and reports it.
func (m *Member) put(next Cooldown, now time.Time, remote bool) Happening {
	c := newCooldownEntry(next, m.pool, now)
	m.health.mu.Lock()
	wake, into := c.Until, &m.health.unreachable.slot
	if c.Unreachable {
		wake = m.health.unreachable.failed(now)
		c.Until = later(c.Until, wake)
	} else {
		into = m.cooldowns(c.Whole, c.Scope(), now).slot(c.Throttle)
	}
	happened, over := into.put(c, remote)
	pools := slices.Clone(m.health.pools)
	m.health.mu.Unlock()
	m.learnCooldown(&c.Cooldown, remote, now)
	m.tellEnd(over, remote)
	if happened != nothing {
		m.tell(Event{Happening: happened, Cooldown: c.Cooldown, Remote: remote})
	}
	for _, p := range pools { // the member's own pool may be closed, while its last requests go on
		p.wakeAt(wake, now)
	}
	return happened
}

// cooldowns returns the set to which the cooldown for a refusal belongs. The
// caller holds the lock.
func (m *Member) cooldowns(whole bool, its Scope, now time.Time) *cooldownSet {
	if whole {
		return &m.health.whole
	}
	return m.remember(its, now)
}

// Doubt puts the throttle of a scope, or of the whole backend, that started at
// since in doubt.
func (m *Member) Doubt(whole bool, its Scope, since time.Time) {
	m.health.mu.Lock()
	c := m.health.known(Cooldown{Whole: whole, Model: its.Model, Tiers: its.Tiers, Operation: its.Operation}).throttle.cast(since)
	m.health.mu.Unlock()
	if c != nil {
		m.tell(Event{Happening: Doubted, Cooldown: c.Cooldown})
	}
}
