package websocket

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gobwas/ws"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// flow is what one side of a connection in memory has sent and the other has
// not read.
type flow struct {
	mu       sync.Mutex
	changed  *sync.Cond
	bytes    bytes.Buffer
	room     int // is how many bytes fit
	ended    error
	deadline *time.Timer
	late     bool
}

func newFlow(room int) *flow {
	f := &flow{room: room}
	f.changed = sync.NewCond(&f.mu)
	return f
}

func (f *flow) Read(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.bytes.Len() == 0 && f.ended == nil && !f.late {
		f.changed.Wait()
	}
	switch {
	case f.late:
		return 0, os.ErrDeadlineExceeded
	case f.bytes.Len() == 0:
		return 0, f.ended
	}
	defer f.changed.Broadcast()
	return f.bytes.Read(p)
}

func (f *flow) Write(p []byte) (n int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for n < len(p) {
		for f.bytes.Len() >= f.room && f.ended == nil {
			f.changed.Wait()
		}
		if f.ended != nil {
			return n, io.ErrClosedPipe
		}
		more, _ := f.bytes.Write(p[n:min(len(p), n+f.room-f.bytes.Len())])
		n += more
		f.changed.Broadcast()
	}
	return n, nil
}

// end ends it. What was sent before can be read, unless the error is a reset.
func (f *flow) end(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended == nil {
		f.ended = err
	}
	f.changed.Broadcast()
}

// waiting is how many bytes were not read.
func (f *flow) waiting() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bytes.Len()
}

func (f *flow) readUntil(at time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.deadline != nil {
		f.deadline.Stop()
	}
	f.late = false
	if !at.IsZero() {
		f.deadline = time.AfterFunc(time.Until(at), func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.late = true
			f.changed.Broadcast()
		})
	}
}

// wire is one side of a connection in memory.
type wire struct {
	net.Conn
	in, out *flow
	limit   *time.Timer
}

// newWire returns both sides. Each may have sent so many bytes that the other
// has not read.
func newWire(room int) (near, far *wire) {
	there, back := newFlow(room), newFlow(room)
	return &wire{in: back, out: there}, &wire{in: there, out: back}
}

func (w *wire) Read(p []byte) (int, error)  { return w.in.Read(p) }
func (w *wire) Write(p []byte) (int, error) { return w.out.Write(p) }

func (w *wire) CloseWrite() error {
	w.out.end(io.EOF)
	return nil
}

func (w *wire) Close() error {
	w.out.end(io.EOF)
	w.in.end(net.ErrClosed)
	w.in.readUntil(time.Time{})
	return nil
}

// reset ends the connection as a crash does.
func (w *wire) reset(err error) {
	w.out.end(err)
	w.in.end(net.ErrClosed)
}

func (w *wire) SetReadDeadline(at time.Time) error {
	w.in.readUntil(at)
	return nil
}

// SetWriteDeadline closes a connection that is not read in time, which is what
// it is for.
func (w *wire) SetWriteDeadline(at time.Time) error {
	if w.limit != nil {
		w.limit.Stop()
		w.limit = nil
	}
	if !at.IsZero() {
		w.limit = time.AfterFunc(time.Until(at), func() { w.out.end(os.ErrDeadlineExceeded) })
	}
	return nil
}

// taken is a ResponseWriter whose connection can be hijacked.
type taken struct {
	*httptest.ResponseRecorder
	conn net.Conn
}

func newTaken(conn net.Conn) http.ResponseWriter { return taken{httptest.NewRecorder(), conn} }

func (t taken) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return t.conn, bufio.NewReadWriter(bufio.NewReaderSize(t.conn, 4096), bufio.NewWriter(io.Discard)), nil
}

// end is a client or a backend of a test. It answers pings, unless it is deaf.
type end struct {
	t *testing.T
	*wire
	masked bool
	deaf   atomic.Bool
	lax    atomic.Bool   // it may get what is no frame
	frames chan ws.Frame // what it has got, up to its end
}

func newEnd(t *testing.T, w *wire, masked bool) *end {
	e := &end{t: t, wire: w, masked: masked, frames: make(chan ws.Frame, 1<<16)}
	return e
}

// listen reads what comes.
func (e *end) listen() {
	defer close(e.frames)
	r := bufio.NewReader(e.wire)
	for {
		h, err := ws.ReadHeader(r)
		if err != nil || h.Length > 64<<20 { // which is no frame
			_, _ = io.Copy(io.Discard, r)
			return
		}
		f := ws.Frame{Header: h, Payload: make([]byte, h.Length)}
		if _, err := io.ReadFull(r, f.Payload); err != nil {
			return
		}
		if h.Masked == e.masked && !e.lax.Load() {
			e.t.Errorf("a frame has the wrong mask: %+v", h)
		}
		f = ws.UnmaskFrameInPlace(f)
		if h.OpCode == ws.OpPing && !e.deaf.Load() {
			e.send(ws.NewPongFrame(f.Payload))
			continue
		}
		e.frames <- f
	}
}

