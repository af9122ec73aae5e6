package openailb

import (
	"math"
	"slices"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// PulseKind implements pool.Request.
func (ex *exchange) PulseKind() pulse.Kind {
	if !ex.api.Kind.Infers() || ex.api.Kind.IsHandshake() {
		return pulse.Unfollowed
	}
	output, ok := ex.api.OutputLimit()
	if !ok {
		output = math.MaxInt64
	}
	return pulse.KindOf(ex.api.Body.Stream, ex.api.PromptLength, output)
}

// watch returns what follows the wait at the current backend, or nil. A body that is not
// kept goes out as fast as the client sends it, so its wait says nothing of the backend.
func (ex *exchange) watch() attempt.Watch {
	if ex.balancer.Pool.Silence == 0 || ex.Once() || ex.PulseKind() == pulse.Unfollowed {
		return nil
	}
	ex.tries.wait.Begin(ex, ex.tries.current.Member, ex)
	return &ex.tries.wait
}

// move is the one move of a request from a silent backend to one that answers.
type move struct {
	// to is where the request has a place, until it gets there.
	to *pool.Member
	// made reports whether the request has moved, and returns whether it may go to
	// the silent backend again, because no other one is left.
	made, returns bool
	// forgiven is how many attempts were made before the request wanted to move. A backend that refused one
	// of them because it throttles may be tried again.
	forgiven int
}

// Move implements pool.Mover. It finds a place for the request at a backend that answers. If there
// is none, but one has told the request when it returns, that is a better answer than none.
// A timer calls it, but only while the attempt waits: no other goroutine uses the tries.
func (ex *exchange) Move(threshold time.Duration, now time.Time) pool.Decision {
	m := &ex.tries.move
	if !m.made && ex.mayGoOn(now) {
		m.forgiven = len(ex.tries.attempts)
		ex.lineUp()
		m.to = ex.balancer.Pool.PickAnswering(ex, threshold, now)
	}
	switch {
	case m.to != nil:
		m.made = true
		return pool.Moves
	case throttled(ex.tries.attempts):
		return pool.GivesUp
	}
	return pool.Stays
}

// throttled reports whether a backend refused one of the attempts because it throttles.
func throttled(attempts []try) bool {
	return slices.ContainsFunc(attempts, func(a try) bool { return a.class == verdict.Throttled })
}

// moved returns where the request goes now. It is nil if it does not move. A request whose
// reply came just then does not need the place.
func (ex *exchange) moved() (to *pool.Member) {
	to, ex.tries.move.to = ex.tries.move.to, nil
	switch {
	case to == nil:
	case ex.attempted().class == verdict.Silent:
		ex.attempted().target.metrics.Moved()
	default:
		to.Release()
		return nil
	}
	return to
}

// mayReturn reports whether the request may go to silent backends again: it moved, no other backend is left, and
// none has told when it returns. Without the move, it would still wait there.
func (ex *exchange) mayReturn() bool {
	first := ex.tries.move.made && !ex.tries.move.returns && !throttled(ex.tries.attempts)
	ex.tries.move.returns = ex.tries.move.returns || first
	return first
}
