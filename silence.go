package openailb

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pulse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// PulseKind implements pool.Request.
func (ex *exchange) PulseKind() pulse.Kind {
	switch {
	case !ex.api.Kind.Infers() || ex.api.Kind.IsHandshake():
		return pulse.Unfollowed
	case ex.api.Body.Stream:
		return pulse.Streamed
	}
	return pulse.Whole
}

// watch returns what follows the wait at the current backend, or nil. A body that is not
// kept goes out as fast as the client sends it, so its wait says nothing of the backend.
func (ex *exchange) watch() attempt.Watch {
	if ex.balancer.Pool.Silence == 0 || ex.Once() {
		return nil
	}
	p := ex.tries.current.Pulse(ex.benchModel(ex.tries.current.backend), ex.PulseKind())
	if p == nil {
		return nil
	}
	ex.tries.wait.Begin(p, ex, ex.balancer.Pool.Silence)
	return &ex.tries.wait
}

// Silence implements pulse.Waiter.
func (ex *exchange) Silence(since time.Time, ended bool) {
	ex.tries.current.TellSilence(ex.benchModel(ex.tries.current.backend), ex.PulseKind(), since, ended)
}

// move is the one move of a request from a silent backend to one that answers.
type move struct {
	// to is where the request has a place, until it gets there.
	to *pool.Member
	// made reports whether the request has moved, and returns whether it may go to
	// the silent backend again, because no other one is left.
	made, returns bool
}

// Move implements pulse.Waiter. It finds a place for the request at a backend that answers.
// A timer calls it, but only while the attempt waits: no other goroutine uses the tries.
func (ex *exchange) Move(threshold time.Duration, now time.Time) bool {
	if !ex.tries.move.made && ex.mayGoOn(now) {
		ex.lineUp()
		ex.tries.move.to = ex.balancer.Pool.PickAnswering(ex, threshold, now)
		ex.tries.move.made = ex.tries.move.to != nil
	}
	return ex.tries.move.to != nil
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

// mayReturn reports whether the request may go to silent backends again: it moved, and
// no other backend is left. Without the move, it would still wait there.
func (ex *exchange) mayReturn() bool {
	first := ex.tries.move.made && !ex.tries.move.returns
	ex.tries.move.returns = ex.tries.move.made
	return first
}
