// Package tunnel ends the tunnel of a WebSocket when one of its sides has ended. reverse_proxy passes
// the end of one side on to the other, and then waits for the end of that one. Some servers, Node's
// among them, wait as long: they do not close a connection because its client did.
package tunnel

import (
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// Grace is how long a side may stay open after the other has ended. Tests shorten it.
var Grace = 10 * time.Second

// Between returns the backend's side of a tunnel with this client. It closes both sides after
// Grace, counted from the end of one of them.
func Between(client http.ResponseWriter, backend io.ReadWriteCloser) io.ReadWriteCloser {
	return &tunnel{ReadWriteCloser: backend, client: http.NewResponseController(client)}
}

type tunnel struct {
	io.ReadWriteCloser // the backend's side
	client             *http.ResponseController

	mu     sync.Mutex
	timer  *time.Timer // nil: both sides are open
	closed bool
}

// Read implements io.Reader. At its end, the backend has ended.
func (t *tunnel) Read(p []byte) (int, error) {
	n, err := t.ReadWriteCloser.Read(p)
	if errors.Is(err, io.EOF) {
		t.end()
	}
	return n, err
}

// CloseWrite passes on that the client has ended.
func (t *tunnel) CloseWrite() error {
	half, ok := t.ReadWriteCloser.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	t.end()
	return half.CloseWrite()
}

// end limits how long the tunnel stays. It is called while reverse_proxy copies, before the client's
// request is over: the client's deadlines can be set only until then.
func (t *tunnel) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || t.timer != nil {
		return
	}
	t.timer = time.AfterFunc(Grace, func() { t.ReadWriteCloser.Close() })
	until := time.Now().Add(Grace)
	_ = t.client.SetReadDeadline(until) // a client without deadlines ends with its backend
	_ = t.client.SetWriteDeadline(until)
}

// Close implements io.Closer.
func (t *tunnel) Close() error {
	t.mu.Lock()
	if t.closed = true; t.timer != nil {
		t.timer.Stop()
	}
	t.mu.Unlock()
	return t.ReadWriteCloser.Close()
}
