package attempt

import (
	"cmp"
	"context"
	"crypto/sha1" //nolint:gosec // what RFC 6455 has
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// entrance is the state of an accepted Socket until a backend is chosen.
type entrance struct {
	// header, status and answer are what reverse_proxy answers.
	header http.Header
	status int
	answer []byte
	// closing is the sender's, and forget ends the watch of it.
	closing context.Context
	forget  func() bool
	gone    chan struct{} // is closed once goAway has returned
	// changed has an element after listen has read something. listened is closed when listen returns, and over reports that it did.
	changed  chan struct{}
	listened chan struct{}
	over     bool

	lock     sync.Mutex // guards what follows, and the Socket's in and readErr, while something listens
	goesOn   *sync.Cond
	messages []message          // that came and were not read yet
	first    message            // the latest one that Next returned
	answers  [][]byte           // to control frames
	left     bool               // the client has closed the WebSocket
	handed   bool               // Socket.read reads what comes next, not listen
	code     uint16             // with which the WebSocket has to be closed
	leave    context.CancelFunc // ends the request when the client leaves
}

const (
	// firstMessageTimeout is how long a client may take to send its first message.
	firstMessageTimeout = 10 * time.Second
	// nextMessageTimeout is how long it may take to send another one after an answer of ours.
	nextMessageTimeout = 5 * time.Minute
	// lingering is how long a client may take to read why its WebSocket is closed.
	lingering = 2 * time.Second
)

// Accept opens the WebSocket of a client before a backend is chosen. A message may have so many bytes.
func (s *Sender) Accept(socket *Socket, most int64) error {
	e := &entrance{header: make(http.Header), closing: s.closing, gone: make(chan struct{}), changed: make(chan struct{}, 1), listened: make(chan struct{}), leave: func() {}}
	e.goesOn = sync.NewCond(&e.lock)
	socket.in.most = uint64(most)
	err := checkHandshake(socket.r)
	if err == nil {
		err = socket.open()
	}
	if err != nil {
		return err
	}
	socket.entrance = e
	e.forget = context.AfterFunc(s.closing, func() {
		defer close(e.gone)
		socket.goAway()
	})
	go socket.listen()
	return nil
}

// checkHandshake returns what is wrong with a handshake, which the backends get as it is, if anything is.
func checkHandshake(r *http.Request) error {
	key, err := base64.StdEncoding.DecodeString(r.Header.Get("Sec-WebSocket-Key"))
	switch {
	case r.Header.Get("Sec-WebSocket-Version") != "13":
		return apierror.WrongWebSocketVersion
	case err != nil || len(key) != 16:
		return apierror.WrongWebSocketKey
	}
	return nil
}

// open sends the client the end of its handshake.
func (s *Socket) open() error {
	header := s.w.Header()
	for protocol := range strings.SplitSeq(strings.Join(s.r.Header["Sec-Websocket-Protocol"], ","), ",") {
		if protocol = strings.TrimSpace(protocol); protocol != "" && !keys.IsCredentialProtocol(protocol) && header.Get("Sec-WebSocket-Protocol") == "" {
			header.Set("Sec-WebSocket-Protocol", protocol)
		}
	}
	const guid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11" // RFC 6455 section 1.3
	sum := sha1.Sum([]byte(s.r.Header.Get("Sec-WebSocket-Key") + guid))
	header["Upgrade"], header["Connection"] = []string{"websocket"}, []string{"Upgrade"}
	header["Sec-WebSocket-Accept"] = []string{base64.StdEncoding.EncodeToString(sum[:])}
	s.w.WriteHeader(http.StatusSwitchingProtocols)
	return s.hijack()
}

// Until returns a context that ends when the client leaves.
func (s *Socket) Until(ctx context.Context) context.Context {
	ctx, leave := context.WithCancel(ctx)
	s.lock.Lock()
	defer s.lock.Unlock()
	s.leave()
	if s.leave = leave; s.readErr != nil && s.code == 0 {
		leave()
	}
	return ctx
}

// listen reads from the client until a backend is chosen. It queues messages, answers pings, and ends the request when the client
// leaves. It stops reading while a message waits.
func (s *Socket) listen() {
	defer close(s.listened)
	buf := make([]byte, 4<<10)
	for over := false; !over; {
		n, err := s.source.Read(buf)
		s.lock.Lock()
		if s.code = cmp.Or(s.code, s.in.take(buf[:n], s.queue, s.answerControl)); s.code != 0 {
			err = errUnacceptable
		}
		answers := s.answers
		s.answers = nil
		s.lock.Unlock()
		s.sendSoon(answers) // for which Next does not wait
		s.lock.Lock()
		if len(answers) > 0 && s.left {
			err = cmp.Or(err, io.EOF)
		}
		if s.readErr = cmp.Or(s.readErr, err); s.readErr != nil && s.code == 0 {
			s.leave()
		}
		select {
		case s.changed <- struct{}{}:
		default:
		}
		for len(s.messages) > 0 && !s.handed && s.readErr == nil {
			s.goesOn.Wait()
		}
		over = s.handed || s.readErr != nil
		s.lock.Unlock()
	}
}

var errUnacceptable = errors.New("a message is too long, compressed, binary or malformed")

func (s *Socket) queue(m message) { s.messages = append(s.messages, m) }

// answerControl answers a control frame in place of a backend.
func (s *Socket) answerControl(opcode byte, m message) {
	switch {
	case s.handed:
		s.passControl(opcode, m)
	case opcode == opcodePing:
		s.answers = append(s.answers, frame(opcodePing+1, false, m.text))
	case opcode == opcodeClose:
		s.left = true
		s.answers = append(s.answers, frame(opcodeClose, false, m.text))
	}
}

// sendSoon sends frames, and closes the connection of a client that does not read them.
func (s *Socket) sendSoon(frames [][]byte) {
	if len(frames) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limitWrites()
	for _, f := range frames {
		if s.put(f) != nil {
			s.conn.Close()
			return
		}
	}
	if s.setWriteDeadline(time.Time{}); s.closing.Err() != nil { // the limit was goAway's, too
		s.limitWrites()
	}
}

// Next returns the text of the client's next message, which must come soon.
func (s *Socket) Next() (text []byte, err error) {
	if !s.await(firstMessageTimeout) {
		s.lock.Lock()
		defer s.lock.Unlock()
		switch {
		case s.code == closeTooBig:
			return nil, &http.MaxBytesError{Limit: int64(s.in.most)}
		case s.code != 0:
			return nil, errUnacceptable
		case s.readErr != nil:
			return nil, io.ErrUnexpectedEOF
		}
		s.code = closePolicy
		return nil, os.ErrDeadlineExceeded
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	s.first, s.messages = s.messages[0], s.messages[1:]
	s.goesOn.Signal()
	return s.first.text, nil
}

// await waits for a message, and reports whether there is one. Its rest must come soon after its first byte.
func (s *Socket) await(limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for soon := limit <= firstMessageTimeout; ; {
		s.lock.Lock()
		waits, ended, begun := len(s.messages) == 0, s.readErr != nil, s.in.within || s.in.n > 0
		s.lock.Unlock()
		if begun && !soon {
			soon = timer.Reset(firstMessageTimeout)
		}
		if !waits || ended {
			return !waits
		}
		select {
		case <-s.changed:
		case <-timer.C:
			return false
		}
	}
}

// handOver ends listen, so that Socket.read reads what comes next.
func (s *Socket) handOver() {
	s.lock.Lock()
	s.handed, s.in.most, s.first = true, maxMessage, message{}
	s.goesOn.Signal()
	s.lock.Unlock()
	if s.closing.Err() != nil { // reverse_proxy closes none that opens now
		s.goAway()
	}
}

// takeOver waits for the end of listen, and passes the messages that listen has queued.
func (s *Socket) takeOver() {
	if s.over {
		return
	}
	<-s.listened
	s.over = true
	for _, m := range s.messages {
		s.pass(m)
	}
	if s.messages = nil; s.code != 0 {
		s.end(s.code)
	}
}

// goAway closes the WebSocket because its pool is closed, unless reverse_proxy does.
func (s *Socket) goAway() {
	s.limitWrites()
	s.send(closeFrame(closeGoingAway, false))
	s.lock.Lock()
	s.leave()
	s.lock.Unlock()
	s.conn.Close()
}

// limitWrites limits how long the client may take to read what it is sent now.
func (s *Socket) limitWrites() {
	s.setWriteDeadline(time.Now().Add(lingering))
}

func (s *Socket) setWriteDeadline(until time.Time) {
	_ = s.conn.SetWriteDeadline(until)
}

// Again sends the client what reverse_proxy has answered, if no backend opened the WebSocket. Then it waits for the client's next
// message, and reports whether there is one: it is a new request. It may be called on nil.
func (s *Socket) Again() bool {
	if s == nil || s.entrance == nil || s.talk != nil {
		return false
	}
	s.send(frame(opcodeText, false, errorEventOf(cmp.Or(s.status, http.StatusBadGateway), s.header, s.answer, openaiapi.ParseClientEvent(s.first.text).Stream)))
	s.header, s.status, s.answer, s.first = make(http.Header), 0, nil, message{}
	s.lock.Lock()
	code := s.code
	s.lock.Unlock()
	return code == 0 && s.await(nextMessageTimeout)
}

// Close closes a Socket that was accepted, once reverse_proxy has returned. It may be called on nil.
func (s *Socket) Close() {
	if s == nil || s.entrance == nil {
		return
	}
	if !s.forget() {
		<-s.gone
	}
	s.lock.Lock()
	code := s.code
	s.lock.Unlock()
	if s.talk == nil {
		s.limitWrites()
		s.send(closeFrame(cmp.Or(code, closeNormal), false))
		if code != 0 {
			// what the client still sends would reset the connection, and with it what the client has not read
			_ = s.conn.SetReadDeadline(time.Now().Add(lingering))
			_, _ = io.Copy(io.Discard, s.conn)
		}
	}
	s.conn.Close()
	s.lock.Lock()
	s.handed = true
	s.leave()
	s.goesOn.Signal()
	s.lock.Unlock()
	<-s.listened
}
