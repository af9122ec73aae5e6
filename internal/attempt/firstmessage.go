package attempt

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// IsAccepted reports whether the client's side was opened before the backend's.
func (s *Socket) IsAccepted() bool { return s != nil && s.entrance != nil }

// refusesHandshake reports whether the reply answers the handshake of a WebSocket, and not its first message.
func (r *Reply) refusesHandshake() bool {
	return r.sent != nil && r.sent.handshakes() && !r.sent.delivering
}

// openSocket sends the client's first message to the backend, and waits for the answer. An error is a reply of its own, as it would
// be over HTTP. Anything else stays what the WebSocket begins with.
func (s *Sender) openSocket(r *Reply) {
	t, original := r.sent, r.Response
	conn := original.Body.(io.ReadWriteCloser)
	limit := time.Duration(s.StreamFirstEventTimeout)
	if t.Asks.Slow {
		limit = max(limit, slowTimeout)
	}
	t.trip.timeout.start(limit, ErrNoReply)
	stop := context.AfterFunc(&t.trip, func() { conn.Close() })
	t.delivering = true
	held, first, err := exchangeFirst(conn, t.firstFrames())
	stop()
	if !t.trip.timeout.stop() {
		err = t.trip.timeout.why()
	} else if t.trip.Err() != nil {
		err = context.Cause(&t.trip)
	}
	var fault apierror.Error
	if err != nil && !errors.As(err, &fault) {
		conn.Close()
		if errors.Is(err, io.EOF) {
			err = errNoClose
		}
		r.breakOff(verdict.Own(err))
		if errors.Is(err, ErrNoReply) {
			r.Class = verdict.Timeout
		}
		return
	}
	failure := errorReply(first)
	if err != nil {
		failure = fault.Response(t.Incoming)
	}
	if failure == nil {
		original.Body = &begun{conn, held}
		return
	}
	conn.Close()
	failure.Request = original.Request
	r.Response, r.Status = failure, failure.StatusCode
	r.judge()
}

// firstFrames are the frames of the client's first message, as the backend gets it.
func (t *Request) firstFrames() []byte {
	m := t.Socket.first
	pieces := t.Change.Request.With(m.text, t.Change.Changes)
	if len(pieces) == 1 && len(m.raw) > 0 {
		return m.raw
	}
	return frame(opcodeText, true, pieces...)
}

// exchangeFirst sends a message, and reads until one has come. It returns all that came, and the first message in it.
func exchangeFirst(conn io.ReadWriter, message []byte) (held, first []byte, err error) {
	if _, err = conn.Write(message); err != nil {
		return nil, nil, err
	}
	l, pings := listener{}, pinged{conn: conn}
	var text []byte
	came := false
	buf := make([]byte, firstRead)
	for !came {
		n, err := conn.Read(buf)
		others := pings.take(buf[:n])
		l.take(others, func(e sse.Event) {
			if !came {
				came, text = true, bytes.Clone(e.Data)
			}
		}, func([]byte) {})
		held = append(held, others...)
		switch {
		case came:
		case l.closing && (err != nil || l.between() || l.opcode() != opcodeClose):
			return nil, nil, closedFirst(l.code)
		case l.unreadable:
			return nil, nil, errUnreadable
		case err != nil:
			return nil, nil, err
		case l.long: // no error is that long
			return append(held, pings.rest()...), nil, nil
		}
	}
	return append(held, pings.rest()...), text, nil
}

// pinged answers the pings of a backend.
type pinged struct {
	frames
	conn io.Writer
	ping message // that is not complete
}

// take answers the pings in the next bytes, and returns the others, except those of an incomplete head.
func (p *pinged) take(came []byte) (others []byte) {
	for len(came) > 0 {
		n, begins := p.next(came)
		piece := came[:n]
		came = came[n:]
		if begins {
			piece = p.head[:p.headLength()]
		}
		switch {
		case p.n > 0:
		case p.opcode() != opcodePing || p.used+int(min(p.left, maxPing+1)) > maxPing: // or no valid one
			others = append(others, piece...)
		default:
			if p.ping.raw = append(p.ping.raw, piece...); !begins {
				p.ping.text = p.unmask(p.ping.text, piece)
			}
			if p.between() {
				_, _ = p.conn.Write(frame(opcodePing+1, true, p.ping.text)) // if that fails, so does the next read
				p.ping = message{}
			}
		}
	}
	return others
}

// rest returns the bytes that are neither answered nor returned.
func (p *pinged) rest() []byte { return append(p.ping.raw, p.head[:p.n]...) }

// closedFirst returns what it means that a backend closes the WebSocket with this code before it answers.
func closedFirst(code uint16) error {
	switch code {
	case closeTooBig:
		return apierror.Invalid(http.StatusRequestEntityTooLarge, "request_too_large", "The message is larger than the backend allows.")
	case closeProtocol, closeUnsupported, closeNotUTF8:
		return apierror.Invalid(http.StatusBadRequest, "invalid_body", "The backend does not accept the message.")
	}
	return errClosedFirst
}

var errClosedFirst = &verdict.CauseError{Word: "closed", Text: "the backend closed the WebSocket before it answered"}

// errorReply returns the reply that an error event stands for, or nil if the event is something else. The event may name a status and
// headers.
func errorReply(event []byte) *http.Response {
	failure := sse.FailureIn(event)
	if failure == nil {
		return nil
	}
	var names struct {
		Status     int            `json:"status"`
		StatusCode int            `json:"status_code"`
		Headers    map[string]any `json:"headers"`
		Error      struct {
			Headers map[string]any `json:"headers"`
		} `json:"error"`
	}
	d := json.NewDecoder(bytes.NewReader(event))
	d.UseNumber()        // and no float, which has another spelling
	_ = d.Decode(&names) // what can be read
	status := failure.Status
	if named := max(names.Status, names.StatusCode); 400 <= named && named <= 599 {
		status = named
	}
	header := http.Header{"Content-Type": {"application/json"}}
	for _, fields := range []map[string]any{names.Error.Headers, names.Headers} {
		for name, value := range fields {
			if lower := strings.ToLower(name); tellsClient(lower) || strings.HasPrefix(lower, "x-ms-") {
				header.Set(name, fmt.Sprint(value))
			}
		}
	}
	return &http.Response{
		Status: strconv.Itoa(status) + " " + http.StatusText(status), StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: header, Body: io.NopCloser(bytes.NewReader(failure.Body)), ContentLength: int64(len(failure.Body)),
	}
}

// begun is the backend's side of a WebSocket of which some was read.
type begun struct {
	io.ReadWriteCloser
	held []byte
}

func (b *begun) Read(p []byte) (int, error) {
	if len(b.held) == 0 {
		return b.ReadWriteCloser.Read(p)
	}
	n := copy(p, b.held)
	if b.held = b.held[n:]; len(b.held) == 0 {
		b.held = nil
	}
	return n, nil
}

// CloseWrite passes on that the client has ended.
func (b *begun) CloseWrite() error { return closeWrite(b.ReadWriteCloser) }
