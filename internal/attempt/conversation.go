package attempt

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// Conversation follows the messages of a WebSocket and finds the responses in them.
type Conversation struct {
	rules    Rules
	realtime bool

	mu      sync.Mutex
	open    []openResponse // that are not over, the oldest first
	refused time.Time      // when the client was last told that its audio is refused
}

// Rules decide what passes in a conversation. No two of their methods are called at a time, except Unasked.
type Rules interface {
	// Create decides on a message of the client's that asks for a response. If instead is not empty, the backend gets that. If there
	// is a refusal, it gets nothing.
	Create(text []byte) (r Response, instead [][]byte, refusal *http.Response)
	// Refuse returns why another message of this type must not pass, or nil. The type is empty if it is not clear.
	Refuse(kind string, text []byte) *http.Response
	// Unasked returns a response that the backend has begun by itself.
	Unasked() Response
}

// Response is one in a conversation.
type Response interface {
	// Watcher reads the events of the backend's while the response is open.
	Watcher() *sse.Watcher
	// Settle ends it. It has failed, was cut, or neither.
	Settle(failed, cut bool)
}

type openResponse struct {
	Response
	id            string // empty: it has not begun
	event, stream string // the event_id and stream_id of the message that asked for it, if it had them
	doubtful      bool   // the client has sent another message since, which the next error may be about
	failing       bool   // an error came that may be about this response
}

// begun reports whether a part of the response has come, so that it is charged.
func (r *openResponse) begun() bool { return r.id != "" || r.Watcher().Opening != sse.Preamble }

// settleFailing settles the failing responses of a stream: the client asks for another one, so they are over. It returns how many
// responses are still open.
func (c *Conversation) settleFailing(stream string) (open int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open = slices.DeleteFunc(c.open, func(r openResponse) bool {
		over := r.failing && r.stream == stream
		if over {
			r.Settle(false, true)
		}
		return over
	})
	return len(c.open)
}

// maxOpen is how many responses may be open at a time.
const maxOpen = 64

func tooManyOpen() *http.Response {
	const text = `{"error":{"message":"Too many responses are open in this WebSocket. Try again when one is over.","type":"requests","param":null,"code":"rate_limit_exceeded"}}`
	return &http.Response{StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"1"}}, Body: io.NopCloser(strings.NewReader(text))}
}

// doubt records that an error may be about a message of the client's that asks for no response.
func (c *Conversation) doubt(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.open {
		if r := &c.open[i]; !c.realtime || id != "" && r.event == id {
			r.doubtful = true
		}
	}
}

// failed reads an error from the backend. The error may be about any message of the client, so it ends only a response that has not
// begun: the one that it names, or the newest.
func (c *Conversation) failed(e sse.Event) {
	about := openaiapi.ParseErrorEvent(e.Data)
	i := c.newest(func(r *openResponse) bool { return !r.begun() && (!c.realtime || !r.doubtful) && c.isAbout(about, r) })
	if i < 0 && !c.realtime {
		i = c.newest(func(r *openResponse) bool { return c.isAbout(about, r) })
	}
	switch {
	case i < 0:
	case c.open[i].doubtful || c.open[i].begun():
		c.open[i].failing = true
	default:
		over := c.open[i].Response
		if !c.realtime { // in which it costs not even a request
			over.Watcher().Take(e)
		}
		c.open = slices.Delete(c.open, i, i+1)
		over.Settle(true, false)
	}
}

// isAbout reports whether an error may be about a response.
func (c *Conversation) isAbout(e openaiapi.ErrorEvent, r *openResponse) bool {
	if !c.realtime {
		return e.Stream == "" || e.Stream == r.stream
	}
	return e.About == r.event && (e.About != "" || e.Active)
}

// newest returns the index of the newest response for which is returns true, or -1.
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

// Audio begins the types of messages with audio, after which a session may begin a response by itself.
const Audio = "input_audio_buffer."

// sent decides whether a message of the client's passes. If instead is not empty, the backend gets that. If answer is not empty,
// the client gets that event.
func (c *Conversation) sent(text []byte) (passes bool, instead [][]byte, answer []byte) {
	e := openaiapi.ParseClientEvent(text)
	var r Response
	var refusal *http.Response
	switch {
	case !e.Clear:
		refusal = c.rules.Refuse("", text)
	case e.Type == creates:
		if c.settleFailing(e.Stream) >= maxOpen {
			refusal = tooManyOpen()
		} else if r, instead, refusal = c.rules.Create(text); refusal == nil {
			c.mu.Lock()
			c.open = append(c.open, openResponse{Response: r, event: e.ID, stream: e.Stream})
			c.mu.Unlock()
		}
	default:
		if refusal = c.rules.Refuse(e.Type, text); refusal == nil {
			c.doubt(e.ID)
		}
	}
	switch {
	case refusal == nil:
		return true, instead, nil
	case strings.HasPrefix(e.Type, Audio) && time.Since(c.refused) < time.Second: // it was told
		return false, nil, nil
	}
	c.refused = time.Now()
	body, _ := io.ReadAll(refusal.Body) // which is in memory
	if c.realtime {
		return false, nil, realtimeError(refusal.StatusCode, body, e.Type == creates, e.ID)
	}
	return false, nil, errorEventOf(refusal.StatusCode, refusal.Header, body, e.Stream)
}

// transcribed is the type of the event with the tokens of the model that transcribed the client's audio.
const transcribed = "conversation.item.input_audio_transcription.completed"

// ends reports whether a response is over with an event of this type.
func (c *Conversation) ends(kind string) bool {
	switch kind {
	case "response.done", transcribed:
		return c.realtime
	case "response.completed", "response.incomplete", "response.failed":
		return !c.realtime
	}
	return false
}

// received reads a message of the backend's.
func (c *Conversation) received(e sse.Event) {
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
	}
	i := c.find(id, begins)
	switch {
	case kind == transcribed && !openaiapi.CountsTokens(e.Data): // but seconds
		return
	case kind == transcribed, i < 0 && (begins || ends):
		i = len(c.open)
		c.open = append(c.open, openResponse{Response: c.rules.Unasked()})
	case i < 0:
		return
	}
	r := &c.open[i]
	if begins {
		r.id, r.doubtful, r.failing = id, false, false
	}
	if r.Watcher().Take(e); ends {
		over := r.Response
		c.open = slices.Delete(c.open, i, i+1)
		over.Settle(status == "failed", false)
	}
}

// find returns the index of the response that an event is about, or -1. With begins, it is the oldest that has not begun. Otherwise it
// is the one with the id, or the oldest.
func (c *Conversation) find(id string, begins bool) int {
	i := slices.IndexFunc(c.open, func(r openResponse) bool { return begins && r.id == "" || !begins && id != "" && r.id == id })
	if i < 0 && !begins && len(c.open) > 0 {
		return 0
	}
	return i
}

// part reads a part of a message of the backend's that is too long to be kept.
func (c *Conversation) part(text []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.open) > 0 {
		c.open[0].Watcher().Long(text)
	}
}

// end ends the responses that are still open.
func (c *Conversation) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.open {
		r.Settle(false, true)
	}
	c.open = nil
}
