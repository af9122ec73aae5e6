package websocket

import (
	"net/http"

	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// Rules decide which messages pass in a session. No two methods are called at
// the same time, except Unasked.
type Rules interface {
	// Create decides about a client's message that asks for a response. It
	// returns the response, or a refusal. If instead is not empty, the backend
	// gets it instead of the message.
	Create(text []byte) (r Response, instead [][]byte, refusal *Refusal)
	// Refuse returns a refusal if another message, of this type, must not pass,
	// or nil. The type is empty if it is not clear.
	Refuse(kind string, text []byte) *Refusal
	// Unasked returns a response that the backend has begun on its own.
	Unasked() Response
}

// Refusal is the reason why a message does not pass.
type Refusal struct {
	// Reply is the reply that a request over HTTP would get. The client gets it
	// as an event.
	Reply *http.Response
	// Close closes the WebSocket after the event. It is nil if the client may
	// continue.
	Close *Close
}

// Response is a response in a session.
type Response interface {
	// Watcher returns the reader of the backend's events while the response is
	// open.
	Watcher() *sse.Watcher
	// Settle ends the response. failed reports whether it has failed, and cut
	// whether it was cut.
	Settle(failed, cut bool)
}
