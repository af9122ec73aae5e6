package openailb

import (
	"context"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/announce"
	"github.com/openai-lb/caddy-openai-lb/internal/callerkeys"
	"github.com/openai-lb/caddy-openai-lb/internal/clientkeys"
	"github.com/openai-lb/caddy-openai-lb/internal/fleet"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/overview"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/tracing"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// balancer is what all requests of a handler, or of a plain reverse_proxy, have
// in common: a pool, and the backends that its members stand for.
type balancer struct {
	fleet.Entry
	targets []*target // by the index of their members
	// transport makes the attempts. It is nil in a plain reverse_proxy with
	// another transport.
	transport *Transport
	// forward sends a request that all backends throttle to the one that
	// returns soonest, instead of refusing it.
	forward bool
	// plain reports whether this is a plain reverse_proxy. It directs requests and
	// decides on headers by itself.
	plain bool
	// streamUsage asks for the usage of streams.
	streamUsage bool
	logger      *announce.Log
	events      *announce.Events
	// metrics are those of the pool, and ownMetrics those of what no backend
	// answers. models are the labels of what clients ask for.
	metrics    *metrics.Pool
	ownMetrics *metrics.Backend
	models     metrics.Models
}

// target is a backend as reverse_proxy and the pool see it.
type target struct {
	*pool.Member
	backend  *Backend
	upstream *reverseproxy.Upstream
	// allModels means that its account serves all models of the pool.
	allModels bool
	// servedAt is when it last served a request: Unix time in nanoseconds.
	servedAt atomic.Int64
	metrics  *metrics.Backend
}

func newBalancer(name string, targets []*target, policy reverseproxy.Selector, events *announce.Events, listeners ...pool.Listener) *balancer {
	b := &balancer{targets: targets, logger: events.Log, events: events, metrics: metrics.Of(name)}
	b.ownMetrics = b.metrics.Backend("")
	members := make([]*pool.Member, len(targets))
	var models []string
	for i, t := range targets {
		if t.Checks == nil {
			t.Checks = t.upstream
		}
		t.metrics = b.metrics.Backend(t.Name)
		members[i] = t.Member
		models = append(models, t.Models...)
		for _, m := range t.backend.Model {
			models = append(models, m.Name)
		}
	}
	b.models = metrics.ModelsOf(models)
	b.Entry = fleet.Entry{Name: name, Pool: pool.New(members, append(listeners, b.logger, b.metrics, b.events, overview.Recorder(name))...)}
	slices.SortFunc(targets, func(a, b *target) int { return a.Index - b.Index })
	if policy != nil {
		b.Pool.Policy = func(r pool.Request, tier []*pool.Member) *pool.Member {
			return b.chooseByPolicy(policy, r.(*exchange), tier)
		}
	}
	return b
}

// open makes the balancer's pool part of the fleet until close. Its upstreams must
// be set up: whoever shows the fleet looks at them.
func (b *balancer) open() { fleet.Default.Add(&b.Entry) }

func (b *balancer) close() {
	fleet.Default.Remove(&b.Entry)
	b.Pool.Close()
}

// exchange is the state of one request: what it asks for, its body, and which
// backends it tried. It belongs to the goroutine that serves the request.
type exchange struct {
	balancer *balancer
	request  *http.Request
	writer   http.ResponseWriter
	// proxied is the request as reverse_proxy gets it.
	proxied http.Request
	// shown is whose placeholders are shown, if this is the request's first exchange.
	shown *exchange

	// maxAttempts is how many backends the request may try. 0: all of them.
	maxAttempts int
	// deadline is when the last attempt may begin. Zero: any time.
	deadline time.Time

	asked asked
	body  replay.Body
	home  affinity.Home // which accounts may get the request
	// wantsAllModels means that the request makes an object without a model.
	wantsAllModels bool
	// caller is who sent the request, if callers need a key.
	caller clientkeys.Caller
	// credentials are what the caller identified itself with, for a backend
	// with auth passthrough.
	credentials callerkeys.Presented
	// split is the client's header, if reverse_proxy got only a part of it.
	split http.Header
	// cookies are set once a policy was asked, which may set more.
	cookies *savedCookies

	// own is an answer of ours, for which no backend is asked, and ownClass its
	// class, if it is not that of the last attempt.
	own      *http.Response
	ownClass string
	// owner is the backend of the only account that may get the request, if it
	// throttles.
	owner *target
	// current is the backend that is attempted right now, if any is.
	current *target
	// attempts are those made, the current one included.
	attempts []attempt
	// room is where the first attempt is.
	room [1]attempt

	// last is the latest reply that says more than that a backend throttles.
	last *http.Response
	// lastFrom is the number of the attempt that brought it, and from the attempt
	// whose reply the client gets, if that is not the last one.
	lastFrom int
	from     *attempt
	// blame is what the request has to answer for.
	blame blame
	// exceeded are the names of models whose context is too short for the request.
	exceeded []string

	// usage reads the client's reply. tokens are what it found, once that is over.
	usage  *usage.Reader
	tokens usage.Tokens

	// started is when the request came, and firstByte how long after that the
	// first byte of the reply's body went to the client.
	started   time.Time
	firstByte time.Duration
	// status is that of the answer.
	status int
	// ours reports whether the client got an answer of the balancer's own.
	ours bool
	// duration is how long the request took, once it is over, and aborted reports
	// whether its reply was aborted then.
	duration time.Duration
	aborted  bool

	// executed reports whether the last attempt may have executed a request that
	// must not be executed twice.
	executed bool
	// lastMissing reports whether last only says that an object is not there.
	lastMissing bool
	// forwarded reports whether the request went to a backend that throttles.
	forwarded bool
}

// attempt is one backend's answer to an exchange.
type attempt struct {
	target  *target
	class   verdict.Class
	status  int
	started time.Time
	// benched is when a promise began by this attempt, if one did.
	benched time.Time
	// deployment is the label in metrics of what the backend calls the model.
	deployment string
	// over reports whether metrics know what came of it, and span is over.
	over bool
	span *tracing.Span
}

func (b *balancer) newExchange(w http.ResponseWriter, r *http.Request, maxAttempts int, tryDuration time.Duration) *exchange {
	ex := &exchange{balancer: b, request: r, writer: w, maxAttempts: maxAttempts, started: time.Now()}
	ex.attempts = ex.room[:0]
	if tryDuration > 0 {
		ex.deadline = ex.started.Add(tryDuration)
	}
	return ex
}

type exchangeCtxKey struct{}

// exchangeVar is the variable in which a plain reverse_proxy's selection leaves
// the exchange for the transport: a selection policy cannot change the
// request's context.
const exchangeVar = "openai_lb.exchange"

// exchangeOf returns the exchange that t makes attempts for. A request may
// pass several handlers, each with an exchange of its own.
func exchangeOf(ctx context.Context, t *Transport) *exchange {
	if ex, ok := ctx.Value(exchangeCtxKey{}).(*exchange); ok && ex.balancer.transport == t {
		return ex
	}
	if ex, ok := caddyhttp.GetVar(ctx, exchangeVar).(*exchange); ok && ex.balancer.transport == t {
		return ex
	}
	return nil
}

// ourselves is the upstream of the balancer's own answers: reverse_proxy needs one
// to count them for. It is never dialed, and no policy or health check sees it.
var ourselves = &reverseproxy.Upstream{Dial: "openai_lb:0", Host: new(reverseproxy.Host)}

// choose moves on to the backend that is attempted next. If there is none, it
// returns ourselves, and the transport answers.
func (ex *exchange) choose() *reverseproxy.Upstream {
	ex.release()
	now := time.Now()
	if ex.own == nil && ex.mayGoOn(now) {
		m := ex.balancer.Pool.Pick(ex, now)
		if m == nil && ex.balancer.forward && !ex.forwarded && ex.allThrottle(now) {
			m = ex.balancer.Pool.PickThrottled(ex, now)
			ex.forwarded = m != nil
		}
		if m != nil {
			ex.observeFailover()
			ex.current = ex.balancer.targets[m.Index]
			ex.attempts = append(ex.attempts, attempt{target: ex.current, started: now, deployment: ex.deploymentLabel(ex.current)})
			return ex.current.upstream
		}
	}
	return ourselves
}

// mayGoOn reports whether a further backend may be tried.
func (ex *exchange) mayGoOn(now time.Time) bool {
	if len(ex.attempts) == 0 {
		return true
	}
	return (ex.maxAttempts == 0 || len(ex.attempts)-ex.home.Asked() < ex.maxAttempts) &&
		(ex.deadline.IsZero() || !now.After(ex.deadline))
}

// ModelAt implements pool.Request.
func (ex *exchange) ModelAt(m *pool.Member) (model string, ok bool) {
	b := ex.balancer.targets[m.Index].backend
	return ex.benchModel(b), ex.home.Allows(b.account) && b.takes(&ex.asked)
}

// MayTry implements pool.Request. After a backend whose model has too short a
// context, the request goes only where the model has another name. An object made
// without a model may be used with any, so an account with all models makes it,
// while one can be called.
func (ex *exchange) MayTry(m *pool.Member) bool {
	t := ex.balancer.targets[m.Index]
	return ex.isLeft(t) &&
		(len(ex.exceeded) == 0 || !slices.Contains(ex.exceeded, t.backend.nameOf(ex.asked.model))) &&
		(!ex.wantsAllModels || t.allModels || !ex.mayHaveAllModels())
}

// isLeft reports whether the target was not tried: a request may go to each
// backend once. After one that took the caller's own credential it goes only to
// another such one: otherwise we would pay for what the caller's account was
// refused.
func (ex *exchange) isLeft(t *target) bool {
	for i := range ex.attempts {
		tried := ex.attempts[i].target
		if tried == t || tried.backend.passesThrough() && !t.backend.passesThrough() {
			return false
		}
	}
	return true
}

// Once implements pool.Request. A request that may have been executed after a
// failure is not retried either.
func (ex *exchange) Once() bool { return !ex.body.Whole() || !ex.asked.repeatable }

// Cost implements pool.Request.
func (ex *exchange) Cost() int64 { return ex.asked.cost }

// attempted is the attempt that is made right now.
func (ex *exchange) attempted() *attempt { return &ex.attempts[len(ex.attempts)-1] }

// model is what the current backend calls the model that is asked for.
func (ex *exchange) model() string { return ex.current.backend.nameOf(ex.asked.model) }

// benchModel is what the backend calls the model whose benches count for the request,
// and which the request may bench. An operation other than inference has separate
// limits, such as a number of jobs. So it counts as a request without a model.
func (ex *exchange) benchModel(b *Backend) string {
	if !ex.asked.infers {
		return ""
	}
	return b.nameOf(ex.asked.model)
}

// doubtBenches puts the benches in doubt that the request began, if it met nothing
// but refusals for a limit: perhaps it was only too large.
func (ex *exchange) doubtBenches() {
	for _, a := range ex.attempts {
		if !a.class.Promise() && a.class != verdict.TooLarge {
			return
		}
	}
	for _, a := range ex.attempts {
		if !a.benched.IsZero() {
			a.target.Doubt(ex.wholeBackend(a.class), ex.benchModel(a.target.backend), a.benched)
		}
	}
}

// wholeBackend reports whether a class is about all of the backend. A quota that an
// operation other than inference has met may be one of these.
func (ex *exchange) wholeBackend(c verdict.Class) bool {
	return c.WholeBackend() && (c != verdict.Quota || ex.asked.infers)
}

// keep keeps a reply, in case no backend has a better one.
func (ex *exchange) keep(res *http.Response) {
	ex.dropLast()
	ex.last, ex.lastFrom, ex.lastMissing = res, len(ex.attempts)-1, false
}

func (ex *exchange) dropLast() {
	if ex.last != nil {
		ex.last.Body.Close()
		ex.last = nil
	}
}

// committed lets go of what only another attempt would need. A reply may
// stream for minutes, and must not hold the prompt for so long.
func (ex *exchange) committed() {
	ex.doubtBenches()
	ex.dropLast()
	ex.body.Release()
	ex.credentials = callerkeys.Presented{}
}

// release gives back the place at the current backend.
func (ex *exchange) release() {
	if ex.current != nil {
		ex.current.Release()
		ex.current = nil
	}
}

// finish gives back what the exchange holds and counts it. net/http's server ends
// the context of the reply that the client got.
func (ex *exchange) finish(err error, aborted bool) {
	ex.duration, ex.aborted = time.Since(ex.started), aborted
	ex.usage.Close()
	ex.tokens = ex.usage.Tokens()
	ex.dropLast()
	ex.body.Release()
	ex.release()
	ex.observe(err)
}
