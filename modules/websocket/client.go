package websocket

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/gobwas/ws"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

const (
	// firstMessage is how long a client may take to send its first message.
	firstMessage = 10 * time.Second
	// nextMessage is how long a client may take to send another message after
	// the balancer has answered one itself.
	nextMessage = 5 * time.Minute
)

// A message must be complete within messageTime, plus a second for each
// messagePace of its bytes.
const (
	messageTime = 10 * time.Second
	messagePace = 64 << 10
)

// Client is a client's end of a WebSocket.
//
// An accepted Client has a goroutine that reads messages from the beginning.
// Until there is a backend, the messages wait in a queue, from which Next
// returns the first. The goroutine reads on while messages wait, so that it
// notices when the client leaves; therefore the queue is limited. Once there is
// a backend, each message is passed to it. Otherwise, the goroutine starts with
// the relay.
type Client struct {
	Options
	conn net.Conn
	in   reader
	out  writer
	beat heartbeat

	accepted bool
	most     int         // bytes of a first message
	controls int         // control frames since the last message
	forget   func() bool // ends the watch of Closing
	done     chan struct{}
	// gone is done once the client has left. leave cancels it.
	gone  context.Context
	leave context.CancelFunc

	came      chan struct{} // has an element after the queue or the fault has changed
	receiving atomic.Bool   // a message has begun to arrive

	// turn is held while a message is queued or passed, to keep the order of
	// messages.
	turn lock

	mu     sync.Mutex // guards the fields below
	queue  []message
	queued int     // bytes in the queue
	asked  message // was returned by Next, and is not answered yet
	relay  *relay  // is nil until there is a backend
	fault  *Close  // is what was wrong with what the client sent
}

// Accept opens the WebSocket of a client before there is a backend. most limits
// the length of its first message.
func Accept(w http.ResponseWriter, r *http.Request, most int64, o Options) (*Client, error) {
	if err := checkHandshake(r); err != nil {
		return nil, err
	}
	answerHandshake(w.Header(), r)
	c, err := Open(w, o)
	if err != nil {
		return nil, err
	}
	c.accepted, c.most = true, int(most)
	go c.serve(c.readMessages)
	return c, nil
}

// Open opens the WebSocket of a client whose handshake a backend has answered.
// The header of w is that answer's.
func Open(w http.ResponseWriter, o Options) (*Client, error) {
	conn, buffers, err := takeOver(w)
	if err != nil {
		return nil, err
	}
	c := &Client{Options: o.withDefaults(), conn: conn, most: maxMessage, done: make(chan struct{}),
		came: make(chan struct{}, 1)}
	c.turn = make(lock, 1)
	c.in.Reader, c.in.source.begun = unread(buffers.Reader, conn), time.Now()
	c.in.from, c.in.state = buffers.Reader, ws.StateServerSide
	c.in.from.Reset(&c.in.source)
	c.out = writer{to: conn, lock: make(lock, 1)}
	c.gone, c.leave = context.WithCancel(context.Background())
	c.beat.begin(c.Options, &c.in, &c.out, c.Abort, c.Abort)
	c.forget = context.AfterFunc(c.Closing, c.goAway)
	return c, nil
}

// WithContext implements seam.WebSocket.
func (c *Client) WithContext(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	context.AfterFunc(c.gone, cancel)
	return ctx
}

// serve reads the client's side to its end. It runs in a separate goroutine.
func (c *Client) serve(read func() error) {
	defer close(c.done)
	defer c.recovered(c.Abort)
	c.ended(read())
}

// errClosed means that a side has sent a close frame.
var errClosed = errors.New("the WebSocket is closed")

// ended handles the end of the client's side for this reason.
func (c *Client) ended(err error) {
	c.mu.Lock()
	r := c.relay
	if r == nil {
		errors.As(err, &c.fault)
	}
	waits := c.fault != nil && c.asked.text == nil // Next returns the fault, so that the client is told
	c.mu.Unlock()
	switch {
	case r != nil:
		if r.clientEnded(err); errors.As(err, new(*Close)) {
			c.drain()
		}
	case c.fault != nil && !waits:
		c.closeSoon(c.fault)
		c.leave()
	case c.fault == nil:
		c.leave()
	}
	c.wake()
}

func (c *Client) wake() {
	select {
	case c.came <- struct{}{}:
	default:
	}
}

// readMessages reads messages, and queues or passes them.
func (c *Client) readMessages() error {
	for {
		m, err := c.message()
		if err == nil {
			err = c.take(m)
		}
		if err != nil {
			return err
		}
	}
}

