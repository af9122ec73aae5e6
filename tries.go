package openailb

import (
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// tries are the attempts that the loop makes, and what they leave behind.
type tries struct {
	// list are the attempts made, including the one in progress. first has room for the first of them.
	list  []try
	first [1]try
	// current is the backend that is attempted right now, if any is.
	current *target
	// ask is what the pool has to know about the request. few has room for what it says about a few backends.
	ask pool.Ask
	few [4]pool.At
	// watch follows the wait for the first byte of the current attempt, and finds where it moves from a silent backend.
	watch pool.Wait
	// turn is the request's wait, for its caller's limits or for a backend.
	turn turn
	// beforeSilence is how many attempts were made before the request gave up a silent backend. A backend that refused one
	// of them because it throttles may be tried again.
	beforeSilence int
	// hasMoved reports whether the request has moved from a silent backend, and returns whether it may go to
	// silent backends again, because no other one is left.
	hasMoved, returns bool
	// barred reports whether there were ever reasons for bars: an attempt, others that wait, an object that is made.
	barred bool
	// claimed reports whether there was a fault that may be the request's own.
	claimed bool
	// executed reports whether the last attempt may have executed a request that
	// must not be executed twice.
	executed bool
	// interims is how many interim responses the backends have sent.
	interims atomic.Int32
	// best is the reply that the client gets if no further backend has a better one.
	best bestReply
	// tooShort are the names of models that refused the request as too long.
	tooShort []string
}

// try is one attempt at a backend, as the loop remembers it.
type try struct {
	target  *target
	class   verdict.Class
	status  int
	started time.Time
	// credential is the backend's, with which the request was sent.
	credential keys.Credential
	// mark is what the backend's limits knew of requests when this one was sent.
	mark quota.Mark
	// benched is when a bench for a limit began by this attempt, if one did, and benches is what it covers.
	benched time.Time
	benches pool.Scope
	// deployment is the label in metrics of what the backend calls the model.
	deployment string
	// flex reports whether it has the service tier flex.
	flex bool
	// over reports whether metrics know what came of it, and span is over.
	over bool
	span *observe.Span
}

// bestReply is the latest reply that says more to the client than the balancer's own error.
type bestReply struct {
	*http.Response // nil: there is none
	// attempt is the number of the attempt that brought it.
	attempt int
	// missing reports whether it only says that an object is not there.
	missing bool
}

// last is the latest attempt. It is nil if there is none.
func (t *tries) last() *try {
	if len(t.list) == 0 {
		return nil
	}
	return &t.list[len(t.list)-1]
}

// release ends the count of the request as one in flight at the current backend.
func (t *tries) release() {
	if t.current != nil {
		t.current.Release()
		t.current = nil
	}
}

// moved returns where the request moves from a silent backend, or nil. A request whose reply came just then does not
// need the backend.
func (t *tries) moved() *pool.Member {
	to, last := t.watch.Moved(), t.last()
	if last != nil && last.class == verdict.Silent && !t.hasMoved {
		t.beforeSilence = len(t.list)
	}
	if to == nil {
		return nil
	}
	t.hasMoved = true
	if last.class != verdict.Silent {
		to.Release()
		return nil
	}
	last.target.metrics.Moved()
	return to
}

// mayReturn reports whether the request may go to silent backends again: it moved, no other backend is left, and
// none has told when it returns. Without the move, it would still wait there.
func (t *tries) mayReturn() bool {
	first := t.hasMoved && !t.returns && !t.throttled()
	t.returns = t.returns || first
	return first
}

// throttled reports whether a backend refused one of the attempts because it throttles.
func (t *tries) throttled() bool {
	for i := range t.list {
		if t.list[i].class == verdict.Throttled {
			return true
		}
	}
	return false
}

// isLeft reports whether the request may try a further backend.
func (t *tries) isLeft(in *intent) bool {
	return in.maxAttempts == 0 || len(t.list)-in.placement.Misses()-t.forgotten() < in.maxAttempts
}

// forgotten is how many attempts do not count, because the request has waited since and may go to their backends
// again.
func (t *tries) forgotten() (n int) {
	for i := range min(t.turn.before, len(t.list)) {
		if t.list[i].class == verdict.Throttled {
			n++
		}
	}
	return n
}

// claim reports whether a fault that may be the request's own may bench a backend: what fails everywhere is the
// request's doing, so one request benches one backend for it at most.
func (t *tries) claim() bool {
	first := !t.claimed
	t.claimed = true
	return first
}

// keep keeps a reply, in case no backend has a better one.
func (t *tries) keep(res *http.Response, missing bool) {
	t.dropBest()
	t.best = bestReply{Response: res, attempt: len(t.list) - 1, missing: missing}
}

// dropBest closes the best reply so far.
func (t *tries) dropBest() {
	if t.best.Response != nil {
		t.best.Body.Close()
		t.best = bestReply{}
	}
}

// doubtBenches puts the benches in doubt that the request began, if it met nothing
// but refusals for a limit: perhaps it was only too large.
func (t *tries) doubtBenches(in *intent) {
	for i := range t.list {
		if a := &t.list[i]; !a.class.Promise() && a.class != verdict.TooLarge {
			return
		}
	}
	for i := range t.list {
		if a := &t.list[i]; !a.benched.IsZero() {
			a.target.Doubt(in.wholeBackend(a.class), a.benches, a.benched)
		}
	}
}

// failedByItself reports whether a request that no backend served failed because of itself: it is too large, or
// two backends failed.
func (t *tries) failedByItself() bool {
	var at *target
	for i := range t.list {
		switch a := &t.list[i]; {
		case a.class == verdict.TooLarge:
			return true
		case !a.class.MayBeOfRequest():
		case at == nil:
			at = a.target
		case at != a.target:
			return true
		}
	}
	return false
}

// giveBack gives back what was deducted for the attempt from the backend's limits, if the backend has not executed it.
func (a *try) giveBack(r *attempt.Reply) {
	if r.Unexecuted() {
		a.mark.Return()
	}
}

// end counts an attempt of which it is known what came of it, and ends its span.
func (a *try) end() {
	if a.over || a.class == "" {
		return
	}
	a.over = true
	a.span.End(a.status, string(a.class), a.class == verdict.Served)
	a.target.metrics.Attempted(a.deployment, string(a.class))
}

// fill makes what the pool has to know of the request.
func (t *tries) fill(b *balancer, in *intent, tier int) {
	t.ask = pool.Ask{At: t.few[:0], Affinity: pool.Affinity{Key: in.session, Maker: in.placement.Maker()}, Cost: in.Cost, Once: in.isOnce(), Kind: in.pulseKind(), Tier: b.callerTierOf(in, tier)}
	for _, to := range b.targets {
		takes := in.entitled.May[to.Index] && to.backend.Takes(&in.Request, in.anonymous)
		t.ask.At = append(t.ask.At, pool.At{Model: in.benchModel(to.backend), Takes: takes, Flex: to.backend.TierOf(&in.Request) == openaiapi.Flex})
	}
}

// isFlex reports whether all backends that take the request get it with the service tier flex.
func (t *tries) isFlex() bool {
	return !slices.ContainsFunc(t.ask.At, func(at pool.At) bool { return at.Takes && !at.Flex })
}

// bar finds out where the request must not go now. It may go to each backend once. After one that took the caller's own
// credential it goes only to another such one: otherwise we would pay for what the caller's account was refused.
func (t *tries) bar(targets []*target, in *intent, now time.Time) {
	if in.placement != affinity.Anywhere {
		for i, to := range targets {
			t.ask.At[i].Elsewhere = !in.placement.Allows(to.backend.AccountKey)
		}
	}
	if t.barred = t.barred || len(t.list) > 0 || t.turn.behind != nil || in.makesObject(); !t.barred {
		return // all are free
	}
	ownCredential := t.count()
	for i, to := range targets {
		if at := &t.ask.At[i]; ownCredential && !to.backend.Credentials.Passthrough {
			at.Bar = max(at.Bar, pool.Unfit)
		}
	}
	allModels := in.makesObject() && t.mayHaveAllModels(in.entitled, targets, now)
	if !allModels && t.tooShort == nil && t.turn.behind == nil {
		return
	}
	for i, to := range targets {
		switch at := &t.ask.At[i]; {
		case slices.Contains(t.tooShort, to.backend.NameOf(in.Model)), allModels && !in.entitled.AllModels[i]:
			// where the context is as short, or where an object without a model could not be used with all models
			at.Bar = pool.Unfit
		case at.Bar == pool.Free && slices.Contains(t.turn.behind, to.Index):
			at.Bar = pool.Behind
		}
	}
}

// count has the pool know of each attempt at its backend. It reports whether one took the caller's own credential.
func (t *tries) count() (ownCredential bool) {
	for i := range t.ask.At {
		at := &t.ask.At[i]
		at.Bar, at.Tried, at.Refused = pool.Free, false, false
	}
	for i := range t.list {
		a := &t.list[i]
		at := &t.ask.At[a.target.Index]
		at.Tried, at.Refused = true, a.class.Promise()
		at.Takes = at.Takes && a.class != verdict.NotHere // it does not offer what the request asks for
		switch {
		case a.class == verdict.Throttled && i < max(t.turn.before, t.beforeSilence), a.class == verdict.Silent && t.returns:
			// it may be tried again
		case a.class == verdict.Throttled:
			at.Bar = pool.Throttled
		default:
			at.Bar = pool.Spent
		}
		ownCredential = ownCredential || a.target.backend.Credentials.Passthrough
	}
	return ownCredential
}

// mayHaveAllModels reports whether the request may go to a backend whose account
// serves all models that the request may use. One that failed is tried, because a request that
// names the object goes there even then. New objects do not go to a drained one.
func (t *tries) mayHaveAllModels(e *affinity.Entitlement, targets []*target, now time.Time) bool {
	return slices.ContainsFunc(targets, func(to *target) bool {
		return e.AllModels[to.Index] && !to.Drained() && !to.Unreachable() && !to.Full() && t.ask.At[to.Index].Bar == pool.Free &&
			t.ask.At[to.Index].Takes && !to.Throttles(&t.ask, now)
	})
}
