package attempt

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/replay"
)

// Dialer is the function that opens the connections of an http.Transport.
type Dialer func(ctx context.Context, network, address string) (net.Conn, error)

// Dialing returns a dialer that wraps the connections of dial. They write a
// body that is in memory in one piece with one write, while net/http would copy
// it through a buffer that it allocates for each request. If the other side
// stops reading during a long upload, its last reply can still be read.
func Dialing(dial Dialer) Dialer {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &conn{Conn: c, closed: make(chan struct{})}, nil
	}
}

// WriteBuffer is the size of net/http's buffer for writing a request. Most
// prompts fit. With the default of 4 KiB, longer ones would take two writes.
const WriteBuffer = 10 << 10

const (
	// copySize is the size of the buffer for a body that is not in one piece.
	copySize = 32 << 10
	// lastWords is how long a connection may still be read after a failed
	// write.
	lastWords = time.Second
	// piece is the length from which a write counts as part of an upload. The
	// end of a TLS connection and control frames of HTTP/2 are shorter. The
	// goroutine that writes those may be the one that reads and closes the
	// connection, so it must not wait.
	piece = 64
)

// conn delays the error of an upload's failed write until the connection is
// closed, at most for lastWords. net/http's reader closes it when it meets the
// end.
//
// A backend that refuses an upload early answers, and closes the connection
// while the body is still being sent. Its reply has arrived when the write
// fails. But net/http closes the connection on such an error at once, and often
// returns the error instead of the reply, or cuts the reply. The delay gives
// the reader time to read the reply.
type conn struct {
	net.Conn
	// closed is closed with the connection.
	closed  chan struct{}
	closing sync.Once
	// uploads is how many long bodies are being sent. delayed reports whether a
	// write has been delayed.
	uploads atomic.Int32
	delayed atomic.Bool
}

// uploadBegins records that a long body is sent on one of net/http's
// connections from now on. Writes are delayed only during such uploads.
func uploadBegins(c net.Conn) { count(c, 1) }

// uploadEnds records that the body was sent, or will not be.
func uploadEnds(c net.Conn) { count(c, -1) }

func count(c net.Conn, uploads int32) {
	for {
		secured, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = secured.NetConn() // by TLS, to the backend or to a proxy
	}
	if c, ok := c.(*conn); ok {
		c.uploads.Add(uploads)
	}
}

// Close implements io.Closer.
func (c *conn) Close() error {
	c.closing.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// CloseWrite closes the writing side. The tunnel of a WebSocket calls it.
func (c *conn) CloseWrite() error { return closeWrite(c.Conn) }

func closeWrite(to any) error {
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Write implements io.Writer.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if err != nil && c.uploads.Load() > 0 && len(p) >= piece && !c.delayed.Swap(true) {
		c.awaitClose(err)
	}
	return n, err
}

// awaitClose waits until the data that arrived before the write error is read.
// It does not wait after a timeout, because the other side may then go on
// sending.
func (c *conn) awaitClose(err error) {
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return
	}
	timer := time.NewTimer(lastWords)
	defer timer.Stop()
	select {
	case <-c.closed:
	case <-timer.C:
	}
}

// ReadFrom implements io.ReaderFrom. net/http calls it with the rest of a
// request's body after its first write.
func (c *conn) ReadFrom(r io.Reader) (int64, error) {
	if limited, ok := r.(*io.LimitedReader); ok {
		if body, ok := limited.R.(io.WriterTo); ok {
			n, err := body.WriteTo(&limit{c, limited.N})
			limited.N -= n
			return n, err
		}
	}
	buffer := replay.GetBuffer(copySize)
	defer buffer.Put()
	return io.CopyBuffer(struct{ io.Writer }{c}, r, buffer.Bytes[:copySize])
}

// limit is a writer that accepts at most left bytes.
type limit struct {
	w    io.Writer
	left int64
}

// Write implements io.Writer.
func (l *limit) Write(p []byte) (int, error) {
	if int64(len(p)) <= l.left {
		n, err := l.w.Write(p)
		l.left -= int64(n)
		return n, err
	}
	n, err := l.w.Write(p[:l.left])
	if l.left -= int64(n); err == nil {
		err = io.ErrShortWrite
	}
	return n, err
}