// message reads the next message, and handles control frames before its end.
func (c *Client) message() (m message, err error) {
	m.budget = c.Memory
	defer func() {
		c.receiving.Store(false)
		if err != nil {
			m.release()
		}
	}()
	t := timed{conn: c.conn}
	defer t.end()
	for {
		if !c.in.inMessage() {
			t.end()
			c.receiving.Store(false)
			if _, err = c.in.from.Peek(1); err != nil {
				return m, err
			}
			c.receiving.Store(true)
			t.begun = time.Now()
		}
		if !c.in.ready() {
			t.limit(len(m.text))
		}
		if err = c.in.await(); err != nil {
			return m, t.why(err)
		}
		if c.in.isControl() {
			if err = c.control(); err != nil {
				return m, t.why(err)
			}
			continue
		}
		if !c.in.isWhole() {
			t.limit(len(m.text))
		}
		last, err := c.hold(&m)
		if err != nil {
			return m, t.why(err)
		}
		if last {
			c.controls = 0
			return m, nil
		}
	}
}

// hold reads the next piece of a message.
func (c *Client) hold(m *message) (last bool, err error) {
	most := c.longest()
	switch {
	case c.in.op != ws.OpText:
		return false, errBinary
	case c.in.frames > maxFrames:
		return false, errManyFrames
	case c.in.left > int64(most-len(m.text)):
		return false, errTooLong
	}
	size := c.in.size()
	if !m.grow(size, len(m.text)+int(c.in.left)) {
		return false, errNoMemory
	}
	begin := len(m.text)
	p, err := c.in.read(m.text[begin : begin+size])
	if err != nil {
		return false, err
	}
	m.text = m.text[:begin+len(p.text)]
	if p.last && !utf8.Valid(m.text) {
		return false, errNotUTF8
	}
	return p.last, nil
}

// longest returns how long the next message may be. Only a message that begins
// a request may be longer than maxMessage.
func (c *Client) longest() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.relay != nil || c.asked.text != nil || len(c.queue) > 0 {
		return maxMessage
	}
	return c.most
}

// timed limits the time in which a message must arrive.
type timed struct {
	conn    net.Conn
	begun   time.Time
	limited bool
}

// limit sets the deadline for the next bytes of a message that has length bytes
// so far.
func (t *timed) limit(length int) {
	t.limited = true
	_ = t.conn.SetReadDeadline(t.begun.Add(messageTime + time.Duration(length/messagePace)*time.Second))
}

// why returns errTooSlow if the deadline has passed, else err.
func (t *timed) why(err error) error {
	if t.limited && errors.Is(err, os.ErrDeadlineExceeded) {
		return errTooSlow
	}
	return err
}

func (t *timed) end() {
	if t.limited {
		t.limited = false
		_ = t.conn.SetReadDeadline(time.Time{})
	}
}

// take queues a message, or passes it to the backend.
func (c *Client) take(m message) error {
	c.turn.take()
	defer c.turn.give()
	c.mu.Lock()
	r := c.relay
	if r == nil {
		defer c.mu.Unlock()
		if c.queued+len(m.text) > maxMessage && (c.asked.text != nil || len(c.queue) > 0) {
			m.release()
			return errManyWaiting
		}
		c.queue, c.queued = append(c.queue, m), c.queued+len(m.text)
		c.wake()
		return nil
	}
	c.mu.Unlock()
	defer m.release()
	return r.fromClient(m.text)
}

// control handles a control frame.
func (c *Client) control() error {
	var room [ws.MaxControlFramePayloadSize]byte
	p, err := c.in.read(room[:])
	if err != nil {
		return err
	}
	c.mu.Lock()
	r := c.relay
	c.mu.Unlock()
	if r != nil {
		return r.controlFromClient(p)
	}
	if c.controls++; c.controls > maxControls {
		return errManyPings
	}
	switch p.op {
	case ws.OpPing:
		if c.soon(func() error { return c.out.control(ws.OpPong, p.text) }) != nil {
			return errClosed // it does not read what it asks for
		}
	case ws.OpClose:
		_ = c.soon(func() error { return c.out.control(ws.OpClose, p.text) }) // it has left in any case
		return errClosed
	}
	return nil
}

// soon limits the time of a write to the client before there is a backend.
func (c *Client) soon(write func() error) error { return c.timely(lingering, write) }

