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

// Event describes a change of a member.
type Event struct {
	Happening Happening
	Member    *Member
	// Cooldown is the cooldown that changed, for an event about a cooldown.
	Cooldown Cooldown
	// Reason is why a health check failed, for CheckFailed.
	Reason Reason
	// Order is the operator's order, for Drained, Resumed and WasReset.
	Order Order
	// Silence describes the silence, for FellSilent, BecameSlow and Answered.
	Silence latency.State
	// Remote reports whether another replica reported the event.
	Remote bool
}

// Happening is a kind of event.
type Happening int

// These are the kinds of events: of cooldowns, of operators, of silences and of
// health checks.
const (
	nothing Happening = iota
	// Began means that a cooldown of the member has started.
	Began
	// Grew means that the cooldown was extended, or got another ID.
	Grew
	// RecheckDue means that the next recheck of an unreachable member is due.
	RecheckDue
	// Turned means that the cooldown has a new reason. It may be longer, too.
	Turned
	// Ended means that the cooldown has ended: its time has passed, a request
	// was served, or an operator ended it.
	Ended
	// Doubted means that the cooldown is in doubt.
	Doubted
	// Disproved means that a request was served during the cooldown or after
	// its time, or that an operator ended it. Ended follows, unless it was
	// already reported.
	Disproved
	// Drained means that an operator took the member out of use.
	Drained
	// Resumed means that an operator put the member back into use.
	Resumed
	// WasReset means that an operator ended the member's cooldowns.
	WasReset
	// FellSilent means that requests wait at the member, and it sends nothing.
	FellSilent
	// BecameSlow means that the silent member answers, but late.
	BecameSlow
	// Answered means that the silent or slow member answers in time again.
	Answered
	// CheckFailed means that the member failed a health check after it had
	// passed the previous one.
	CheckFailed
	// CheckPassed means that the member passed a health check after it had
	// failed the previous one.
	CheckPassed
)

func (m *Member) tell(e Event) {
	e.Member = m
	for _, l := range m.pool.listeners {
		l.Happened(e)
	}
}

// tellEnd reports that the cooldown has ended, unless c is nil or the end was
// already reported.
func (m *Member) tellEnd(c *cooldownEntry, remote bool) {
	if c != nil && c.told.CompareAndSwap(false, true) {
		m.tell(Event{Happening: Ended, Cooldown: c.Cooldown, Remote: remote})
	}
}

// tellDisproved reports that the cooldown was disproved at the time at, unless
// c is nil.
func (m *Member) tellDisproved(c *cooldownEntry, remote bool, at time.Time) {
	if c != nil {
		m.unlearnCooldown(&c.Cooldown, at)
		m.tell(Event{Happening: Disproved, Cooldown: c.Cooldown, Remote: remote})
		m.tellEnd(c, remote)
	}
}
