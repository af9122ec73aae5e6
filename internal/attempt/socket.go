package attempt

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// Socket is the client's side of a WebSocket whose messages are read. To reverse_proxy it is the ResponseWriter and, once the
// WebSocket is open, the connection: what it copies from the backend passes Write, and what it copies to the backend passes Read.
// Frames pass as they are.
//
// A Socket that was accepted (see [Sender.Accept]) is open before a backend is chosen. What reverse_proxy answers then, if no backend
// opens one, becomes an event.
type Socket struct {
	w      http.ResponseWriter
	r      *http.Request
	conn   net.Conn      // the client's
	source io.Reader     // what it sends
	talk   *Conversation // nil until a backend is chosen
	// secrets must not be in what the backend sends.
	secrets keys.Secrets
	copies  int  // see copyTunnel
	holds   bool // a message of the client's is held until the talk lets it pass

	*entrance // nil unless it was accepted

	in      holder
	ready   []byte // what may go to the backend
	readErr error  // why nothing more comes
	ended   bool   // both sides are closed because of what the client sent

	mu      sync.Mutex // guards the fields below, and writes to the client
	out     listener
	partial []byte   // the beginning of a frame that was kept back
	quotes  bool     // what was read may quote a secret
	pending [][]byte // frames that wait for the end of a message
	closed  bool     // a close frame went to the client
}

// maxMessage is how long a message of a client's may be that is held, except the first one.
const maxMessage = 1 << 20

// maxPending is how many events of our own may wait for the end of a message of the backend's.
const maxPending = 64

var errTooMany = errors.New("too many answers wait for the end of a message")

// NewSocket returns the client's side of a handshake that a backend answers.
func NewSocket(w http.ResponseWriter, r *http.Request) *Socket {
	return &Socket{w: w, r: r, in: holder{most: maxMessage}}
}

// Converse begins a conversation: the WebSocket is open. first is the response that the client's first message asked for, or nil.
// With holds, each message of the client's must pass the rules.
func (s *Socket) Converse(rules Rules, first Response, holds bool) {
	c := &Conversation{rules: rules, realtime: first == nil}
	if first != nil {
		c.open = []openResponse{{Response: first, stream: openaiapi.ParseClientEvent(s.first.text).Stream}}
	}
	s.mu.Lock()
	s.talk, s.holds = c, holds
	s.mu.Unlock()
	if s.entrance != nil {
		s.handOver()
	}
}

// EndConversation ends the responses that the end of the WebSocket has cut. It may be called on nil.
func (s *Socket) EndConversation() {
	if s != nil && s.talk != nil {
		s.talk.end()
	}
}

// Header implements http.ResponseWriter.
func (s *Socket) Header() http.Header {
	if s.entrance != nil {
		return s.header
	}
	return s.w.Header()
}

// WriteHeader implements http.ResponseWriter.
func (s *Socket) WriteHeader(status int) {
	if s.entrance == nil {
		s.w.WriteHeader(status)
	} else if status >= 200 {
		s.status = status
	}
}

// Write implements http.ResponseWriter.
func (s *Socket) Write(p []byte) (int, error) {
	switch {
	case s.talk != nil:
		return s.deliver(p)
	case s.entrance != nil:
		s.answer = append(s.answer, p[:min(len(p), errorBodyLimit-len(s.answer))]...)
		return len(p), nil
	}
	return s.w.Write(p)
}

// FlushError implements the method that http.ResponseController looks for.
func (s *Socket) FlushError() error {
	if s.entrance != nil && s.talk == nil {
		return nil
	}
	s.mu.Lock() // reverse_proxy flushes what it has written, perhaps while an event of our own is written
	defer s.mu.Unlock()
	return http.NewResponseController(s.w).Flush()
}

// Unwrap returns what http.ResponseController looks at for all else.
func (s *Socket) Unwrap() http.ResponseWriter { return s.w }

// Hijack implements http.Hijacker. The connection that it returns is the Socket.
func (s *Socket) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	if s.conn == nil {
		if err := s.hijack(); err != nil {
			return nil, nil, err
		}
	}
	own := socketConn{s.conn, s}
	return own, bufio.NewReadWriter(bufio.NewReaderSize(own, 1), bufio.NewWriterSize(own, 1)), nil
}

func (s *Socket) hijack() error {
	conn, buffers, err := http.NewResponseController(s.w).Hijack()
	if err != nil {
		return err
	}
	if err = buffers.Flush(); err != nil {
		conn.Close()
		return err
	}
	s.conn, s.source = conn, conn
	if n := buffers.Reader.Buffered(); n > 0 {
		early, _ := buffers.Peek(n)
		s.source = io.MultiReader(bytes.NewReader(bytes.Clone(early)), conn)
	}
	return nil
}

// socketConn is the connection as reverse_proxy gets it.
type socketConn struct {
	net.Conn
	s *Socket
}

func (c socketConn) Read(p []byte) (int, error)  { return c.s.read(p) }
func (c socketConn) Write(p []byte) (int, error) { return c.s.deliver(p) }

// WriteTo implements io.WriterTo.
func (c socketConn) WriteTo(w io.Writer) (int64, error) { return copyTunnel(w, c, c.s.copies) }

