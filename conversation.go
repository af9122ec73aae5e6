package openailb

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/usage"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// conversation follows the messages of a WebSocket. Each response in it is a request of its own to the backend that has
// opened the WebSocket, and is charged once it is over.
type conversation struct {
	reader   *reader
	opened   *exchange
	realtime bool

	mu        sync.Mutex
	responses []*response // that are not over, the oldest first
	refused   time.Time   // when the client was last told that its audio is refused
}

// response is one in a conversation.
type response struct {
	exchange
	id      string // empty: it has not begun
	watcher sse.Watcher
	counts  usage.Reader
}

// streamed is how a reply looks whose events are the messages of a WebSocket.
var streamed = http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {openaiapi.TypeEventStream}}}

// begin begins the conversation, of which ex is the handshake and, unless it is a realtime session, the first response.
func (c *conversation) begin(ex *exchange) {
	in := &ex.intent
	c.opened, c.realtime = ex, in.Kind.IsHandshake()
	if !c.realtime {
		first := c.next()
		first.intent.started, first.intent.placement = in.started, in.placement
		first.bill, ex.bill = ex.bill, bill{}
		c.mu.Lock()
		c.add(first)
		c.mu.Unlock()
	}
	in.socket.Converse(c, !c.realtime || ex.bill.Limited() || c.reader.callers.SeesEach(in.caller.Name))
}

// next returns a response that has not begun.
func (c *conversation) next() *response {
	now, in, last := time.Now(), &c.opened.intent, c.opened.tries.last()
	r := &response{exchange: exchange{balancer: c.opened.balancer, writer: c.opened.writer}}
	r.intent.Request, r.intent.request, r.intent.started, r.intent.within = in.Request, in.request, now, c.realtime
	r.intent.Kind = openaiapi.Inference
	r.intent.caller, r.intent.entitled, r.intent.anonymous = in.caller, in.entitled, in.anonymous
	r.tries.list = append(r.tries.first[:0], try{target: last.target, started: now, class: verdict.Served, deployment: last.deployment, over: true})
	r.outcome.status = http.StatusOK
	return r
}

// add has the messages of the backend read for a response. The caller holds the lock.
func (c *conversation) add(r *response) {
	r.outcome.usage = r.counts.Begin(streamed.Header)
	if r.bill.CountsTokens() {
		r.counts.CountContent()
	}
	r.outcome.usage.Watch(&r.watcher)
	account := r.tries.last().target.backend.AccountKey
	r.intent.placement.Served(account, &streamed)
	if ids := r.intent.placement.IDReader(account, &streamed); ids != nil {
		ids.Join(&r.watcher)
	}
	c.responses = append(c.responses, r)
}

// Sent implements attempt.Conversation.
func (c *conversation) Sent(text []byte) (passes bool, instead [][]byte, answer []byte) {
	e, r := openaiapi.ParseClientEvent(text), c.next()
	var own apierror.Answer
	switch {
	case !e.Clear:
		own = apierror.UnclearEvent.Answer(r.intent.request)
	case e.Type != "response.create":
		own = c.check(r, e.Type, text)
	case c.realtime:
		own = c.askInSession(r, text)
	default:
		own, instead = c.ask(r, text)
	}
	switch {
	case own.Response == nil && e.Type == "response.create":
		c.mu.Lock()
		c.add(r)
		c.mu.Unlock()
		return true, instead, nil
	case own.Response == nil:
		return true, nil, nil
	case strings.HasPrefix(e.Type, audioEvents) && !c.tells(r.intent.started):
		return false, nil, nil
	}
	body, _ := io.ReadAll(own.Body) // which is in memory
	if c.realtime {
		return false, nil, attempt.RealtimeError(own.StatusCode, body, e.Type == "response.create", e.ID)
	}
	return false, nil, attempt.ErrorEvent(own.StatusCode, own.Header, body, e.Stream)
}

// ask charges a response to its caller, unless the backend of the WebSocket must not get it. instead is the message as the backend
// gets it, if it gets another one.
func (c *conversation) ask(r *response, text []byte) (own apierror.Answer, instead [][]byte) {
	in, to := &r.intent, r.tries.last().target.backend
	in.received.Hold(text)
	in.parse(in.Route, c.reader.promptCache)
	if own = c.reader.limit(&r.exchange); own.Response != nil {
		return own, nil
	}
	if own = c.reader.place(in, c.opened.targets); own.Response == nil && (!to.Takes(&in.Request, in.anonymous) || !in.placement.Allows(to.AccountKey)) {
		own = apierror.AnotherWebSocket.Answer(in.request)
	}
	if own.Response != nil {
		r.bill.Settle(in.started, meter.Cost{})
		return own, nil
	}
	u := *in.request.URL
	_, changes := to.Direct(&u, make(http.Header), &in.Request, in.Route)
	if pieces := in.Body.With(text, changes); len(pieces) > 1 {
		instead = pieces
	}
	in.received = replay.Body{}
	return own, instead
}