// send sends frames. It may be called from any goroutine of a test, if the end
// has room.
func (e *end) send(frames ...ws.Frame) {
	var all bytes.Buffer
	for _, f := range frames {
		if e.masked {
			f = ws.MaskFrame(f)
		}
		ws.MustWriteFrame(&all, f)
	}
	_, _ = e.Write(all.Bytes()) // a test sees what does not arrive
}

func (e *end) say(text string) { e.send(ws.NewTextFrame([]byte(text))) }

// next returns the next frame, as its opcode and what it has. It waits two
// minutes at most.
func (e *end) next() string {
	e.t.Helper()
	select {
	case f, ok := <-e.frames:
		if !ok {
			return "end"
		}
		return show(f)
	case <-time.After(2 * time.Minute):
		return "nothing"
	}
}

func show(f ws.Frame) string {
	switch f.Header.OpCode {
	case ws.OpClose:
		code, reason := ws.ParseCloseFrameData(f.Payload)
		return fmt.Sprintf("close %d %s", code, reason)
	case ws.OpPing:
		return "ping " + string(f.Payload)
	case ws.OpPong:
		return "pong " + string(f.Payload)
	}
	text := fmt.Sprintf("%.2000s", f.Payload)
	if f.Header.OpCode == ws.OpContinuation {
		text = "+" + text
	}
	if !f.Header.Fin {
		text += "…"
	}
	return text
}

// wants checks which frames come next.
func (e *end) wants(frames ...string) {
	e.t.Helper()
	for _, want := range frames {
		if got := e.next(); got != want {
			e.t.Fatalf("got %.200q, want %.200q", got, want)
		}
	}
}

// pair is a WebSocket with both ends of a test.
type pair struct {
	*Client
	client, backend *end
	ended           chan seam.WebSocketEnd
	logs            *observer.ObservedLogs
}

// room is how much fits into the connections of most tests.
const room = 1 << 20

// withOptions returns options for a test, and what is logged.
func withOptions(o Options) (Options, *observer.ObservedLogs) {
	core, logs := observer.New(zap.InfoLevel)
	o.Log = zap.New(core)
	if o.Memory == nil {
		o.Memory = NewBudget(64 << 20)
	}
	return o, logs
}

// accept opens the WebSocket of a client that has no backend yet.
func accept(t *testing.T, o Options) *pair {
	t.Helper()
	near, far := newWire(room)
	p := &pair{client: newEnd(t, far, true), ended: make(chan seam.WebSocketEnd, 1)}
	o, p.logs = withOptions(o)
	r := httptest.NewRequest(http.MethodGet, "/v1/responses", nil)
	r.Header = http.Header{"Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="}}
	var err error
	if p.Client, err = Accept(newTaken(near), r, 8<<20, o); err != nil {
		t.Fatal(err)
	}
	go p.client.listen()
	return p
}

// open opens a WebSocket whose handshake a backend has answered.
func open(t *testing.T, o Options) *pair {
	t.Helper()
	near, far := newWire(room)
	p := &pair{client: newEnd(t, far, true), ended: make(chan seam.WebSocketEnd, 1)}
	o, p.logs = withOptions(o)
	var err error
	if p.Client, err = Open(newTaken(near), o); err != nil {
		t.Fatal(err)
	}
	go p.client.listen()
	return p
}

// toBackend returns the balancer's side of a backend.
func (p *pair) toBackend(t *testing.T) *Backend {
	near, far := newWire(room)
	p.backend = newEnd(t, far, false)
	return NewBackend(near)
}

// relays begins the relay.
func (p *pair) relays(b *Backend, s seam.WebSocketSession) *pair {
	if p.backend.frames != nil {
		go p.backend.listen()
	}
	go func() { p.ended <- p.Relay(b, s) }()
	return p
}

// between returns a WebSocket that is relayed.
func between(t *testing.T, s seam.WebSocketSession) *pair {
	t.Helper()
	p := open(t, Options{})
	return p.relays(p.toBackend(t), s)
}

// over waits until the WebSocket is over, and checks that it holds nothing.
func (p *pair) over(t *testing.T) seam.WebSocketEnd {
	t.Helper()
	e := <-p.ended
	p.Close()
	if n := p.Memory.Used(); n != 0 {
		t.Errorf("%d bytes are held", n)
	}
	return e
}

// inBubble runs a test with virtual time, at the end of which nothing may run
// any more.
func inBubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	bubble.Test(t, test)
}
