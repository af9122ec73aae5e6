package pool

import (
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

// Health is the state of one backend. The zero Health is that of a backend of
// which nothing is known. Several members may share it, also of several pools.
// It is safe for concurrent use, and reading it takes no lock.
type Health struct {
	// whole holds the cooldowns that cover every model.
	whole cooldownSet
	// models holds the cooldowns of single models, for the models that have had
	// one.
	models cooldownTable
	// served is the set of models that the backend has served.
	served nameSet[string]
	// ended is the set of operations and models with whose streams the backend
	// has sent an end mark.
	ended nameSet[latency.Use]
	// last is the cooldown of the latest refusal.
	last atomic.Pointer[Cooldown]
	// latencies tracks how fast the backend answers.
	latencies latency.Table
	// quotas meters how much of the backend's limits is used.
	quotas quota.Table
	// paces reports whether a cooldown was recorded in a model's meter, so that
	// the meter may predict when the model's limits are full: see
	// [quota.Meter.IsFull].
	paces atomic.Bool
	// unreachable is the cooldown of a backend that cannot be reached.
	unreachable unreachable
	// names holds the namesakes of each member name.
	names sync.Map

	mu sync.Mutex // guards the writing of all of it
	// pools are the open pools that have a member with this health.
	pools []*Pool
	// identity identifies the credentials with which the backend is called.
	identity string
}

// Scope is the scope of a cooldown that does not cover the whole backend: the
// requests for one model, by its name at the backend, in one group of service
// tiers.
type Scope struct {
	Model string
	Tiers ServiceTiers
	// Operation limits the scope to one operation, without a trailing slash. It
	// is empty for all operations. Only failures have it: a key may lack the
	// permission for one operation. No throttle applies to a single operation.
	Operation string
}

// These limits bound the memory that clients can use up by naming many models.
const (
	// maxModels is the number of served models that are remembered.
	maxModels = 256
	// maxModelName is the number of bytes of a name that distinguish models.
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

// StartFresh clears the state of the member's backend, and ends its cooldowns,
// if it was learned with another identity.
func (m *Member) StartFresh(identity string) {
	h := m.health
	h.mu.Lock()
	var ended []*cooldownEntry
	if h.identity != "" && h.identity != identity {
		ended = h.endAll()
		h.models.clear()
		h.served.Store(nil)
		h.ended.Store(nil)
		h.last.Store(nil)
		h.latencies.Clear()
		h.quotas.Clear()
	}
	h.identity = identity
	h.mu.Unlock()
	for _, c := range ended {
		m.tellEnd(c, false)
	}
}

// endAll ends all cooldowns and returns them. Each may be nil. The caller holds
// the lock.
func (h *Health) endAll() (ended []*cooldownEntry) {
	ended = append(ended, h.unreachable.Swap(nil))
	for c := range h.all() {
		throttle, failure := c.end()
		ended = append(ended, throttle, failure)
	}
	return ended
}

// namesakes is the state that members with the same name and backend share.
type namesakes struct {
	// inFlight is how many requests these members serve.
	inFlight atomic.Int64
	// drained is the order that drained these members. It is nil if they are in
	// use.
	drained atomic.Pointer[Order]
}

func (h *Health) namesakesOf(name string) *namesakes {
	value, _ := h.names.LoadOrStore(name, new(namesakes))
	return value.(*namesakes)
}

// remember returns the cooldowns of a scope for writing, and adds the scope if
// it is new. The caller holds the lock.
func (m *Member) remember(scope Scope, now time.Time) *cooldownSet {
	scope.Model = ModelKey(scope.Model)
	return m.health.models.add(m, scope, now)
}

func (h *Health) hasServed(model string) bool { return h.served.has(ModelKey(model)) }

func (h *Health) rememberServed(model string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.served.add(ModelKey(model))
}

// standing returns the worst standing that the member's cooldowns give the
// request.
func (m *Member) standing(r *Ask, now time.Time) (worst standing) {
	if m.health.hasNoCooldown() {
		return ready
	}
	var few [maxSlots]*slot
	for _, s := range r.slots(m, few[:0]) {
		worst = max(worst, s.standing(r.Cost, now))
	}
	return worst
}

// returns returns when the last of the member's cooldowns for the request ends,
// and its quota has room.
func (m *Member) returns(r *Ask, now time.Time) (end time.Time) {
	end = r.overUntil(m, now)
	if m.health.hasNoCooldown() {
		return end
	}
	var few [maxSlots]*slot
	for _, s := range r.slots(m, few[:0]) {
		end = later(end, s.until(now))
	}
	return end
}

// hasNoCooldown reports whether the backend has no cooldown and none of its
// models has ever had one. That is the usual case.
func (h *Health) hasNoCooldown() bool {
	return h.models.sets.Load() == nil && h.whole.throttle.Load() == nil && h.whole.failure.Load() == nil &&
		h.unreachable.Load() == nil
}

// scopes are the cooldowns that apply to a request: those of the usual service
// tiers, and those of its own group if that is another one, each for all
// operations and for the request's operation. Each is nil if there are none.
type scopes struct{ usual, group, usualOfOperation, groupOfOperation *cooldownSet }

// maxSlots is the maximum number of slots with cooldowns that apply to a
// request: a throttle and a failure of the whole backend, of the usual service
// tiers and of the request's own group, a failure of the operation for both
// groups of tiers, and the cooldown of a backend that cannot be reached.
const maxSlots = 9

// slots appends the slots that hold a cooldown, throttles first.
func (h *Health) slots(c scopes, to []*slot) []*slot {
	to = h.throttles(c, to)
	for _, set := range [...]*cooldownSet{&h.whole, c.usual, c.group, c.usualOfOperation, c.groupOfOperation} {
		if set != nil {
			to = set.failure.appendTo(to)
		}
	}
	return h.unreachable.appendTo(to)
}

// throttles appends the slots that hold a throttle. There is none of a single
// operation.
func (h *Health) throttles(c scopes, to []*slot) []*slot {
	for _, set := range [...]*cooldownSet{&h.whole, c.usual, c.group} {
		if set != nil {
			to = set.throttle.appendTo(to)
		}
	}
	return to
}

// rights are what a request has taken by a pick, besides the place: to be the
// probe of a cooldown, to check one that is in doubt, to try a throttle of
// guessed length or a silent member. Other requests wait for the result. The
// zero rights are none.
type rights struct{ undo []func() }

// add adds a right that undo gives back. undo may be nil, for none.
func (r *rights) add(undo func()) {
	if undo != nil {
		r.undo = append(r.undo, undo)
	}
}

// giveBack gives all of them back, for a request that is not sent.
func (r *rights) giveBack() {
	for _, undo := range r.undo {
		undo()
	}
	r.undo = nil
}

// claim reserves the right to send the request to the member. It fails if the
// member's cooldown or silence allows only one request and another request took
// that right. Then the caller gives back what it has taken so far.
func (m *Member) claim(r *Ask, now time.Time, taken *rights) bool {
	if p := m.silence(r); p != nil && r.At[m.Index].isFollowed() {
		undo, ok := p.Try(now)
		if !ok {
			return false
		}
		taken.add(undo)
	}
	if m.health.hasNoCooldown() {
		return true
	}
	var few [maxSlots]*slot
	for _, s := range r.slots(m, few[:0]) {
		ok, ended := s.claim(r.Cost, now, taken)
		m.tellEnd(ended, false)
		if !ok {
			return false
		}
	}
	return true
}

// claimTry reserves the right to try the member although it throttles. If it
// fails, the caller gives back what it has taken so far.
func (m *Member) claimTry(r *Ask, now time.Time, taken *rights) bool {
	var few [maxSlots]*slot
	for _, s := range r.throttles(m, few[:0]) {
		if !s.claimTry(r.Cost, now, taken) {
			return false
		}
	}
	return true
}

// Unpick undoes the latest pick, of this member, if its quota refuses the
// request. It gives back the place and the rights, so that others do not wait
// for a result.
func (m *Member) Unpick(r *Ask) {
	r.Quotas.taken.giveBack()
	m.Release()
}

// Served records that an attempt of this scope was served. It remembers the
// model, and ends the cooldowns that started before the attempt.
func (m *Member) Served(scope Scope, started time.Time) {
	if !m.health.hasServed(scope.Model) {
		m.health.rememberServed(scope.Model)
	}
	m.Answered(scope, started)
}

// Answered records that an attempt of this scope got a reply which shows that
// the member works. It ends the cooldowns that started before the attempt. It
// does not remember the model: a reply about a client's mistake does not show
// that the model exists.
func (m *Member) Answered(scope Scope, started time.Time) {
	if m.health.hasNoCooldown() {
		return
	}
	scope.Model = ModelKey(scope.Model)
	all, models := Scope{Model: scope.Model, Tiers: scope.Tiers}, &m.health.models
	group := models.find(all)
	var sets scopes
	if scope.Tiers.meetUsual() {
		sets.usual = models.find(Scope{Model: scope.Model})
		sets.usualOfOperation = models.findOperation(Scope{Model: scope.Model, Operation: scope.Operation})
	}
	if scope.Tiers != UsualTiers {
		sets.group, sets.groupOfOperation = group, models.findOperation(scope)
	}
	var few [maxSlots]*slot
	for _, s := range m.health.slots(sets, few[:0]) {
		m.tellDisproved(s.clear(started), false, started)
	}
	if group != nil {
		group.rests.served(started)
	}
}

// Knows reports whether the config names the model or the member has served it.
// Clients can make up any other name.
func (m *Member) Knows(model string) bool {
	key := ModelKey(model)
	return m.health.hasServed(key) ||
		slices.ContainsFunc(m.Models, func(known string) bool { return ModelKey(known) == key })
}

// Refusal is a reply that starts or extends a cooldown.
type Refusal struct {
	Reason
	// Throttle reports whether the backend asked for the cooldown. Otherwise
	// the cooldown is for a failure.
	Throttle bool
	// Whole reports whether the refusal covers every model.
	Whole bool
	// Unreachable reports whether the backend could not be reached, so that the
	// cooldown lasts until it is reached.
	Unreachable bool
	// Model is the member's name for the requested model.
	Model string
	// Tiers is the group of service tiers that it covers.
	Tiers ServiceTiers
	// Operation is the only operation that it covers. It is empty if it covers
	// all operations.
	Operation string
	// Cost is the cost of the request.
	Cost int64
	// Wait is how long the cooldown lasts.
	Wait time.Duration
	// Longest is the maximum length of the cooldown if the backend asked to be
	// called again immediately: each further refusal doubles the cooldown up to
	// Longest. It is 0 if the backend did not ask for that.
	Longest time.Duration
	// Guess reports whether the backend named no time, so that Wait is a guess.
	Guess bool
	// Started is when the request was sent.
	Started time.Time
}

// CoolDown starts or extends a cooldown of the member. It reports whether the
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
	c := Cooldown{Reason: r.Reason, ID: rand.Uint64(), Whole: r.Whole, Since: now, Until: now.Add(r.Wait),
		Throttle: r.Throttle, Unreachable: r.Unreachable, Cost: r.Cost, AsksAtOnce: r.Longest > 0}
	if r.Guess {
		c.Guess = r.Wait
	}
	if !r.Whole {
		// the operation may be a part of a long path
		c.Model, c.Tiers, c.Operation = ModelKey(r.Model), r.Tiers, strings.Clone(r.Operation)
	}
	m.health.last.Store(&c)
	return m.put(c, now, false) == Began
}

// rest returns the length of the cooldown of a member that asked to be called
// again immediately.
func (m *Member) rest(r *Refusal, now time.Time) time.Duration {
	m.health.mu.Lock()
	defer m.health.mu.Unlock()
	return m.cooldowns(r.Whole, Scope{r.Model, r.Tiers, r.Operation}, now).rests.next(r.Wait, r.Longest, r.Started, now)
}

// put starts or extends a cooldown, and reports that to the listeners.
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
	happened, ended := into.put(c, remote)
	pools := slices.Clone(m.health.pools)
	m.health.mu.Unlock()
	m.learnCooldown(&c.Cooldown, remote, now)
	m.tellEnd(ended, remote)
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
func (m *Member) cooldowns(whole bool, scope Scope, now time.Time) *cooldownSet {
	if whole {
		return &m.health.whole
	}
	return m.remember(scope, now)
}

// Doubt puts a throttle in doubt: the throttle of the scope, or of the whole
// backend, that started at since.
func (m *Member) Doubt(whole bool, scope Scope, since time.Time) {
	m.health.mu.Lock()
	c := m.health.known(Cooldown{Whole: whole, Model: scope.Model, Tiers: scope.Tiers,
		Operation: scope.Operation}).throttle.cast(since)
	m.health.mu.Unlock()
	if c != nil {
		m.tell(Event{Happening: Doubted, Cooldown: c.Cooldown})
	}
}
