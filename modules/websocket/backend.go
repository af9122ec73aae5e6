package websocket

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/gobwas/ws"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// readBuffer is the size of a read from a backend. Most messages are shorter,
// and several that arrive together are read at once.
const readBuffer = 4 << 10

// Backend is a backend's end of a WebSocket.
type Backend struct {
	conn io.ReadWriteCloser
	in   reader
	out  writer
	beat heartbeat
	// first has the pieces of the first message that were read before the relay
	// began. The relay passes them on first.
	first []piece
}

// NewBackend returns the backend's end of the WebSocket that it has opened.
// conn is the body of its 101.
func NewBackend(conn io.ReadWriteCloser) *Backend {
	b := &Backend{conn: conn, in: reader{state: ws.StateClientSide},
		out: writer{to: conn, masked: true, lock: make(lock, 1)}}
	b.in.Reader, b.in.source.begun = conn, time.Now()
	b.in.from = bufio.NewReaderSize(&b.in.source, readBuffer)
	return b
}

// Close closes the connection.
func (b *Backend) Close() error { return b.conn.Close() }

// Errors of a backend's end of a WebSocket.
var (
	errNoClose     = &verdict.CauseError{Word: "no_close_frame", Text: "the WebSocket ended without a close frame"}
	errClosedFirst = &verdict.CauseError{Word: "closed", Text: "the backend closed the WebSocket before it answered"}
	errNoAnswer    = &verdict.CauseError{Word: "malformed", Text: "the backend sent only control frames"}
	errUnreadable  = &verdict.CauseError{Word: "malformed", Text: "a message of the backend's is compressed, or not made of frames"}
	errNoPong      = &verdict.CauseError{Word: "no_pong", Text: "the backend answered no ping"}
)

// Ask implements seam.WebSocketBackend.
func (b *Backend) Ask(pieces ...[]byte) (failure *http.Response, err error) {
	answer, err := b.ask(pieces...)
	if err != nil {
		return nil, err
	}
	return errorReply(answer), nil
}

// ask sends the client's first message, and returns the first message of the
// backend, or nil if that is longer than an event may be. Pings that arrive
// first are answered.
func (b *Backend) ask(pieces ...[]byte) (answer []byte, err error) {
	if err = b.out.pass(pieces...); err != nil {
		return nil, err
	}
	length := 0
	for controls := 0; ; {
		if err = b.in.await(); err != nil {
			return nil, unreadable(err)
		}
		if b.in.isControl() {
			if controls++; controls > maxControls {
				return nil, errNoAnswer
			}
			if err = b.control(); err != nil {
				return nil, err
			}
			continue
		}
		if b.in.frames > maxFrames {
			return nil, errUnreadable
		}
		p, err := b.in.read(make([]byte, b.in.size()))
		if err != nil {
			return nil, closedIfEnd(err)
		}
		b.first, length = append(b.first, p), length+len(p.text)
		switch {
		case length > sse.MaxEvent:
			return nil, nil
		case p.last:
			return b.firstText(), nil
		}
	}
}

// firstText returns the first message, which is complete.
func (b *Backend) firstText() (text []byte) {
	for _, p := range b.first {
		text = append(text, p.text...)
	}
	return text
}

// control handles a control frame instead of the client.
func (b *Backend) control() error {
	var room [ws.MaxControlFramePayloadSize]byte
	p, err := b.in.read(room[:])
	switch {
	case err != nil:
		return closedIfEnd(err)
	case p.op == ws.OpPing:
		return b.out.control(ws.OpPong, p.text)
	case p.op == ws.OpClose:
		code, _ := ws.ParseCloseFrameData(p.text)
		return closedFirst(code)
	}
	return nil
}

// closedFirst returns the error for a backend that closes the WebSocket with
// this code before it answers.
func closedFirst(code ws.StatusCode) error {
	switch code {
	case ws.StatusMessageTooBig:
		return apierror.Invalid(http.StatusRequestEntityTooLarge, "request_too_large", "The message is larger than the backend allows.")
	case ws.StatusProtocolError, ws.StatusUnsupportedData, ws.StatusInvalidFramePayloadData:
		return apierror.Invalid(http.StatusBadRequest, "invalid_body", "The backend does not accept the message.")
	}
	return errClosedFirst
}

// unreadable returns the error of a backend's end that cannot be read.
func unreadable(err error) error {
	if errors.As(err, new(*Close)) {
		return errUnreadable
	}
	return closedIfEnd(err)
}

// closedIfEnd returns errNoClose if err is the end of the connection, else err.
func closedIfEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errNoClose
	}
	return err
}