// timely limits the time of a write to the client. Nothing is read from the
// client meanwhile, so the heartbeat would not notice that it is gone.
func (c *Client) timely(limit time.Duration, write func() error) error {
	_ = c.conn.SetWriteDeadline(time.Now().Add(limit))
	err := write()
	_ = c.conn.SetWriteDeadline(time.Time{})
	return err
}

func (c *Client) closeSoon(reason *Close) {
	_ = c.soon(func() error { return c.out.close(reason) }) // a client that cannot be told is gone
}

// Next implements seam.WebSocket. The message must begin to arrive within 10
// seconds.
func (c *Client) Next() (text []byte, err error) {
	if !c.await(firstMessage) {
		c.mu.Lock()
		c.fault = errTooSlow
		c.mu.Unlock()
	}
	return c.dequeue()
}

// await waits until there is a message, or there cannot be one. It reports
// false if no message has begun to arrive within the limit. Once one has begun,
// its own time limit applies.
func (c *Client) await(limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for !c.isDecided() {
		select {
		case <-c.came:
		case <-c.gone.Done():
		case <-timer.C:
			if !c.receiving.Load() {
				return c.isDecided()
			}
			timer.Reset(time.Second)
		}
	}
	return true
}

// isDecided reports whether there is a message, or there cannot be one.
func (c *Client) isDecided() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.queue) > 0 || c.fault != nil || c.gone.Err() != nil
}

// dequeue returns the first message of the queue, or the reason why there
// cannot be one.
func (c *Client) dequeue() (text []byte, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case len(c.queue) > 0:
		c.asked.release()
		c.asked = c.queue[0]
		c.queue, c.queued = c.queue[1:], c.queued-len(c.asked.text)
		if c.asked.text == nil {
			c.asked.text = []byte{}
		}
		return c.asked.text, nil
	case c.fault != nil:
		return nil, c.fault.forClient(c.most)
	case c.gone.Err() != nil:
		return nil, io.ErrUnexpectedEOF
	}
	return nil, nil
}

// Asked implements seam.WebSocket.
func (c *Client) Asked() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asked.text
}

// Again implements seam.WebSocket. The next message must begin to arrive within
// 5 minutes.
func (c *Client) Again() bool {
	if !c.accepted || c.relayed() != nil {
		return false
	}
	if !c.await(nextMessage) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.queue) > 0
}

// Answer implements seam.WebSocket.
func (c *Client) Answer(res *http.Response) {
	event := replyEvent(res, c.lane())
	c.mu.Lock()
	c.asked.release()
	c.mu.Unlock()
	_ = c.soon(func() error { return c.out.say(event) }) // a client that does not read it is closed with the next one
}

// lane returns the stream_id of the message that Next has returned.
func (c *Client) lane() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	lane := openaiapi.ParseClientEvent(c.asked.text).Stream
	return lane[:min(len(lane), maxID)]
}

// goAway closes the WebSocket because its config is replaced or its time is up.
func (c *Client) goAway() {
	defer c.recovered(c.Abort)
	if r := c.relayed(); r != nil {
		r.shut(goingAway)
		return
	}
	c.closeSoon(goingAway)
	c.Abort()
}

func (c *Client) relayed() *relay {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.relay
}

// Abort implements seam.WebSocket.
func (c *Client) Abort() {
	if r := c.relayed(); r != nil {
		r.stop()
		r.backend.conn.Close()
	}
	c.conn.Close()
	c.leave()
}

// Close implements seam.WebSocket. It may be called again.
func (c *Client) Close() {
	if !c.accepted {
		return
	}
	defer c.release()
	c.forget()
	c.beat.end()
	c.mu.Lock()
	r, fault := c.relay, c.fault
	c.mu.Unlock()
	if r == nil && c.gone.Err() == nil {
		if fault == nil {
			c.closeSoon(&Close{Code: ws.StatusNormalClosure})
		} else {
			c.closeSoon(fault)
			c.drain()
		}
	}
	c.Abort()
	<-c.done
}

// drain reads from the client for a short time. If data is unread when the
// connection is closed, the connection is reset, and the client may lose the
// last messages to it.
func (c *Client) drain() {
	if !c.out.hasPending() {
		_ = closeWrite(c.conn)
	}
	_ = c.conn.SetReadDeadline(time.Now().Add(lingering))
	_, _ = io.CopyN(io.Discard, c.conn, 2*maxMessage)
}

// release returns the memory of messages that will not be read.
func (c *Client) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked.release()
	for i := range c.queue {
		c.queue[i].release()
	}
	c.queue, c.queued = nil, 0
}

// closeWrite closes the writing half of the connection to a side.
func closeWrite(side any) error {
	if half, ok := side.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