// CloseWrite passes on that the backend has ended.
func (c socketConn) CloseWrite() error { return closeWrite(c.Conn) }

// read reads what goes to the backend.
func (s *Socket) read(p []byte) (int, error) {
	if !s.holds {
		return s.source.Read(p)
	}
	if s.entrance != nil {
		s.takeOver()
	}
	for {
		n := copy(p, s.ready)
		if s.ready = s.ready[n:]; n > 0 {
			return n, nil
		}
		if s.ready = nil; s.readErr != nil {
			return 0, s.readErr
		}
		n, err := s.source.Read(p)
		if s.readErr = err; n > 0 {
			if code := s.in.take(p[:n], s.pass, s.passControl); code != 0 {
				s.end(code)
			}
		}
	}
}

// pass lets a message of the client's pass, or answers it.
func (s *Socket) pass(m message) {
	if s.ended {
		return
	}
	passes, instead, answer := s.talk.sent(m.text)
	if len(answer) > 0 {
		s.send(frame(opcodeText, false, answer))
	}
	switch {
	case !passes, s.ended:
	case len(instead) > 0:
		s.ready = append(s.ready, frame(opcodeText, true, instead...)...)
	case len(s.ready) == 0:
		s.ready = m.raw
	default:
		s.ready = append(s.ready, m.raw...)
	}
}

func (s *Socket) passControl(_ byte, m message) {
	if !s.ended {
		s.ready = append(s.ready, m.raw...)
	}
}

// end closes both sides because of what the client sent.
func (s *Socket) end(code uint16) {
	if s.ended {
		return
	}
	s.ended = true
	s.send(closeFrame(code, false))
	s.ready = append(s.ready, closeFrame(closeGoingAway, true)...)
	s.readErr = io.EOF
}

// send sends a frame of our own to the client, as soon as no message of the backend's is incomplete.
func (s *Socket) send(frame []byte) {
	s.mu.Lock()
	err := s.put(frame) // if a write fails, so does the next read
	s.mu.Unlock()
	if err == errTooMany { //nolint:errorlint // as put returns it
		s.end(closePolicy)
	}
}

// put is send for who holds the lock.
func (s *Socket) put(frame []byte) (err error) {
	switch {
	case s.closed || s.out.closing:
		return nil
	case s.talk == nil || s.out.between() && !s.out.within || s.out.unreadable:
		_, err = s.conn.Write(frame)
	case len(s.pending) >= maxPending && frame[0]&0x0f != opcodeClose:
		return errTooMany
	default:
		s.pending = append(s.pending, frame)
	}
	s.closed = frame[0]&0x0f == opcodeClose && len(s.pending) == 0
	return err
}

// received reads a message from the backend. Only deltas, of which there are many, are not searched for secrets.
func (s *Socket) received(e sse.Event) {
	s.quotes = s.quotes || !bytes.HasSuffix(e.Kind(), []byte("delta"))
	s.talk.received(e)
}

// deliver writes what the backend sends to the client. The conversation reads it first, and a frame is written once it is complete,
// unless it is long, so that a secret in it can be found.
func (s *Socket) deliver(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return len(p), nil
	}
	all, before, wasReadable := len(p), len(s.partial), !s.out.unreadable
	s.quotes = false
	at, end := s.out.take(p, s.received, s.talk.part)
	if before > 0 {
		p, s.partial = append(s.partial, p...), nil
	}
	if wasReadable && s.out.unreadable && s.holds { // its usage could not be charged
		s.closed = true
		err := s.write(p[:before+s.out.bad], closeFrame(closeUnsupported, false))
		return all, errors.Join(err, errUnreadable)
	}
	if s.out.waits() {
		ready := 0
		if end >= 0 {
			ready = before + end
		}
		if s.partial = p[ready:]; before == 0 || ready > 0 {
			s.partial = bytes.Clone(s.partial)
		}
		p = p[:ready]
	}
	var err error
	if own := s.pending; len(own) > 0 && at >= 0 {
		s.pending = nil
		s.closed = slices.ContainsFunc(own, func(f []byte) bool { return f[0]&0x0f == opcodeClose })
		after := p[before+at:]
		if s.closed {
			after = nil
		}
		err = s.write(p[:before+at], append(own, after)...)
	} else {
		err = s.write(p)
	}
	if err != nil {
		return 0, err
	}
	return all, nil
}

// flush writes the beginning of a frame of which the backend does not send the end. A secret may be cut off as well. It may be called
// on nil.
func (s *Socket) flush() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.partial; len(p) > 0 && !s.closed {
		s.partial = nil
		_, _ = s.conn.Write(p[:s.secrets.Star(p, false)]) // if that fails, so does the next read
	}
}

// write writes what the backend has sent, and what follows, to the client.
func (s *Socket) write(sent []byte, more ...[]byte) (err error) {
	if len(s.secrets) > 0 && (s.quotes || s.out.within) {
		s.secrets.Star(sent, true)
		for _, p := range more {
			s.secrets.Star(p, true)
		}
	}
	if len(more) > 0 {
		sent = bytes.Join(append([][]byte{sent}, more...), nil)
	}
	if len(sent) > 0 {
		_, err = s.conn.Write(sent)
	}
	return err
}

var errUnreadable = errors.New("a message of the backend's is compressed, or not made of frames")
