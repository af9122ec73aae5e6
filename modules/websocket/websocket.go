// Package websocket relays the messages of WebSockets between clients and
// backends, and reads them on the way.
//
// # The idea
//
// A WebSocket has two ends, a [Client] and a [Backend], which do not know of
// each other. Both are connections that net/http has handed over: the client's
// by hijacking, the backend's as the body of its 101. A library,
// github.com/gobwas/ws, reads and writes the frames; this package decides which
// messages pass. [Client.Relay] connects the two ends until one of them is
// over.
//
// A client's end may be open before there is a backend ([Accept]). It then
// collects the client's messages, answers its pings, and notices when the
// client leaves. The first message is a request like any other: it is sent to
// one backend after another ([Backend.Ask]) until one answers it. An error goes
// to the client as an event ([Client.Answer]).
//
// # The parts
//
//   - A reader turns the frames of one side into pieces. A piece is a control
//     frame, or a part of a message. A writer writes only whole frames, so that
//     a ping or one of the balancer's own events always fits between two
//     frames.
//   - A filter replaces the keys in a backend's messages. It holds back only
//     text that may be the beginning of a key.
//   - A Conversation finds the responses in the messages, so that each is
//     counted and billed. [seam.WebSocketRules], which the caller of the
//     package implements, decide whether a response may begin, and can close
//     the WebSocket.
//   - A heartbeat pings each side that is silent, and closes it if it stays so.
//   - A [Budget] limits the memory of all WebSockets together.
//
// # The promises
//
//   - Messages arrive complete and in order. A frame of up to 64 KiB stays one
//     frame; a longer one arrives as several.
//   - No message of a backend shows a key, however it is cut into frames.
//   - Memory is limited. A message that is held has a maximum size, a maximum
//     number of frames and a time in which it must be complete. The messages
//     and events that wait are limited, too. An idle WebSocket has two
//     goroutines, including the handler's, and only the buffers of its two
//     readers.
//   - Codes and reasons of close frames reach the other side, and a close frame
//     without a code stays one. A side may take [Grace] to end after the other
//     has ended.
//   - A panic in any goroutine closes both connections and is logged. It never
//     ends the process.
package websocket

import (
	"context"
	"net/http"
	"os"
	"time"

	"github.com/gobwas/ws"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// Grace is how long a side of a WebSocket may stay open after the other has
// ended. Tests shorten it.
var Grace = 10 * time.Second

// lingering is how long a client may take to read the reason why the balancer
// closes its WebSocket.
const lingering = 2 * time.Second

const (
	// maxFrames is how many frames a held message may have. Empty frames need
	// no memory, but time.
	maxFrames = 1 << 16
	// maxControls is how many control frames a side may send while its next
	// message is awaited.
	maxControls = 1 << 12
	// maxMessage is the maximum length of a held message from a client, except
	// the first one. It also limits the messages that wait for a backend
	// together. OpenAI accepts 15 MiB of audio in one message.
	maxMessage = 16 << 20
	// maxPending is how many of the balancer's own events may wait for the end
	// of a backend's message, and maxPendingBytes limits their bytes.
	maxPending      = 64
	maxPendingBytes = 256 << 10
)

// Options are the options of a WebSocket.
type Options struct {
	seam.WebSocketOptions
	// Memory limits the memory that all WebSockets hold together. Default:
	// [Memory].
	Memory *Budget
}

func (o Options) withDefaults() Options {
	if o.Closing == nil {
		o.Closing = context.Background()
	}
	if o.Memory == nil {
		o.Memory = Memory()
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	return o
}

// recovered handles a panic in a goroutine of a WebSocket: it logs an error,
// and closes the connections. It is deferred.
func (o Options) recovered(abort func()) {
	if cause := recover(); cause != nil {
		o.Log.Error("panic in a WebSocket", zap.Any("error", cause), zap.Stack("stack"))
		abort()
	}
}

// Close is the code and the reason of a close frame. As an error, it describes
// how a side broke the protocol.
type Close struct {
	Code   ws.StatusCode
	Reason string
}

// policy returns the Close for a client that may not continue.
func policy(reason string) *Close { return &Close{ws.StatusPolicyViolation, reason} }

// Error implements error.
func (c *Close) Error() string { return c.Reason }

// tryLater is the close code for a lack of memory, from the registry of RFC
// 6455 section 11.7.
const tryLater ws.StatusCode = 1013

// Errors of the frames and messages of a side.
var (
	errFrames      = &Close{ws.StatusProtocolError, "a frame is malformed"}
	errCompressed  = &Close{ws.StatusUnsupportedData, "a message is compressed, which was not agreed upon"}
	errBinary      = &Close{ws.StatusUnsupportedData, "a message is not text"}
	errNotUTF8     = &Close{ws.StatusInvalidFramePayloadData, "a message is not UTF-8"}
	errTooLong     = &Close{ws.StatusMessageTooBig, "a message is too long"}
	errTooSlow     = &Close{ws.StatusPolicyViolation, "a message did not arrive in time"}
	errManyFrames  = &Close{ws.StatusPolicyViolation, "a message has too many frames"}
	errManyPings   = &Close{ws.StatusPolicyViolation, "too many control frames arrived without a message"}
	errManyWaiting = &Close{ws.StatusPolicyViolation, "too many messages wait for an answer"}
	errNoMemory    = &Close{tryLater, "too many messages are being received"}
	goingAway      = &Close{Code: ws.StatusGoingAway}
)

// forClient returns the error for a client whose message had this fault.
func (c *Close) forClient(most int) error {
	switch c {
	case errTooLong:
		return &http.MaxBytesError{Limit: int64(most)}
	case errTooSlow:
		return os.ErrDeadlineExceeded
	case errNoMemory:
		return apierror.NoMemory
	}
	return c
}
