package openailb

import (
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/affinity"
	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// conversation applies the limits and the affinity of a caller to the messages
// of a WebSocket, which the request of handshake has opened. Each response in
// it is treated as a separate request to the backend that opened the WebSocket.
type conversation struct {
	*reader
	balancer  *balancer
	handshake *transaction
	// checked is when the caller's key was last checked.
	checked time.Time
	// model is that of the latest response.create in a WebSocket of responses.
	model string
	// steered is the latest response.steer. The response that the session then
	// begins on its own is for it.
	steered atomic.Pointer[steered]
}

// steered is a response.steer: the placement of the objects that it names, the
// model of the response to which it adds, and how many tokens it uses up.
type steered struct {
	placement affinity.Placement
	model     string
	cost      int64
}

// response is one response in a conversation.
type response struct {
	transaction
	balancer *balancer
	// last is the attempt that has opened the WebSocket.
	last    *attemptRecord
	watcher sse.Watcher
	counts  usage.Reader
}

// converse begins the session of an open WebSocket. The request itself is the
// first response.create, except in a realtime session. The messages of a
// WebSocket that is not for inference are not read.
func (d *reader) converse(b *balancer, t *transaction) seam.WebSocketSession {
	q := &t.request
	c := &conversation{reader: d, balancer: b, handshake: t, checked: time.Now(), model: q.Model}
	switch {
	case q.Kind == openaiapi.WebSocket:
		return seam.WebSocketSession{}
	case q.socket == nil:
		return seam.WebSocketSession{
			Rules: c, Holds: d.clientKeys != nil || q.grant.Limited || q.grant.SeesEach() ||
				t.search.attempts.last().target.backend.Quotas != nil,
		}
	}
	first := c.next()
	placement := *t.placement
	first.request.started, first.placement = q.started, &placement
	first.bill, t.bill = t.bill, bill{}
	first.search.quotas, t.search.quotas = t.search.quotas, nil
	first.begin()
	// the search for the WebSocket's backend has deducted it
	first.search.board.Demand, first.search.attempts.last().reservation = t.search.board.Demand, first.last.reservation
	return seam.WebSocketSession{Rules: c, First: first, Holds: true}
}

// next returns a new response that has not begun.
func (c *conversation) next() *response {
	q := &c.handshake.request
	r := &response{balancer: c.balancer, last: c.handshake.search.attempts.last()}
	r.request = request{
		Request: q.Request, incoming: q.incoming, asked: q.asked, writer: q.writer, started: time.Now(),
		caller: q.caller, grant: c.grantOf(q.caller), entitled: q.entitled, anonymous: q.anonymous,
		inSession: q.Kind.IsHandshake(),
	}
	r.request.Kind, r.outcome.status = openaiapi.Inference, http.StatusOK
	r.wait.queues, r.placement = c.balancer.waiting, affinity.Anywhere
	return r
}

// streamed is the header and status of a stream: the events of a WebSocket are
// read as if they came in that reply.
var streamed = http.Response{StatusCode: http.StatusOK, Header: http.Header{
	"Content-Type": {openaiapi.TypeEventStream},
}}

// begin prepares the readers of the response's events. Its search is complete
// from the start, with the WebSocket's backend.
func (r *response) begin() {
	s, to := &r.search, r.last.target
	s.begin(r.balancer, &r.request, r.placement, &r.wait, r.bill.Tier())
	s.attempts = append(s.attempts, attemptRecord{
		target: to, started: r.request.started, deployment: r.last.deployment, counted: true,
	})
	if r.outcome.usage = r.counts.Begin(streamed.Header); s.needsTokens() {
		r.counts.CountContent()
	}
	if r.request.Body.Background {
		r.outcome.usage.FindID()
	}
	r.bill.follow(r.outcome.usage, s.charge())
	r.counts.Watch(&r.watcher)
	account := to.backend.AccountKey
	r.placement.Served(account, &streamed)
	if ids := r.placement.IDReader(account, &streamed); ids != nil {
		ids.Join(&r.watcher)
	}
}

// deduct counts a response that has begun in the use of its tier and caller,
// and deducts it from what is left of the backend's limits.
func (r *response) deduct() {
	s, to, now := &r.search, r.last.target, time.Now() // it may have waited for a limit
	s.fill(now)
	for i := range s.board.At {
		s.board.At[i].Takes = i == to.Index // it can be sent nowhere else
	}
	s.demand(now)
	s.attempts.last().reservation = s.deduct(to, now)
}

// Watcher implements seam.WebSocketResponse.
func (r *response) Watcher() *sse.Watcher { return &r.watcher }

// Settle implements seam.WebSocketResponse.
func (r *response) Settle(failed, cut bool) {
	q, o, a := &r.request, &r.outcome, r.search.attempts.last()
	o.end(q, cut)
	var unexecuted bool
	if a.class, o.status, unexecuted = r.classify(failed); unexecuted {
		r.search.undeduct(time.Now())
		r.search.returnCharge(a.class)
	}
	r.balancer.countTokens(q, &r.search, o, a.target, string(a.class))
	r.bill.settle(r.balancer, q, &r.search, o)
}

// classify returns the class and status that the response would have as a
// stream over HTTP, and whether the backend did not execute it. failed reports
// whether an event said that the response has failed.
func (r *response) classify(failed bool) (class verdict.Class, status int, unexecuted bool) {
	f, begun := r.watcher.Failure, r.watcher.Opening == sse.Content
	switch {
	case r.outcome.tokens.Known() || f == nil && !failed:
		return verdict.Served, http.StatusOK, false
	case r.watcher.Pieces > 0:
		return verdict.BrokenStream, http.StatusOK, false
	case f == nil: // a realtime session has refused to begin it, so it was not executed, or has ended it
		return verdict.Failed, http.StatusInternalServerError, r.watcher.Opening == sse.Preamble
	}
	reply := attempt.Reply{Status: f.Status, Class: verdict.Judge(verdict.Reply{Status: f.Status, Body: f.Body})}
	unexecuted = reply.Unexecuted() && !begun
	if reply.Class == verdict.ClientError {
		return reply.Class, f.Status, unexecuted
	}
	return verdict.Failed, http.StatusInternalServerError, unexecuted
}

// checkCaller returns a refusal if the caller may not continue, because its key
// was revoked or expired, or because it is denied. Such a refusal also closes
// the WebSocket, but not one for an issuer that cannot be reached.
func (c *conversation) checkCaller() *seam.WebSocketRefusal {
	c.checked = time.Now()
	d, q := c.reader.latest(c.balancer.Name), &c.handshake.request
	if d.clientKeys == nil {
		return nil
	}
	d.keyFiles.Refresh()
	presented, _ := keys.Read(q.incoming.Header, q.incoming.URL.RawQuery)
	caller, err := d.clientKeys.Identify(q.asked.Context(), &presented)
	if q.secret != nil { // which only had to be good when the session began
		caller, err = d.holder(q.secret)
	}
	var refusal apierror.Error
	switch {
	case errors.Is(err, keys.ErrIssuerUnavailable): // which may pass
		return &seam.WebSocketRefusal{Reply: refusalOf(err).Response(q.asked)}
	case err != nil:
		refusal = refusalOf(err)
	case caller.Name != q.caller.Name:
		refusal = apierror.WrongKey
	case d.isDenied(d.grantOf(caller), caller.Name):
		refusal = apierror.Denied
	default:
		return nil
	}
	return &seam.WebSocketRefusal{Reply: refusal.Response(q.asked), Close: refusal.Message}
}

// checkInterval is how often the caller's key is checked while audio arrives.
// Audio needs the check because a session may begin responses on its own after
// it.
const checkInterval = time.Second

// Create implements seam.WebSocketRules. A response in a realtime session uses
// the model of the session.
func (c *conversation) Create(text []byte) (begun seam.WebSocketResponse, instead [][]byte,
	refusal *seam.WebSocketRefusal) {
	if refusal = c.checkCaller(); refusal != nil {
		return nil, nil, refusal
	}
	r := c.next()
	q, to := &r.request, r.last.target.backend
	q.received.Hold(text)
	if q.inSession {
		q.ReadEvent(text)
	} else {
		q.parse(q.Route, c.promptCache)
	}
	answer := c.limit(c.balancer, &r.transaction)
	if answer != (apierror.Answer{}) && answer.Response == nil { // the client left while the response waited
		answer.Response = apierror.NotProcessed.Response(q.asked)
	}
	if answer.Response == nil && !q.inSession {
		answer = c.place(r)
		u := *q.asked.URL
		_, changes := to.Direct(&u, make(http.Header), &q.Request, q.Route)
		if instead = q.Body.With(text, changes); len(instead) == 1 {
			instead = nil
		}
	}
	if answer.Response == nil {
		answer = r.chargeQuotas()
	}
	q.received.Release()
	if answer.Response != nil {
		if c.admission != nil {
			c.admission.Settle(time.Now(), r.bill.Reservation, ratelimit.Cost{}) // it may have waited
		}
		return nil, nil, &seam.WebSocketRefusal{Reply: answer.Response}
	}
	c.model = q.Model
	r.begin()
	r.deduct()
	return r, instead, nil
}

// chargeQuotas charges the response to the quotas of the WebSocket's backend.
// It returns the answer if they have no room.
func (r *response) chargeQuotas() (answer apierror.Answer) {
	now, b := time.Now(), r.balancer
	c := b.limiterOf(r.last.target, now)
	if c == nil {
		return answer
	}
	reservation, refusal := c.Admit(now, r.request.estimate())
	if refusal != nil {
		b.reportOver(r.last.target, &r.request, refusal)
	}
	r.search.quotas = &quotaSearch{charge: &charge{reservation, b}}
	return b.overQuota(r.request.asked, refusal)
}

// checkQuotas returns the answer to a message that adds to the prompt, if the
// quotas of the WebSocket's backend have no room for it.
func (c *conversation) checkQuotas(e ratelimit.Estimate) (answer apierror.Answer) {
	now := time.Now()
	l := c.balancer.limiterOf(c.handshake.search.attempts.last().target, now)
	if l == nil {
		return answer
	}
	return c.balancer.overQuota(c.handshake.request.asked, l.Refuses(now, e))
}

// place finds the accounts that may get the message. It returns the answer if
// the account of this WebSocket is not one of them.
func (c *conversation) place(r *response) (answer apierror.Answer) {
	q, to := &r.request, r.last.target.backend
	r.placement, answer = c.findAccounts(q, c.balancer.targets)
	if answer.Response == nil && (!to.Takes(&q.Request, q.anonymous) || !r.placement.Allows(to.AccountKey)) {
		answer = apierror.AnotherWebSocket.Answer(q.asked)
	}
	return answer
}

// steer checks a response.steer, which adds input to a response, and returns
// the refusal if it must not pass. It names objects as a response.create does.
// The response that results is charged when the session begins it, by Unasked.
func (c *conversation) steer(text []byte) *seam.WebSocketRefusal {
	if refusal := c.checkCaller(); refusal != nil {
		return refusal
	}
	r := c.next()
	q := &r.request
	q.received.Hold(text)
	defer q.received.Release()
	q.Model = c.model
	q.ReadEvent(text)
	estimate := ratelimit.Estimate{Prompt: q.PromptTokens(text), Model: c.model, IsPart: true}
	if c.admission != nil {
		if e, refused := c.mayUse(q.grant, q.caller.Name, &q.Request, text); refused {
			return &seam.WebSocketRefusal{Reply: e.Response(q.asked)}
		}
		now := time.Now()
		if refusal := c.admission.Caller(now, q.caller.Name).Refuses(now, estimate); refusal != nil {
			return &seam.WebSocketRefusal{Reply: c.exceededAnswer(c.balancer, &r.transaction, refusal).Response}
		}
	}
	if answer := c.checkQuotas(estimate); answer.Response != nil {
		return &seam.WebSocketRefusal{Reply: answer.Response}
	}
	if answer := c.place(r); answer.Response != nil {
		return &seam.WebSocketRefusal{Reply: answer.Response}
	}
	c.steered.Store(&steered{*r.placement, c.model, q.Cost}) // whatever it names itself
	return nil
}

// Refuse implements seam.WebSocketRules.
func (c *conversation) Refuse(kind string, text []byte) *seam.WebSocketRefusal {
	if kind == openaiapi.SteerMessage && !c.handshake.request.Kind.IsHandshake() {
		return c.steer(text)
	}
	audio := strings.HasPrefix(kind, openaiapi.AudioMessage)
	if audio && time.Since(c.checked) >= checkInterval {
		if refusal := c.checkCaller(); refusal != nil {
			return refusal
		}
	}
	if res := c.refuseMessage(kind, audio, text); res != nil {
		return &seam.WebSocketRefusal{Reply: res}
	}
	return nil
}

// refuseMessage checks a message that asks for no response, and returns the
// answer if it must not pass, else nil.
func (c *conversation) refuseMessage(kind string, audio bool, text []byte) *http.Response {
	if kind == "" || c.affinity.IsStrict() { // which knows only what a response.create or response.steer names
		return apierror.UnclearEvent.Response(c.handshake.request.asked)
	}
	estimate := ratelimit.Estimate{Prompt: 1, Model: c.handshake.request.Model, IsPart: true}
	if audio {
		if answer := c.checkQuotas(estimate); answer.Response != nil {
			return answer.Response
		}
	}
	if c.admission == nil {
		return nil
	}
	caller, now := c.handshake.request.caller, time.Now()
	if audio {
		if refusal := c.admission.Caller(now, caller.Name).Refuses(now, estimate); refusal != nil {
			return c.exceededAnswer(c.balancer, &c.next().transaction, refusal).Response
		}
	}
	if grant := c.grantOf(caller); grant.Models != nil {
		asked := c.handshake.request.Request
		asked.ReadEvent(text)
		if e, refused := c.mayUse(grant, caller.Name, &asked, text); refused {
			return e.Response(c.handshake.request.asked)
		}
	}
	return nil
}

// Unasked implements seam.WebSocketRules.
func (c *conversation) Unasked() seam.WebSocketResponse {
	r := c.next()
	r.request.Body.Background = false // which is the first response's
	if steered := c.steered.Load(); steered != nil {
		placement := steered.placement
		r.placement, r.request.Model, r.request.Cost = &placement, steered.model, steered.cost
	}
	if c.admission != nil {
		r.bill = c.billOf(&r.request, r.request.started)
		r.bill.Reservation = r.bill.caller.Unasked(r.request.started, r.request.Model)
	}
	if l := c.balancer.limiterOf(r.last.target, r.request.started); l != nil {
		reservation := l.Unasked(r.request.started, r.request.Model)
		r.search.quotas = &quotaSearch{charge: &charge{reservation, c.balancer}}
	}
	r.begin()
	r.deduct()
	return r
}
