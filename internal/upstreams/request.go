package upstreams

import (
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// request is a request to a group. The policy makes it and leaves it to the transport. It belongs to the goroutine that
// serves it.
type request struct {
	*group
	selection *Selection
	client    *http.Request
	writer    http.ResponseWriter
	started   time.Time
	cookies   pools.Cookies

	asks     attempt.Asks
	body     replay.Body
	interims atomic.Int32
	// ask is what the pool has to know of the request.
	ask pool.Ask

	tries []try
	// current is where the attempt goes that is made now. nil: nowhere, the transport answers.
	current *member
	// own is the balancer's own answer, for which no upstream is tried.
	own *http.Response
	// best is the reply that the client gets if no further upstream has a better one, and bestClass its class.
	best      *http.Response
	bestClass verdict.Class
	// blamed reports whether an upstream was benched for a fault that may be the request's own: what fails everywhere
	// is the request's doing, so one request benches one upstream for it at most.
	blamed bool
	// executed reports whether the last attempt may have executed a request that must not be executed twice.
	executed bool
}

// try is one attempt at an upstream.
type try struct {
	member  *member
	class   verdict.Class // empty while it is made
	status  int
	started time.Time
	// benched is when a promise began by this attempt, if one did.
	benched time.Time
	span    *observe.Span
}

// requestVar is the variable in which the policy leaves the request for the transport: a policy cannot change the
// request's context.
const requestVar = "openai_lb.request"

// requestOf returns the request. On the first attempt, it makes one and reads the body. That happens before an upstream
// is chosen, because the body may take long to arrive.
func (s *Selection) requestOf(upstreams reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *request {
	if q, ok := caddyhttp.GetVar(r.Context(), requestVar).(*request); ok && q.client == r {
		return q
	}
	q := &request{group: s.groupOf(upstreams), selection: s, client: r, writer: w, started: time.Now()}
	// This is set once, before the first attempt: while a later attempt begins,
	// net/http may still dial for an earlier one and read the variables.
	caddyhttp.SetVar(r.Context(), requestVar, q)
	if s.transport != nil {
		q.read()
	}
	return q
}

// read finds out what the request asks for. If that needs no upstream, there is an answer then.
func (q *request) read() {
	if openaiapi.IsEchoOrTunnel(q.client) {
		q.own = apierror.MethodNotAllowed.Response(q.client)
	} else if err := q.body.Buffer(q.client, q.selection.transport.sender.RequestBuffers); err != nil {
		q.own = apierror.UnreadableBody(err).Response(q.client)
	}
	received := openaiapi.Received{Bytes: q.body.Buffered(), Whole: q.body.Whole(), Length: q.body.Length()}
	asked := openaiapi.Parse(q.client, openaiapi.ParsePath(q.client.URL.EscapedPath()), received, nil)
	q.asks = attempt.Asks{Kind: asked.Kind, Stream: asked.Body.Stream, Operation: asked.Route.Operation, Cost: asked.Cost}
}

// choose moves on to the upstream that is attempted next. It returns nil if there is none.
func (q *request) choose() *member {
	q.current = nil
	q.cookies.Drop(q.writer)
	now := time.Now()
	if q.own != nil || !q.mayGoOn(now) {
		return nil
	}
	m := q.Pool.Pick(q.asked(), now)
	if m == nil {
		return nil
	}
	q.current = q.members[m.Index]
	if n := len(q.tries); n > 0 && q.tries[n-1].class != "" {
		last := q.tries[n-1]
		last.member.metrics.FailedOver(string(last.class))
	}
	q.tries = append(q.tries, try{member: q.current, started: now})
	return q.current
}

func (q *request) mayGoOn(now time.Time) bool {
	s := q.selection
	return len(q.tries) == 0 || (s.maxAttempts == 0 || len(q.tries) < s.maxAttempts) && (s.tryDuration <= 0 || now.Sub(q.started) <= s.tryDuration)
}

// asked is what the pool has to know now. A request goes to each upstream once. An upstream has no benches for models. A
// request that may have been executed after a failure is not retried, so it is sent only once.
func (q *request) asked() *pool.Ask {
	if q.ask.At == nil {
		q.ask = pool.Ask{At: make([]pool.At, len(q.members)), Cost: q.asks.Cost, Once: !q.body.Whole() || !q.asks.Kind.Repeatable()}
		if q.selection.policy != nil {
			q.ask.Policy = pools.Policy(q.selection.policy, q.askPolicy)
		}
	}
	for i := range q.ask.At {
		q.ask.At[i] = pool.At{Takes: true}
	}
	for i := range q.tries {
		at := &q.ask.At[q.tries[i].member.Index]
		at.Bar, at.Tried, at.Refused = pool.Spent, true, q.tries[i].class.Promise()
	}
	return &q.ask
}

func (q *request) askPolicy(tier []*pool.Member) *pool.Member {
	return q.cookies.Ask(q.selection.policy, q.client, q.writer, tier, func(m *pool.Member) *reverseproxy.Upstream { return q.members[m.Index].upstream })
}

// answer is the response when no upstream served the request: an answer that needed none, the latest reply that says
// more to the client than we could, or an error of our own.
func (q *request) answer(req *http.Request) *http.Response {
	now := time.Now()
	wait, res := q.Pool.Wait(q.asked(), now), q.own
	switch {
	case res != nil:
	case q.best != nil:
		res, q.best = q.best, nil // it is not dropped
		verdict.RewriteHints(res.Header, wait)
		if q.bestClass == verdict.Overloaded {
			verdict.SetHint(res.Header, wait) // even if the upstream does not say
		}
		attempt.TrailersLast(res)
		attempt.ResetIfCut(q.client, res)
	default:
		res = q.refuseAll(wait, now)
	}
	res.Request = req
	q.committed()
	q.forbidRetry(res)
	return res
}

func (q *request) refuseAll(wait time.Duration, now time.Time) *http.Response {
	e := q.why(q.Pool.Why(&q.ask, now), wait)
	if e.Class == apierror.AllThrottled {
		q.metrics.AllThrottled()
		q.selection.events.AllThrottled()
	}
	res := e.Response(q.client) // reverse_proxy has the option rewrite
	if e.Status == http.StatusTooManyRequests {
		verdict.SetHint(res.Header, wait)
	}
	return res
}

func (q *request) why(w pool.Why, wait time.Duration) apierror.Error {
	var last verdict.Class
	for i := range q.tries {
		if class := q.tries[i].class; class.Failover() {
			last = class
		}
	}
	return apierror.Unserved(w, w.All(), "", last, wait)
}

// forbidRetry keeps the client's SDK from sending a request again that may have been
// executed. Official SDKs retry a 408 and a 5xx unless this header forbids it.
func (q *request) forbidRetry(res *http.Response) {
	if q.executed {
		res.Header["X-Should-Retry"] = []string{"false"}
	}
}

// committed releases what only another attempt would need. A reply may stream for minutes, and must not hold the
// prompt for so long. If the request met nothing but refusals for a limit, it puts the benches in doubt that it began:
// perhaps it was only too large.
func (q *request) committed() {
	q.keep(nil, "")
	q.body.Release()
	if slices.ContainsFunc(q.tries, func(t try) bool { return !t.class.Promise() && t.class != verdict.TooLarge }) {
		return
	}
	for _, t := range q.tries {
		if !t.benched.IsZero() {
			t.member.Doubt(q.wholeUpstream(t.class), pool.Scope{}, t.benched)
		}
	}
}

// keep keeps a reply, in case no upstream has a better one.
func (q *request) keep(res *http.Response, class verdict.Class) {
	if q.best != nil {
		q.best.Body.Close()
	}
	q.best, q.bestClass = res, class
}

// wholeUpstream reports whether a class is about all of the upstream. A quota that an operation other than inference
// has met may be one of these.
func (q *request) wholeUpstream(c verdict.Class) bool {
	return c.WholeBackend() && (c != verdict.Quota || q.asks.Kind.Infers())
}
