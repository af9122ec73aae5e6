package pool

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/latency"
)

// Listener receives the events of the members of a pool. It is called without a
// lock, by the goroutine of a request or of a timer, and must not wait.
type Listener interface {
	Happened(Event)
}

// Event is what happened to a member.
type Event struct {
	Happening Happening
	Member    *Member
	// Cooldown is the cooldown that the event is about, if it is about one.
	Cooldown Cooldown
	// Reason is why a health check failed, if the event is that.
	Reason Reason
	// Order is the operator's order, if the event is one.
	Order Order
	// Silence is the silence, if the event is about one.
	Silence latency.State
	// Remote reports whether another replica reported it.
	Remote bool
}

// Happening is a kind of event.
type Happening int

const (
	nothing Happening = iota
	// Began: a cooldown of the member has started.
	Began
	// Grew: the cooldown lasts longer than it first did.
	Grew
	// RecheckDue: the member is unreachable, and the next recheck is due.
	RecheckDue
	// Turned: the cooldown has a new reason, and may have grown.
	Turned
	// Ended: the cooldown has ended, because its time has passed, a request was
	// served before that, or an operator ended it.
	Ended
	// Doubted: the cooldown is in doubt.
	Doubted
	// Disproved: a request was served during the cooldown, or after its time,
	// or an operator ended it. If the cooldown had not ended before, Ended
	// follows.
	Disproved
	// Drained: an operator took the member out of use.
	Drained
	// Resumed: an operator put it back into use.
	Resumed
	// WasReset: an operator ended the member's cooldowns.
	WasReset
	// FellSilent: requests wait at the member, and it sends nothing.
	FellSilent
	// BecameSlow: it sends something, but late.
	BecameSlow
	// Answered: it answers in time again.
	Answered
	// CheckFailed: the member failed a health check, and had not failed the one
	// before.
	CheckFailed
	// CheckPassed: it passed one, and had failed the one before.
	CheckPassed
)

func (m *Member) tell(e Event) {
	e.Member = m
	for _, l := range m.pool.listeners {
		l.Happened(e)
	}
}

// tellEnd reports that a cooldown has ended, unless it is nil or its end was
// reported before.
func (m *Member) tellEnd(c *cooldownEntry, remote bool) {
	if c != nil && c.told.CompareAndSwap(false, true) {
		m.tell(Event{Happening: Ended, Cooldown: c.Cooldown, Remote: remote})
	}
}

// tellDisproved reports that a cooldown was disproved at a time, unless it is
// nil.
func (m *Member) tellDisproved(c *cooldownEntry, remote bool, at time.Time) {
	if c != nil {
		m.unlearnCooldown(&c.Cooldown, at)
		m.tell(Event{Happening: Disproved, Cooldown: c.Cooldown, Remote: remote})
		m.tellEnd(c, remote)
	}
}