// askInSession charges a response in a realtime session to its caller. Its model is the session's.
func (c *conversation) askInSession(r *response, text []byte) apierror.Answer {
	r.intent.read(text)
	r.intent.received.Hold(text)
	defer func() { r.intent.received = replay.Body{} }()
	return c.reader.limit(&r.exchange)
}

// audioEvents begins the types of events with audio, after which a session may begin a response by itself.
const audioEvents = "input_audio_buffer."

// check returns the answer to an event that begins no response by itself, if it must not pass.
func (c *conversation) check(r *response, kind string, text []byte) (none apierror.Answer) {
	d, in := c.reader, &r.intent
	if d.callers == nil {
		return none
	}
	if strings.HasPrefix(kind, audioEvents) {
		if refusal := d.callers.Check(in.started, in.caller.Name, meter.Estimate{Prompt: 1, Within: true}); refusal != nil {
			return d.refuse(&r.exchange, refusal)
		}
	}
	models := d.callers.Models(in.caller.Name)
	if models == nil {
		return none
	}
	in.read(text)
	in.NeedsModel = false
	e, refused := d.callers.MayUse(in.caller.Name, &in.Request, text, d.buffers)
	if in.Clarity != openaiapi.Clear {
		e, refused = apierror.MissingModel(models), true
	}
	if refused {
		return e.Answer(in.request)
	}
	return none
}

// tells reports whether the client is told that its audio is refused, once in a second.
func (c *conversation) tells(now time.Time) bool {
	told := now.Sub(c.refused) < time.Second
	if !told {
		c.refused = now
	}
	return !told
}

// transcribed is the type of an event with the tokens of another model, which has written down what was said.
const transcribed = "conversation.item.input_audio_transcription.completed"

// ends reports whether a response is over with an event of this type. An error in a session is about an event of the client's.
func (c *conversation) ends(kind string) bool {
	switch kind {
	case "response.done", transcribed:
		return c.realtime
	case "response.completed", "response.incomplete", "response.failed", "error":
		return !c.realtime
	}
	return false
}

// Received implements attempt.Conversation.
func (c *conversation) Received(e sse.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var about struct {
		Response struct{ ID, Status string }
	}
	kind := string(e.Kind())
	begins, ends := kind == "response.created", c.ends(kind)
	if begins || ends {
		_ = json.Unmarshal(e.Data, &about) // what can be read
	}
	i := c.find(about.Response.ID, begins)
	switch {
	case kind == transcribed, i < 0 && (begins || ends && kind != "error"): // nobody has asked for it
		r := c.next()
		r.bill.Admission = c.reader.callers.Unasked(r.intent.started, r.intent.caller.Name)
		i = len(c.responses)
		c.add(r)
	case i < 0:
		return
	}
	r := c.responses[i]
	if begins {
		r.id = about.Response.ID
	}
	if r.watcher.Take(e); ends {
		c.responses = slices.Delete(c.responses, i, i+1)
		if kind != transcribed || r.counts.Tokens().Known() {
			r.settle(about.Response.Status == "failed", false)
		}
	}
}

// find returns the place of the response that an event is about, or -1. With begins, it is the next one that begins, and otherwise
// the one with the id, if the event has one, or the oldest.
func (c *conversation) find(id string, begins bool) int {
	i := slices.IndexFunc(c.responses, func(r *response) bool { return begins && r.id == "" || !begins && id != "" && r.id == id })
	if i < 0 && !begins && len(c.responses) > 0 {
		return 0
	}
	return i
}

// Part implements attempt.Conversation.
func (c *conversation) Part(text []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.responses) > 0 {
		c.responses[0].watcher.Long(text)
	}
}

// end charges the responses that the end of the WebSocket has cut. It may be called on nil.
func (c *conversation) end() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.responses {
		r.settle(false, true)
	}
	c.responses = nil
}

// settle charges a response, which has failed, or was cut.
func (r *response) settle(failed, cut bool) {
	in, o, a := &r.intent, &r.outcome, r.tries.last()
	o.end(in, cut)
	if f := r.watcher.Failure; !o.tokens.Known() && (f != nil || failed) {
		a.class, o.status = verdict.Failed, http.StatusInternalServerError
		if f != nil && verdict.Judge(verdict.Reply{Status: f.Status, Body: f.Body}) == verdict.ClientError {
			a.class, o.status = verdict.ClientError, f.Status
		}
	}
	r.countTokens(in, &r.tries, o, a.target, string(a.class))
	r.tries.turn.lists = r.waiting
	r.bill.settle(r.balancer, in, &r.tries, o)
}

// read reads an event of the client's in a session.
func (in *intent) read(text []byte) {
	in.Body, in.Whole, in.PromptLength = openaiapi.ParseJSON(text, nil), true, int64(len(text))
	if !in.Body.Clear {
		in.Clarity = openaiapi.Unclear
	}
	if in.Body.HasModel {
		in.Model = in.Body.Model
	}
}
