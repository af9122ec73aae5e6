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

// talk has the rules of the conversation in a WebSocket, which ex has opened. Each response in it is a request of its own, to the
// backend that has opened the WebSocket.
type talk struct {
	*reader
	ex *exchange
}

// response is one in a conversation.
type response struct {
	exchange
	watcher sse.Watcher
	counts  usage.Reader
}

// converse begins to read the messages of a WebSocket that is open. The request itself asked for its first response, unless it is a
// realtime session.
func (d *reader) converse(ex *exchange) {
	in, t := &ex.intent, talk{d, ex}
	if realtime := in.Kind.IsHandshake(); realtime {
		in.socket.Converse(t, nil, ex.bill.Limited() || d.callers.SeesEach(in.caller.Name))
		return
	}
	first := t.next()
	placement := *in.placement
	first.intent.started, first.intent.placement = in.started, &placement
	first.bill, ex.bill = ex.bill, bill{}
	in.socket.Converse(t, first.begin(), true)
}

// next returns a response that has not begun.
func (t talk) next() *response {
	now, in, last := time.Now(), &t.ex.intent, t.ex.tries.last()
	r := &response{exchange: exchange{balancer: t.ex.balancer, writer: t.ex.writer}}
	r.intent = intent{Request: in.Request, request: in.request, started: now, placement: affinity.Anywhere, caller: in.caller, entitled: in.entitled, anonymous: in.anonymous, within: in.Kind.IsHandshake()}
	r.tries.list = append(r.tries.first[:0], try{target: last.target, started: now, class: verdict.Served, deployment: last.deployment, over: true})
	r.intent.Kind, r.outcome.status = openaiapi.Inference, http.StatusOK
	return r
}

// streamed stands for the reply whose events are the messages of a WebSocket.
var streamed = http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {openaiapi.TypeEventStream}}}

// begin prepares the readers of the response's events.
func (r *response) begin() *response {
	if r.outcome.usage = r.counts.Begin(streamed.Header); r.bill.CountsTokens() {
		r.counts.CountContent()
	}
	r.counts.Watch(&r.watcher)
	account := r.tries.last().target.backend.AccountKey
	r.intent.placement.Served(account, &streamed)
	if ids := r.intent.placement.IDReader(account, &streamed); ids != nil {
		ids.Join(&r.watcher)
	}
	return r
}

// Watcher implements attempt.Response.
func (r *response) Watcher() *sse.Watcher { return &r.watcher }

// Settle implements attempt.Response.
func (r *response) Settle(failed, cut bool) {
	in, o, a := &r.intent, &r.outcome, r.tries.last()
	o.end(in, cut)
	if f := r.watcher.Failure; !o.tokens.Known() && (f != nil || failed) {
		if a.class, o.status = verdict.Failed, http.StatusInternalServerError; r.watcher.Pieces > 0 {
			a.class, o.status = verdict.BrokenStream, http.StatusOK // as over HTTP
		} else if f != nil && verdict.Judge(verdict.Reply{Status: f.Status, Body: f.Body}) == verdict.ClientError {
			a.class, o.status = verdict.ClientError, f.Status
		}
	}
	r.countTokens(in, &r.tries, o, a.target, string(a.class))
	r.tries.turn.lists = r.waiting
	r.bill.settle(r.balancer, in, &r.tries, o)
}

// Create implements attempt.Rules. The model of a response in a session is the session's.
func (t talk) Create(text []byte) (begun attempt.Response, instead [][]byte, refusal *http.Response) {
	r := t.next()
	in, to := &r.intent, r.tries.last().target.backend
	in.received.Hold(text)
	if in.within {
		in.ReadEvent(text)
	} else {
		in.parse(in.Route, t.promptCache)
	}
	own := t.limit(&r.exchange)
	if own.Response == nil && !in.within {
		if own = t.findAccounts(in, t.ex.targets); own.Response == nil && (!to.Takes(&in.Request, in.anonymous) || !in.placement.Allows(to.AccountKey)) {
			own = apierror.AnotherWebSocket.Answer(in.request)
		}
		u := *in.request.URL
		_, changes := to.Direct(&u, make(http.Header), &in.Request, in.Route)
		if instead = in.Body.With(text, changes); len(instead) == 1 {
			instead = nil
		}
	}
	in.received.Release()
	if own.Response != nil {
		r.bill.Settle(in.started, meter.Cost{})
		return nil, nil, own.Response
	}
	return r.begin(), instead, nil
}

// Refuse implements attempt.Rules.
func (t talk) Refuse(kind string, text []byte) *http.Response {
	switch {
	case kind == "", t.affinity.IsStrict(): // which knows only what a response.create names
		return apierror.UnclearEvent.Response(t.ex.intent.request)
	case t.callers == nil:
		return nil
	}
	name := t.ex.intent.caller.Name
	if strings.HasPrefix(kind, attempt.Audio) {
		if refusal := t.callers.Check(time.Now(), name, meter.Estimate{Prompt: 1, Within: true}); refusal != nil {
			return t.refuse(&t.next().exchange, refusal).Response
		}
	}
	if t.callers.Models(name) != nil {
		asked := t.ex.intent.Request
		asked.ReadEvent(text)
		if e, refused := t.callers.MayUse(name, &asked, text, t.buffers); refused {
			return e.Response(t.ex.intent.request)
		}
	}
	return nil
}

// Unasked implements attempt.Rules.
func (t talk) Unasked() attempt.Response {
	r := t.next()
	r.bill.Admission = t.callers.Unasked(r.intent.started, r.intent.caller.Name)
	return r.begin()
}
