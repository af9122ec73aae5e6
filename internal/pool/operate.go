package pool

import (
	"fmt"
	"iter"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
)

// Order is an operator's order to take a member out of use, to put it back, or
// to reset it.
type Order struct {
	// Time is when the order was given. It is zero if the time is not known.
	Time time.Time
	// By says who gave the order, and Reason says why. Both may be empty.
	By, Reason string
}

// MaxBy and MaxReason are the maximum lengths in bytes of an Order's By and
// Reason.
const (
	MaxBy     = 128
	MaxReason = 256
)

// Check returns an error if a text of the order is too long or not printable.
func (o Order) Check() error {
	for _, text := range []struct {
		name, value string
		most        int
	}{{"by", o.By, MaxBy}, {"reason", o.Reason, MaxReason}} {
		if len(text.value) > text.most {
			return fmt.Errorf("%s is longer than %d bytes", text.name, text.most)
		}
		if !utf8.ValidString(text.value) ||
			strings.ContainsFunc(text.value, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return fmt.Errorf("%s must contain only printable characters", text.name)
		}
	}
	return nil
}

// Drained reports whether the member is used only when no other member is left:
// its weight is 0, or an operator took it out of use.
func (m *Member) Drained() bool { return m.Weight == 0 || m.TakenOut() != nil }

// Drain takes the member, and all members with its name and backend, out of use
// until Resume. The drain outlives the pool.
func (m *Member) Drain(o Order) { m.execute(Drained, o, false) }

// Resume ends a Drain. A member with weight 0 remains drained.
func (m *Member) Resume(o Order) { m.execute(Resumed, o, false) }

// TakenOut returns the order that drained the member. It is nil if the member
// was not drained by an operator.
func (m *Member) TakenOut() *Order { return m.namesakes.drained.Load() }

// execute applies and reports an order. An order that was given at this replica
// is reported even if it changes nothing here, because it may change something
// at another replica.
func (m *Member) execute(happening Happening, o Order, remote bool) {
	var out *Order
	if happening == Drained {
		out = &o
	}
	before := m.namesakes.drained.Swap(out)
	if remote && (before == nil) == (out == nil) {
		return
	}
	m.tell(Event{Happening: happening, Order: o, Remote: remote})
}

// Reset ends all cooldowns of the member. It also forgets which streams had end
// marks, so that a stream without one is not an error until an end mark is seen
// again.
func (m *Member) Reset(o Order) {
	m.tell(Event{Happening: WasReset, Order: o})
	m.health.mu.Lock()
	ended := m.health.endAll()
	m.health.ended.Store(nil)
	m.health.mu.Unlock()
	for _, c := range ended {
		m.tellDisproved(c, false, time.Now())
	}
}

// State is the state of a member, for operators.
type State struct {
	Member   *Member
	Drained  bool
	InFlight int64
	// Healthy reports whether the member passes active health checks.
	Healthy bool
	// Cooldowns are the active cooldowns. Due are those whose time has passed,
	// while it is not known whether the member can serve again.
	Cooldowns, Due []Cooldown
	// Probing reports whether a cooldown's time has passed without proof that
	// the member can serve again. After a failure, that lasts until a request
	// is served; after a throttle, while its probe may still be refused. It is
	// also true while the member is unreachable.
	Probing bool
	// Last is the cooldown of the latest refusal. It is nil before the first
	// one.
	Last *Cooldown
	// Latencies are the usual waits for the first byte, and the silences. They
	// are nil if the pool does not watch for silences.
	Latencies []latency.State
	// Limits are the remaining limits of models for which there is a recent
	// reading.
	Limits []quota.State
}

// Snapshot returns the state of every member, in the order of the priorities.
func (p *Pool) Snapshot(now time.Time) []State {
	states := make([]State, len(p.Members))
	for i, m := range p.Members {
		states[i] = State{Member: m, Drained: m.Drained(), InFlight: m.InFlight(), Healthy: m.healthy(),
			Probing: m.Unreachable(), Last: m.health.last.Load()}
		states[i].Limits = m.health.quotas.Snapshot(now)
		if p.Watches {
			states[i].Latencies = m.health.latencies.Snapshot(now)
		}
		for c := range m.health.cooldowns() {
			if !m.Meets(c.Cooldown) {
				continue
			}
			if c.inForce(now) {
				cooldown := c.Cooldown
				if c.Unreachable { // a recheck may be under way
					cooldown.Until = later(c.Until, now.Add(firstPause))
				}
				cooldown.InDoubt = c.doubt.Load() == inDoubt
				states[i].Cooldowns = append(states[i].Cooldowns, cooldown)
				continue
			}
			states[i].Due = append(states[i].Due, c.Cooldown)
			if !m.Spares(c.Cooldown) && (!c.Throttle || c.probe.pending(c, now)) {
				states[i].Probing = true
			}
		}
	}
	return states
}

// CoolingDown reports whether a cooldown is active.
func (h *Health) CoolingDown(now time.Time) bool {
	for c := range h.cooldowns() {
		if c.inForce(now) {
			return true
		}
	}
	return false
}

// all iterates over the cooldowns of the whole backend and of each scope.
func (h *Health) all() iter.Seq[*cooldownSet] {
	return func(yield func(*cooldownSet) bool) {
		if yield(&h.whole) {
			h.models.all()(yield)
		}
	}
}

// cooldowns iterates over the cooldowns that are active or due.
func (h *Health) cooldowns() iter.Seq[*cooldownEntry] {
	return func(yield func(*cooldownEntry) bool) {
		if c := h.unreachable.Load(); c != nil && !yield(c) {
			return
		}
		for set := range h.all() {
			for _, s := range [...]*slot{&set.throttle, &set.failure} {
				if c := s.Load(); c != nil && !yield(c) {
					return
				}
			}
		}
	}
}
