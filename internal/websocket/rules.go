package websocket

import (
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// Rules decide what passes in a session. No two of their methods are called at
// a time, except Unasked.
type Rules interface {
	// Create decides on a message of the client's that asks for a response: it
	// begins one, or it refuses the message. If instead is not empty, the
	// backend gets that in place of the message.
	Create(text []byte) (r Response, instead [][]byte, refusal *Refusal)
	// Refuse returns why another message of this type must not pass, or nil.
	// The type is empty if it is not clear.
	Refuse(kind string, text []byte) *Refusal
	// Unasked returns a response that the backend has begun by itself.
	Unasked() Response
}

// Refusal is why a message does not pass.
type Refusal struct {
	// Reply is what a request over HTTP would get. The client gets it as an
	// event.
	Reply *http.Response
	// Close closes the WebSocket after the event. It is nil if the client may
	// go on.
	Close *Close
}

// Response is one in a session.
type Response interface {
	// Watcher reads the events of the backend's while the response is open.
	Watcher() *sse.Watcher
	// Settle ends it. It has failed, was cut, or neither.
	Settle(failed, cut bool)
}
