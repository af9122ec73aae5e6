package openailb

import (
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// exchange is the state of one request. It belongs to the goroutine that serves the request.
type exchange struct {
	balancer *balancer
	request  *http.Request
	writer   http.ResponseWriter
	// proxied is the request as reverse_proxy gets it.
	proxied http.Request
	// shown is whose placeholders are shown, if this is the request's first exchange.
	shown *exchange
	// cookies are set once a policy was asked, which may set more.
	cookies *savedCookies

	api   apiRequest
	tries tries
	// own is an answer of ours, for which no backend is asked.
	own    apierror.Answer
	record record
	// admission is what the request was charged to its caller, and its tier.
	admission callers.Admission
}

// savedCookies are those that were set before any backend was chosen.
type savedCookies struct{ values []string }

// tries are the attempts of an exchange, and what limits further ones.
type tries struct {
	// maxAttempts is how many backends the request may try. 0: all of them.
	maxAttempts int
	// deadline is when the last attempt may begin. Zero: any time.
	deadline time.Time
	// attempts are those made, the current one included.
	attempts []try
	// first is where the first of them is.
	first [1]try
	// current is the backend that is attempted right now, if any is.
	current *target
	// wait is that for the first byte of the current attempt's reply.
	wait pool.Wait
	// move is to a backend that answers, if the request waited at one that does not.
	move move
	// turn is the request's wait, if it waits or has waited.
	turn *turn
	// best is the reply that the client gets if no further backend has a better one.
	best bestReply
	// bench is claimed by a fault that may be the request's own.
	bench benchOnce
	// exceeded are the names of models whose context is too short for the request.
	exceeded []string
	// executed reports whether the last attempt may have executed a request that
	// must not be executed twice.
	executed bool
	// forwarded reports whether the request went to a backend that throttles.
	forwarded bool
	// interims is how many interim responses the backends have sent.
	interims atomic.Int32
}

// try is one attempt at a backend.
type try struct {
	target  *target
	class   verdict.Class
	status  int
	started time.Time
	// credential is the backend's, with which the request was sent.
	credential keys.Credential
	// mark is what the backend's limits knew of requests when this one was sent.
	mark quota.Mark
	// benched is when a promise began by this attempt, if one did.
	benched time.Time
	// deployment is the label in metrics of what the backend calls the model.
	deployment string
	// over reports whether metrics know what came of it, and span is over.
	over bool
	span *observe.Span
}

// bestReply is the latest reply that says more than that a backend throttles.
type bestReply struct {
	*http.Response // nil: there is none
	// attempt is the number of the attempt that brought it.
	attempt int
	// missing reports whether it only says that an object is not there.
	missing bool
}

// record is what is to be said of a request when it is over.
type record struct {
	// started is when the request came, and firstByte how long after that the
	// first byte of the reply's body went to the client.
	started   time.Time
	firstByte time.Duration
	// status is that of the answer.
	status int
	// ours reports whether the client got an answer of the balancer's own.
	ours bool
	// from is the attempt whose reply the client got, if that is not the last one.
	from *try
	// owner is the backend of the only account that may get the request, if it
	// throttles.
	owner *target
	// usage reads the client's reply. tokens are what it found, once that is over.
	usage  *usage.Reader
	tokens usage.Tokens
	// duration is how long the request took, once it is over, and aborted reports
	// whether its reply was aborted then.
	duration time.Duration
	aborted  bool
}

// end records that the request is over.
func (r *record) end(aborted bool) {
	r.duration, r.aborted = time.Since(r.started), aborted
	r.usage.Close()
	r.tokens = r.usage.Tokens()
}

// benchOnce is for faults that may be the request's own: what fails everywhere is
// the request's doing, so one request benches one backend for it at most.
type benchOnce struct{ claimed bool }

// claim reports whether this is the first such fault.
func (b *benchOnce) claim() bool {
	first := !b.claimed
	b.claimed = true
	return first
}

func (b *balancer) newExchange(w http.ResponseWriter, r *http.Request, maxAttempts int, tryDuration time.Duration) *exchange {
	ex := &exchange{balancer: b, request: r, writer: w}
	ex.record.started = time.Now()
	ex.tries.maxAttempts, ex.tries.attempts = maxAttempts, ex.tries.first[:0]
	if tryDuration > 0 {
		ex.tries.deadline = ex.record.started.Add(tryDuration)
	}
	return ex
}

// mayGoOn reports whether a further backend may be tried.
func (ex *exchange) mayGoOn(now time.Time) bool {
	if len(ex.tries.attempts) == 0 {
		return true
	}
	return (ex.tries.maxAttempts == 0 || len(ex.tries.attempts)-ex.api.placement.Misses()-ex.forgiven() < ex.tries.maxAttempts) &&
		(ex.tries.deadline.IsZero() || !now.After(ex.tries.deadline))
}

// ModelAt implements pool.Request.
func (ex *exchange) ModelAt(m *pool.Member) (model string, ok bool) {
	b := ex.balancer.targets[m.Index].backend
	return ex.benchModel(b), ex.api.placement.Allows(b.AccountKey) && b.Takes(&ex.api.Request, ex.api.anonymous)
}

// MayTry implements pool.Request. After a backend whose model has too short a
// context, the request goes only where the model has another name. An object made
// without a model may be used with any, so an account with all models makes it,
// while one can be called.
func (ex *exchange) MayTry(m *pool.Member) bool {
	t := ex.balancer.targets[m.Index]
	return ex.isLeft(t) && !ex.isBehind(m) &&
		(len(ex.tries.exceeded) == 0 || !slices.Contains(ex.tries.exceeded, t.backend.NameOf(ex.api.Model))) &&
		(!ex.api.makesObject() || t.allModels || !ex.mayHaveAllModels())
}

// isLeft reports whether the target was not tried: a request may go to each
// backend once. After one that took the caller's own credential it goes only to
// another such one: otherwise we would pay for what the caller's account was
// refused.
func (ex *exchange) isLeft(t *target) bool {
	for i := range ex.tries.attempts {
		tried := ex.tries.attempts[i].target
		again := ex.tries.move.returns && ex.tries.attempts[i].class == verdict.Silent || ex.isForgiven(i) || i < ex.tries.move.forgiven && ex.tries.attempts[i].class == verdict.Throttled
		if tried == t && !again || tried.backend.Credentials.Passthrough && !t.backend.Credentials.Passthrough {
			return false
		}
	}
	return true
}

// Once implements pool.Request. A request that may have been executed after a
// failure is not retried either.
func (ex *exchange) Once() bool { return !ex.api.received.Whole() || !ex.api.Kind.Repeatable() }

// Affinity implements pool.Request.
func (ex *exchange) Affinity() *pool.Affinity { return &ex.api.affinity }

// Cost implements pool.Request.
func (ex *exchange) Cost() int64 { return ex.api.Cost }

// attempted is the attempt that is made right now.
func (ex *exchange) attempted() *try { return &ex.tries.attempts[len(ex.tries.attempts)-1] }

// model is what the current backend calls the model that is asked for.
func (ex *exchange) model() string { return ex.tries.current.backend.NameOf(ex.api.Model) }

// benchModel is what the backend calls the model whose benches count for the request,
// and which the request may bench. An operation other than inference has separate
// limits, such as a number of jobs. So it counts as a request without a model.
func (ex *exchange) benchModel(b *backend.Backend) string {
	if !ex.api.Kind.Infers() {
		return ""
	}
	return b.NameOf(ex.api.Model)
}

// mayHaveAllModels reports whether the request may go to a backend whose account
// serves all models of the pool. One that failed is tried, because a request that
// names the object goes there even then. New objects do not go to a drained one.
func (ex *exchange) mayHaveAllModels() bool {
	now := time.Now()
	return slices.ContainsFunc(ex.balancer.targets, func(t *target) bool {
		return t.allModels && !t.Drained() && !t.Unreachable() && !t.Full() && ex.isLeft(t) && t.backend.Takes(&ex.api.Request, ex.api.anonymous) && !t.Throttles(ex, now)
	})
}

// doubtBenches puts the benches in doubt that the request began, if it met nothing
// but refusals for a limit: perhaps it was only too large.
func (ex *exchange) doubtBenches() {
	for _, a := range ex.tries.attempts {
		if !a.class.Promise() && a.class != verdict.TooLarge {
			return
		}
	}
	for _, a := range ex.tries.attempts {
		if !a.benched.IsZero() {
			a.target.Doubt(ex.wholeBackend(a.class), ex.benchModel(a.target.backend), a.benched)
		}
	}
}

// wholeBackend reports whether a class is about all of the backend. A quota that an
// operation other than inference has met may be one of these.
func (ex *exchange) wholeBackend(c verdict.Class) bool {
	return c.WholeBackend() && (c != verdict.Quota || ex.api.Kind.Infers())
}

// dropBest closes the best reply so far.
func (ex *exchange) dropBest() {
	if ex.tries.best.Response != nil {
		ex.tries.best.Body.Close()
		ex.tries.best = bestReply{}
	}
}

// committed lets go of what only another attempt would need. A reply may
// stream for minutes, and must not hold the prompt for so long.
func (ex *exchange) committed() {
	ex.doubtBenches()
	ex.dropBest()
	ex.api.received.Release()
	ex.api.credentials, ex.api.split = keys.Presented{}, nil
}

// release gives back the place at the current backend.
func (ex *exchange) release() {
	if ex.tries.current != nil {
		ex.tries.current.Release()
		ex.tries.current = nil
	}
}

// observeFailover counts that the request goes on to another backend, if it was
// at one before.
func (ex *exchange) observeFailover(to *pool.Member) {
	if len(ex.tries.attempts) == 0 {
		return
	}
	if last := ex.attempted(); last.over && last.target.Member != to {
		last.target.metrics.FailedOver(string(last.class))
	}
}

// deploymentLabel is the label in metrics of what the backend calls that model.
func (ex *exchange) deploymentLabel(t *target) string {
	return metrics.Deployment(t.Member, t.backend.NameOf(ex.api.Model))
}
