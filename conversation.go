package openailb

import (
	"net/http"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// conversation has the rules of the messages in a WebSocket, which the request of handshake has opened. Each response in
// it is a request of its own, to the backend that has opened the WebSocket.
type conversation struct {
	*reader
	balancer  *balancer
	handshake *transaction
}

// response is one in a conversation.
type response struct {
	transaction
	balancer *balancer
	watcher  sse.Watcher
	counts   usage.Reader
}

// converse begins to read the messages of a WebSocket that is open. The request itself asked for its first response, unless it is a
// realtime session.
func (d *reader) converse(b *balancer, t *transaction) {
	q, c := &t.request, conversation{d, b, t}
	if realtime := q.Kind.IsHandshake(); realtime {
		q.socket.Converse(c, nil, t.bill.Limited() || d.callers.SeesEach(q.caller.Name))
		return
	}
	first := c.next()
	placement := *t.search.placement
	first.request.started, first.search.placement = q.started, &placement
	first.bill, t.bill = t.bill, bill{}
	q.socket.Converse(c, first.begin(), true)
}

// next returns a response that has not begun.
func (c conversation) next() *response {
	now, q, last := time.Now(), &c.handshake.request, c.handshake.search.attempts.last()
	r := &response{balancer: c.balancer}
	r.request = request{
		Request: q.Request, incoming: q.incoming, asked: q.asked, writer: q.writer, started: now, placement: affinity.Anywhere,
		caller: q.caller, entitled: q.entitled, anonymous: q.anonymous, inSession: q.Kind.IsHandshake(),
	}
	r.request.Kind, r.outcome.status = openaiapi.Inference, http.StatusOK
	r.wait.queues = c.balancer.waiting
	r.search.begin(c.balancer, &r.request, &r.wait, 0)
	r.search.attempts = append(r.search.attempts, attemptRecord{
		target: last.target, started: now, deployment: last.deployment, counted: true,
	})
	return r
}

// streamed stands for the reply whose events are the messages of a WebSocket.
var streamed = http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {openaiapi.TypeEventStream}}}

// begin prepares the readers of the response's events.
func (r *response) begin() *response {
	if r.outcome.usage = r.counts.Begin(streamed.Header); r.request.caller.Name != "" {
		r.counts.CountContent()
	}
	r.counts.Watch(&r.watcher)
	account, placement := r.search.attempts.last().target.backend.AccountKey, r.search.placement
	placement.Served(account, &streamed)
	if ids := placement.IDReader(account, &streamed); ids != nil {
		ids.Join(&r.watcher)
	}
	return r
}

// Watcher implements attempt.Response.
func (r *response) Watcher() *sse.Watcher { return &r.watcher }

// Settle implements attempt.Response.
func (r *response) Settle(failed, cut bool) {
	q, o, a := &r.request, &r.outcome, r.search.attempts.last()
	o.end(q, cut)
	a.class, o.status = r.judge(failed)
	r.balancer.countTokens(q, &r.search, o, a.target, string(a.class))
	r.bill.settle(r.balancer, q, &r.search, o)
}

// judge says what the events of the response mean, as those of a stream over HTTP would. failed reports whether an event
// said that the response has failed.
func (r *response) judge(failed bool) (class verdict.Class, status int) {
	f := r.watcher.Failure
	switch {
	case r.outcome.tokens.Known() || f == nil && !failed:
		return verdict.Served, http.StatusOK
	case r.watcher.Pieces > 0:
		return verdict.BrokenStream, http.StatusOK
	case f != nil && verdict.Judge(verdict.Reply{Status: f.Status, Body: f.Body}) == verdict.ClientError:
		return verdict.ClientError, f.Status
	}
	return verdict.Failed, http.StatusInternalServerError
}

// Create implements attempt.Rules. The model of a response in a session is the session's.
func (c conversation) Create(text []byte) (begun attempt.Response, instead [][]byte, refusal *http.Response) {
	r := c.next()
	q, to := &r.request, r.search.attempts.last().target.backend
	q.received.Hold(text)
	if q.inSession {
		q.ReadEvent(text)
	} else {
		q.parse(q.Route, c.promptCache)
	}
	own := c.limit(c.balancer, &r.transaction)
	if own != (apierror.Answer{}) && own.Response == nil { // the client left while the response waited
		own.Response = apierror.NotProcessed.Response(q.asked)
	}
	if own.Response == nil && !q.inSession {
		if own = c.findAccounts(q, c.balancer.targets); own.Response == nil && (!to.Takes(&q.Request, q.anonymous) || !q.placement.Allows(to.AccountKey)) {
			own = apierror.AnotherWebSocket.Answer(q.asked)
		}
		r.search.placement = q.placement
		u := *q.asked.URL
		_, changes := to.Direct(&u, make(http.Header), &q.Request, q.Route)
		if instead = q.Body.With(text, changes); len(instead) == 1 {
			instead = nil
		}
	}
	q.received.Release()
	if own.Response != nil {
		r.bill.Settle(q.started, meter.Cost{})
		return nil, nil, own.Response
	}
	return r.begin(), instead, nil
}

// Refuse implements attempt.Rules.
func (c conversation) Refuse(kind string, text []byte) *http.Response {
	switch {
	case kind == "", c.affinity.IsStrict(): // which knows only what a response.create names
		return apierror.UnclearEvent.Response(c.handshake.request.asked)
	case c.callers == nil:
		return nil
	}
	name := c.handshake.request.caller.Name
	if strings.HasPrefix(kind, attempt.Audio) {
		if refusal := c.callers.Check(time.Now(), name, meter.Estimate{Prompt: 1, Within: true}); refusal != nil {
			return c.refuse(c.balancer, &c.next().transaction, refusal).Response
		}
	}
	if c.callers.Models(name) != nil {
		asked := c.handshake.request.Request
		asked.ReadEvent(text)
		if e, refused := c.callers.MayUse(name, &asked, text, c.buffers); refused {
			return e.Response(c.handshake.request.asked)
		}
	}
	return nil
}

// Unasked implements attempt.Rules.
func (c conversation) Unasked() attempt.Response {
	r := c.next()
	r.bill.Admission = c.callers.Unasked(r.request.started, r.request.caller.Name)
	return r.begin()
}
