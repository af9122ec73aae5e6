package seam

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// WebSocketNamespace is the namespace of Caddy modules that implement
// WebSocketModule.
const WebSocketNamespace = "http.openai_lb.websockets"

// WebSocketModule relays the messages of WebSockets between clients and
// backends, and reads them on the way. Without such a module, the balancer
// refuses every handshake, so that clients use HTTP.
//
// The core keeps the handshake: it chooses the backend, and fails over to
// another one. The module has the open connections.
type WebSocketModule interface {
	caddy.Module
	// Accept opens the WebSocket of a client before there is a backend, and
	// answers the client's handshake. longest is the maximum length of the
	// first message, in bytes.
	Accept(w http.ResponseWriter, r *http.Request, longest int64, o WebSocketOptions) (WebSocket, error)
	// Open opens the WebSocket of a client whose handshake a backend has
	// answered. The header of w is that answer's.
	Open(w http.ResponseWriter, o WebSocketOptions) (WebSocket, error)
}

// WebSocketOptions apply to all WebSockets of a pool.
type WebSocketOptions struct {
	// Closing is done when all WebSockets must close, because their config is
	// replaced or the process stops.
	Closing context.Context
	// Timeout is how long a WebSocket may be open. 0 means no limit.
	Timeout time.Duration
	Log     *zap.Logger
}

// WebSocket is the WebSocket of a client.
//
// A WebSocket that was accepted before there is a backend collects the client's
// messages. Each message that Next returns is a request, which ends with Answer
// or with Relay.
type WebSocket interface {
	// WithContext returns a context that ends with ctx, or when the client
	// leaves.
	WithContext(ctx context.Context) context.Context
	// Next returns the text of the client's next message. An error is meant
	// for the client; Answer sends it.
	Next() (text []byte, err error)
	// Asked returns the text of the message that Next has returned, until the
	// message is answered.
	Asked() []byte
	// Answer sends the client an error reply, as an event, as the answer to the
	// message that Next has returned.
	Answer(res *http.Response)
	// Again waits for the client's next message after an answer, and reports
	// whether there is one. After Relay, there is none.
	Again() bool
	// Backend returns the backend's end of a WebSocket that the backend has
	// opened. conn is the body of its 101.
	Backend(conn io.ReadWriteCloser) WebSocketBackend
	// Relay passes messages between the client and a backend until the
	// WebSocket is over.
	Relay(backend WebSocketBackend, session WebSocketSession) WebSocketEnd
	// Abort closes the connections at once.
	Abort()
	// Close closes an accepted WebSocket when no further message is expected.
	Close()
}

// WebSocketBackend is a backend's end of a WebSocket.
type WebSocketBackend interface {
	// Ask sends the client's first message, in these pieces, and waits for the
	// first message of the backend. If that is an error, failure is the reply
	// that the backend would have sent over HTTP. It is nil for any other
	// message, which Relay passes on later. Closing the connection interrupts
	// Ask.
	Ask(pieces ...[]byte) (failure *http.Response, err error)
}

// WebSocketSession describes the use of a WebSocket with both ends.
type WebSocketSession struct {
	// Secrets are removed from the backend's messages.
	Secrets keys.Secrets
	// Rules decide about responses. It is nil if messages are read only for
	// secrets.
	Rules WebSocketRules
	// First is the response that the client's first message asked for. It is
	// nil if the session did not begin with such a message.
	First WebSocketResponse
	// Holds reports whether each client message is held until the rules let it
	// pass.
	Holds bool
}

// WebSocketEnd describes how a WebSocket ended.
type WebSocketEnd struct {
	// Broken is the reason why the backend ended the WebSocket while the client
	// was connected. It is nil otherwise, and after a close frame.
	Broken error
	// Begun reports whether the backend had sent data.
	Begun bool
}

// WebSocketRules decide which messages pass in a session. No two methods are
// called at the same time, except Unasked.
type WebSocketRules interface {
	// Create decides about a client's message that asks for a response. It
	// returns the response, or a refusal. If instead is not empty, the backend
	// gets it instead of the message.
	Create(text []byte) (r WebSocketResponse, instead [][]byte, refusal *WebSocketRefusal)
	// Refuse returns a refusal if another message, of this type, must not pass,
	// or nil. The type is empty if it is not clear.
	Refuse(kind string, text []byte) *WebSocketRefusal
	// Unasked returns a response that the backend has begun on its own.
	Unasked() WebSocketResponse
}

// WebSocketRefusal is the reason why a message does not pass.
type WebSocketRefusal struct {
	// Reply is the reply that a request over HTTP would get. The client gets it
	// as an event.
	Reply *http.Response
	// Close is the reason with which the WebSocket is closed after the event.
	// It is empty if the client may continue.
	Close string
}

// WebSocketResponse is a response in a session.
type WebSocketResponse interface {
	// Watcher returns the reader of the backend's events while the response is
	// open.
	Watcher() *sse.Watcher
	// Settle ends the response. failed reports whether it has failed, and cut
	// whether it was cut.
	Settle(failed, cut bool)
}

// LoadWebSockets returns the first module that relays WebSockets, or nil if
// there is none.
func LoadWebSockets(ctx caddy.Context) (WebSocketModule, error) {
	modules := caddy.GetModules(WebSocketNamespace)
	if len(modules) == 0 {
		return nil, nil
	}
	module, err := ctx.LoadModuleByID(string(modules[0].ID), nil)
	if err != nil {
		return nil, err
	}
	return module.(WebSocketModule), nil
}
