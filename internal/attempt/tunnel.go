package attempt

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/gobwas/ws"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Grace is how long one side of a tunnel may stay open after the other has
// ended. Tests shorten it.
var Grace = 10 * time.Second

// errNoClose means that the backend ended a WebSocket without a close frame.
var errNoClose = &verdict.CauseError{Word: "no_close_frame", Text: "the WebSocket ended without a close frame"}

// tunnel returns the connection of a committed 101 that a plain reverse_proxy
// relays.
func (r *Reply) tunnel(client http.ResponseWriter, backend io.ReadWriteCloser) *tunnel {
	var broken func(reason error, begun bool)
	if r.sent.handshakes() {
		broken = func(reason error, begun bool) { r.breaks(End{Broken: reason, Begun: begun}) }
	}
	return newTunnel(r.sent.closing, client, backend, broken)
}

// newTunnel returns the backend's side of a tunnel with this client. The tunnel
// closes both sides Grace after one of them has ended. reverse_proxy
// alone would only pass the end on and wait for the other side, and some
// servers, such as Node's, do not close a connection because their client did.
//
// If the tunnel is a WebSocket, the last Read calls broken if the backend ended
// or reset it while the client was connected, and neither side had sent a close
// frame. begun reports whether the backend had sent data. In any other tunnel,
// broken is nil.
//
// closing is done when reverse_proxy closes all tunnels, and then counts as the
// end of a side. reverse_proxy writes a close frame to both sides of each
// tunnel, one after the other, and waits while a side reads nothing. closing
// may be context.Background().
func newTunnel(closing context.Context, client http.ResponseWriter, backend io.ReadWriteCloser,
	broken func(reason error, begun bool)) *tunnel {
	t := &tunnel{ReadWriteCloser: backend, client: http.NewResponseController(client), innermost: unwrap(client),
		broken: broken}
	if closing.Done() != nil {
		t.forget = context.AfterFunc(closing, t.end)
	}
	return t
}

type tunnel struct {
	io.ReadWriteCloser // the backend's side
	client             *http.ResponseController
	innermost          http.ResponseWriter // the client's, without what Caddy put around it
	broken             func(reason error, begun bool)
	forget             func() bool // ends the watch of closing. nil: there is none

	mu                      sync.Mutex
	fromBackend, fromClient ending
	failed                  error       // why the backend took no more, while the client was connected
	timer                   *time.Timer // nil: both sides are open
	until                   time.Time   // when the timer goes off
	closed                  bool
}

// Read implements io.Reader. It ends when the backend does. The goroutine that
// calls it is also the one that writes to the client.
func (t *tunnel) Read(p []byte) (int, error) {
	n, err := t.ReadWriteCloser.Read(p)
	t.watch(&t.fromBackend, p[:n])
	t.limitWrites()
	if err != nil {
		t.checkEnd(err)
	}
	if errors.Is(err, io.EOF) {
		t.end()
	}
	return n, err
}

// Write implements io.Writer. It looks for a close frame in p before it writes,
// because the backend may answer the frame at once. If Write fails,
// reverse_proxy closes the tunnel, and Read ends without the reason.
func (t *tunnel) Write(p []byte) (int, error) {
	t.watch(&t.fromClient, p)
	n, err := t.ReadWriteCloser.Write(p)
	if err != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		if !t.closed && t.timer == nil {
			t.failed = err
		}
	}
	return n, err
}

// watch follows the frames that one side sent.
func (t *tunnel) watch(f *ending, p []byte) {
	if t.broken == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	f.watch(p)
}

// checkEnd calls broken if the end of the backend's side is a failure.
func (t *tunnel) checkEnd(reason error) {
	t.mu.Lock()
	begun := t.fromBackend.data
	switch {
	case t.broken == nil, t.fromBackend.closing, t.fromClient.closing:
		reason = nil
	case t.failed != nil:
		reason = t.failed
	case t.closed, t.timer != nil: // by us, or after the client's end
		reason = nil
	case errors.Is(reason, io.EOF):
		reason = errNoClose
	}
	t.mu.Unlock()
	if reason != nil {
		t.broken(reason, begun)
	}
}

// CloseWrite tells the backend that the client has ended.
func (t *tunnel) CloseWrite() error {
	half, ok := t.ReadWriteCloser.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	t.end()
	return half.CloseWrite()
}

// end starts the time after which the tunnel is closed. It is called while
// reverse_proxy copies, before the client's request is over, because only then
// can the client's deadlines be set.
func (t *tunnel) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || t.timer != nil {
		return
	}
	t.timer = time.AfterFunc(Grace, func() { t.ReadWriteCloser.Close() })
	t.until = time.Now().Add(Grace)
	_ = t.client.SetReadDeadline(t.until) // a client without deadlines ends with its backend
	_ = http.NewResponseController(t.innermost).SetWriteDeadline(t.until)
}

// limitWrites sets the write deadline of end again, because Caddy sets another
// one for each write. No write may be in progress.
func (t *tunnel) limitWrites() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.timer != nil {
		_ = t.client.SetWriteDeadline(t.until)
	}
}

// unwrap returns the writer of net/http's server, whose deadlines may be set
// while another goroutine writes.
func unwrap(w http.ResponseWriter) http.ResponseWriter {
	for {
		outer, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return w
		}
		w = outer.Unwrap()
	}
}

// Close implements io.Closer.
func (t *tunnel) Close() error {
	if t.forget != nil {
		t.end() // the client may read nothing, and is closed after this
		t.forget()
	}
	t.mu.Lock()
	if t.closed = true; t.timer != nil {
		t.timer.Stop()
	}
	t.mu.Unlock()
	return t.ReadWriteCloser.Close()
}

// ending parses the frames of one side of a WebSocket up to its close frame.
// reverse_proxy passes them on in pieces of any size.
type ending struct {
	// data reports whether a data frame has begun. closing reports whether a
	// close frame has begun.
	data, closing bool

	head string // the beginning of a frame's head
	left int64  // bytes of the frame after its head that have not come
}

// watch reads the next bytes.
func (e *ending) watch(p []byte) {
	for len(p) > 0 && !e.closing {
		if n := min(e.left, int64(len(p))); n > 0 {
			e.left -= n
			p = p[n:]
			continue
		}
		e.head += string(p[:1])
		p = p[1:]
		h, err := ws.ReadHeader(bytes.NewReader([]byte(e.head)))
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			continue // the rest follows
		}
		e.head, e.left = "", h.Length
		e.data = e.data || h.OpCode.IsData()
		e.closing = h.OpCode == ws.OpClose
	}
}
