package openailb

import (
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// transaction has the values of one request. Each stage makes some of them, and
// the later stages read these: read makes the request, the bill, the wait and
// the placement; fetch runs the search; respond and finish make the outcome. A
// function that needs only some values gets only these.
type transaction struct {
	reader  *reader
	request request
	bill    bill
	// placement says which accounts may get the request. It is found when the
	// request is read, and changes with their replies.
	placement *affinity.Placement
	wait      wait
	search    search
	outcome   outcome
}

// ServeHTTP serves a request. If the request opened a WebSocket before a
// backend was chosen, it also serves each further message until a backend takes
// over the WebSocket, each as a separate request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	socket := h.serve(w, r, nil)
	if socket == nil {
		return nil
	}
	for socket.Again() {
		h.serve(w, r, socket)
	}
	socket.Close()
	return nil
}

// serve handles a request from its first byte to its report. It reads the
// request, sends it to one backend after another until one serves it, and
// answers. It returns the WebSocket that the request has opened, or nil.
func (h *Handler) serve(w http.ResponseWriter, r *http.Request, socket seam.WebSocket) seam.WebSocket {
	h.keyFiles.Refresh()
	t := &transaction{reader: h.reader, wait: wait{queues: h.balancer.waiting}}
	t.begin(w, r, socket)
	h.limitAttempts(&t.request)
	b := h.balancer
	show(b, t)
	aborted := true
	defer func() { b.finish(t, aborted) }()
	ownAnswer := h.reader.read(b, t)
	t.search.begin(b, &t.request, t.placement, &t.wait, t.bill.Tier())
	var reply *attempt.Reply
	if ownAnswer == (apierror.Answer{}) {
		reply, ownAnswer = b.fetch(t)
	}
	if t.request.socket == nil && (len(t.search.attempts) > 0 || t.request.received.Begun()) {
		// A handler that follows, by Caddy's intercept, must send the request
		// neither again nor without its body.
		r.Body = replay.Gone{}
		if r.ContentLength == 0 { // for which proxies send no body. Any other length stays, for Caddy's metrics
			r.ContentLength = -1
		}
	}
	var a answer
	if reply == nil {
		a = b.answer(t, ownAnswer)
	}
	if err := b.respond(t, reply, a); err != nil {
		panic(http.ErrAbortHandler) // the client must not take what it has for all of the reply
	}
	aborted = false
	return t.request.socket
}

// fetch makes attempts at one backend after another, until one has a reply for
// the client or none is left. Without a reply, it returns the balancer's own
// answer if an attempt decided it, or else an empty one.
func (b *balancer) fetch(t *transaction) (*attempt.Reply, apierror.Answer) {
	q, s := &t.request, &t.search
	defer s.withdraw()
	for s.Next() != nil {
		reply := b.attempt(q, s, &t.bill)
		judgement := judge(q, s, reply)
		b.learn(q, s, reply, judgement)
		switch s.Tell(reply, judgement) {
		case serve:
			return reply, apierror.Answer{}
		case stop:
			return nil, s.answer
		}
	}
	return nil, s.answer
}

// begin sets up the transaction for a request.
func (t *transaction) begin(w http.ResponseWriter, r *http.Request, socket seam.WebSocket) {
	q := &t.request
	q.incoming, q.asked, q.writer, q.socket = r, r, w, socket
	q.started = time.Now()
	q.credentials, q.query = keys.Read(r.Header, r.URL.RawQuery)
	t.placement = affinity.Anywhere
}

// limitAttempts sets how many backends a request may try, and until when: as
// long as lb_try_duration allows and the caller says it waits.
func (h *Handler) limitAttempts(q *request) {
	if h.LBRetries != nil {
		q.maxAttempts = *h.LBRetries + 1
	}
	duration := time.Duration(h.LBTryDuration)
	if patience, ok := openaiapi.Patience(q.incoming.Header); ok {
		if q.gone = q.started.Add(patience); duration == 0 || patience < duration {
			duration = patience
		}
	}
	if duration > 0 {
		q.deadline = q.started.Add(duration)
	}
}

// finish releases the memory and the places of the transaction, and reports its
// outcome to the log, the metrics and the bill. It does not cancel the
// request's context: net/http's server does that.
func (b *balancer) finish(t *transaction, aborted bool) {
	q, s, o := &t.request, &t.search, &t.outcome
	if aborted && q.socket != nil {
		q.socket.Close()
	}
	o.end(q, aborted)
	q.received.Release()
	s.close()
	if o.reply != nil { // before the log, the metrics and the bill, which depend on how the reply ended
		b.learnEnd(q, s, o.reply.End())
	}
	addToLog(q.incoming, func() zap.Field { return zap.Object("openai_lb", b.summary(t)) })
	b.report(q, s, o)
	t.bill.settle(b, q, s, o)
}

// transactionVar is the request variable that holds the transaction of the
// latest handler of the request.
const transactionVar = "openai_lb.transaction"

// shown is the value of transactionVar. It has no exported fields, so the
// placeholder of the variable cannot show keys.
type shown struct {
	b *balancer
	t *transaction
}

// show sets the placeholders of a request to the transaction's values. A
// request may pass several handlers, by Caddy's intercept; the last one counts.
func show(b *balancer, t *transaction) {
	ctx := t.request.incoming.Context()
	_, again := caddyhttp.GetVar(ctx, transactionVar).(shown)
	caddyhttp.SetVar(ctx, transactionVar, shown{b, t})
	if again {
		return
	}
	ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Map(func(key string) (any, bool) {
		if !strings.HasPrefix(key, observe.PlaceholderPrefix) {
			return nil, false
		}
		last := caddyhttp.GetVar(ctx, transactionVar).(shown)
		return last.b.summary(last.t).Placeholder(key)
	})
}
