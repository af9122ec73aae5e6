package websocket

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// Conversation follows the messages of a session and finds the responses in
// them. A response opens with the client's message that asks for it, or with
// the backend's event that begins it. It ends with the event that ends it.
//
// The event that begins a response does not name the client's message. So it is
// assigned to the oldest response that has not begun, and later events by the
// response's id. An error may be about any message of the client. It ends only
// a response that has not begun; another response is marked as failing, and is
// settled when the client asks for a new one.
type Conversation struct {
	rules    seam.WebSocketRules
	realtime bool

	message gathered // the backend's, which is being heard

	mu      sync.Mutex     // guards the fields below
	open    []openResponse // the oldest first
	refused time.Time      // when the client was last told that its audio is refused
}

type openResponse struct {
	seam.WebSocketResponse
	id            string // is empty if it has not begun
	event, stream string // are the event_id and stream_id of the message that asked for it, if it had them
	doubtful      bool   // the client has sent another message since, which the next error may be about
	failing       bool   // an error came that may be about this response
}

// begun reports whether a part of the response has arrived, so that it is
// charged.
func (r *openResponse) begun() bool { return r.id != "" || r.Watcher().Opening != sse.Preamble }

const (
	// maxOpen is how many responses may be open at a time.
	maxOpen = 64
	// maxID limits the ids of the client and of the backend that are kept while
	// a response is open.
	maxID = 512
)

// newConversation starts a conversation. first is the response that the
// client's first message asked for in this lane. It is nil in a realtime
// session.
func newConversation(rules seam.WebSocketRules, first seam.WebSocketResponse, lane string) *Conversation {
	c := &Conversation{rules: rules, realtime: first == nil}
	if first != nil {
		c.open = []openResponse{{WebSocketResponse: first, stream: lane}}
	}
	return c
}

// settleFailing settles the failing responses of a stream, which are over
// because the client asks for another response. It returns how many responses
// are still open.
func (c *Conversation) settleFailing(stream string) (open int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open = slices.DeleteFunc(c.open, func(r openResponse) bool {
		ended := r.failing && r.stream == stream
		if ended {
			r.Settle(false, true)
		}
		return ended
	})
	return len(c.open)
}

func tooManyOpen() *seam.WebSocketRefusal {
	const text = `{"error":{"message":"Too many responses are open in this WebSocket. Try again when one is over.","type":"requests","param":null,"code":"rate_limit_exceeded"}}`
	return &seam.WebSocketRefusal{Reply: &http.Response{
		StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"1"}},
		Body: io.NopCloser(strings.NewReader(text)),
	}}
}

// doubt records that the next error may be about a message of the client that
// asks for no response.
func (c *Conversation) doubt(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.open {
		if r := &c.open[i]; !c.realtime || id != "" && r.event == id {
			r.doubtful = true
		}
	}
}

// failed handles an error from the backend. The error may be about any message
// of the client, so it ends only a response that has not begun. This is the
// response that the error names, or the newest.
func (c *Conversation) failed(e sse.Event) {
	about := openaiapi.ParseErrorEvent(e.Data)
	i := c.newest(func(r *openResponse) bool {
		return !r.begun() && (!c.realtime || !r.doubtful) && c.isAbout(about, r)
	})
	if i < 0 && !c.realtime {
		i = c.newest(func(r *openResponse) bool { return c.isAbout(about, r) })
	}
	switch {
	case i < 0:
	case c.open[i].doubtful || c.open[i].begun():
		c.open[i].failing = true
	default:
		response := c.open[i].WebSocketResponse
		if !c.realtime { // in which it costs not even a request
			response.Watcher().Take(e)
		}
		c.open = slices.Delete(c.open, i, i+1)
		response.Settle(true, false)
	}
}

// isAbout reports whether an error may be about a response.
func (c *Conversation) isAbout(e openaiapi.ErrorEvent, r *openResponse) bool {
	if !c.realtime {
		return e.Stream == "" || e.Stream == r.stream
	}
	return e.About == r.event && (e.About != "" || e.Active)
}

// newest returns the index of the newest response for which is returns true, or
// -1.
func (c *Conversation) newest(is func(*openResponse) bool) int {
	for i := range slices.Backward(c.open) {
		if is(&c.open[i]) {
			return i
		}
	}
	return -1
}

// creates is the type of the message that asks for a response.
const creates = "response.create"

// decision is the fate of a message of the client.
type decision struct {
	passes  bool
	instead [][]byte // is what the backend gets in its place, if it is not empty
	answer  []byte   // is an event for the client, if it is not empty
	close   *Close   // closes the WebSocket, if it is not nil
}

// sent decides about a message of the client.
func (c *Conversation) sent(text []byte) decision {
	e := openaiapi.ParseClientEvent(text)
	var r seam.WebSocketResponse
	var instead [][]byte
	var refusal *seam.WebSocketRefusal
	switch {
	case !e.Clear, len(e.ID) > maxID, len(e.Stream) > maxID:
		e.ID, e.Stream = "", ""
		refusal = c.rules.Refuse("", text)
	case e.Type == creates:
		if c.settleFailing(e.Stream) >= maxOpen {
			refusal = tooManyOpen()
		} else if r, instead, refusal = c.rules.Create(text); refusal == nil {
			c.mu.Lock()
			c.open = append(c.open, openResponse{WebSocketResponse: r, event: e.ID, stream: e.Stream})
			c.mu.Unlock()
		}
	default:
		if refusal = c.rules.Refuse(e.Type, text); refusal == nil {
			c.doubt(e.ID)
		}
	}
	if refusal == nil {
		return decision{passes: true, instead: instead}
	}
	return c.refuse(refusal, &e)
}

// refuse returns the decision for a refused message, with an event that says
// why. For refused audio, the client gets at most one event per second.
func (c *Conversation) refuse(refusal *seam.WebSocketRefusal, e *openaiapi.ClientEvent) decision {
	if refusal.Close == "" && strings.HasPrefix(e.Type, openaiapi.AudioMessage) && time.Since(c.refused) < time.Second {
		return decision{}
	}
	c.refused = time.Now()
	var d decision
	if c.realtime {
		d.answer = realtimeEvent(refusal.Reply, e.Type == creates, e.ID)
	} else {
		d.answer = replyEvent(refusal.Reply, e.Stream)
	}
	if refusal.Close != "" {
		d.close = policy(refusal.Close)
	}
	return d
}

// transcribed is the type of the event with the tokens of the model that
// transcribed the client's audio.
const transcribed = "conversation.item.input_audio_transcription.completed"

// ends reports whether an event of this type ends a response.
func (c *Conversation) ends(kind string) bool {
	switch kind {
	case "response.done", transcribed:
		return c.realtime
	case "response.completed", "response.incomplete", "response.failed":
		return !c.realtime
	}
	return false
}

// gathered is a message that arrives in pieces. It keeps up to the length of an
// event.
type gathered struct {
	text []byte
	long bool // it is longer
}

// heard reads the next piece of a message of the backend.
func (c *Conversation) heard(text []byte, last bool) {
	m := &c.message
	switch {
	case last && len(m.text) == 0 && len(text) <= sse.MaxEvent:
		c.received(sse.Event{Data: text})
		return
	case m.long:
		c.part(text)
	case len(m.text)+len(text) > sse.MaxEvent:
		m.long = true
		kept := sse.MaxEvent - len(m.text)
		m.text = append(m.text, text[:kept]...)
		c.part(m.text)
		c.part(text[kept:])
	default:
		m.text = append(m.text, text...)
	}
	if last {
		c.received(sse.Event{Data: m.text, TooLong: m.long})
		*m = gathered{}
	}
}

// received reads a message of the backend.
func (c *Conversation) received(e sse.Event) {
	e.Name = openaiapi.TypeOf(e.Data)
	c.mu.Lock()
	defer c.mu.Unlock()
	var id, status string
	kind := string(e.Kind())
	if kind == "error" {
		c.failed(e)
		return
	}
	begins, ends := kind == "response.created", c.ends(kind)
	if begins || ends {
		id, status = openaiapi.ResponseIn(e.Data)
		id = id[:min(len(id), maxID)]
	}
	i := c.find(id, begins)
	switch {
	case kind == transcribed && !openaiapi.CountsTokens(e.Data): // but seconds
		return
	case kind == transcribed, i < 0 && (begins || ends):
		i = c.unasked()
	case i < 0:
		return
	}
	r := &c.open[i]
	if begins {
		r.id, r.doubtful, r.failing = id, false, false
	}
	if r.Watcher().Take(e); ends {
		response := r.WebSocketResponse
		c.open = slices.Delete(c.open, i, i+1)
		response.Settle(status == "failed", false)
	}
}

// unasked opens a response that the backend has begun on its own, and returns
// its index. If too many are open, it ends the oldest one, because no backend
// runs so many at a time.
func (c *Conversation) unasked() int {
	if len(c.open) >= maxOpen {
		c.open[0].Settle(false, true)
		c.open = slices.Delete(c.open, 0, 1)
	}
	c.open = append(c.open, openResponse{WebSocketResponse: c.rules.Unasked()})
	return len(c.open) - 1
}

// find returns the index of the response that an event is about, or -1. If
// begins is true, it is the oldest response that has not begun. Otherwise it is
// the response with the id, or else the oldest.
func (c *Conversation) find(id string, begins bool) int {
	i := slices.IndexFunc(c.open, func(r openResponse) bool {
		return begins && r.id == "" || !begins && id != "" && r.id == id
	})
	if i < 0 && !begins && len(c.open) > 0 {
		return 0
	}
	return i
}

// part reads a part of a backend's message that is too long to be kept.
func (c *Conversation) part(text []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.open) == 0 {
		return
	}
	if long := c.open[0].Watcher().Long; long != nil {
		long(text)
	}
}

// end settles the responses that are still open.
func (c *Conversation) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.open {
		r.Settle(false, true)
	}
	c.open = nil
}
