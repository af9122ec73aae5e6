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

// Dialing returns a dialer that uses this one. Its connections write in one
// piece what is in memory in one piece: net/http would copy it through a buffer
// that it makes for each request. If the other side stops reading in the midst
// of that, its last words can still be read.
func Dialing(dial Dialer) Dialer {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &conn{Conn: c, closed: make(chan struct{})}, nil
	}
}

// WriteBuffer is how much of a request net/http gathers before it writes. Most
// prompts fit in. With its own 4 KiB, it writes the others in two pieces.
const WriteBuffer = 10 << 10

const (
	// copySize is how much is copied at a time of what is not in one piece.
	copySize = 32 << 10
	// lastWords is how long a connection may be read after a write failed.
	lastWords = time.Second
	// piece is less than what an upload writes at a time. The end of a TLS
	// connection and frames that control HTTP/2 are less. The goroutine that
	// writes them may be the one that reads the connection and closes it.
	piece = 64
)

// conn returns the error of an upload's failed write only after its reader has
// closed it, which net/http's does when it has met the end. A backend that
// refuses an upload early answers, and closes the connection while the body
// still comes. Its reply is there when the write fails, but on such an error
// net/http closes the connection at once, and often returns the error in place
// of the reply, or cuts the reply.
type conn struct {
	net.Conn
	// closed is closed with the connection.
	closed  chan struct{}
	closing sync.Once
	// uploads is how many long bodies are being sent, and held reports whether
	// a write has waited.
	uploads atomic.Int32
	held    atomic.Bool
}

// uploadBegins records that a long body is sent on a connection of net/http's
// from now on. Without it, no write waits.
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

// CloseWrite ends what is written. The tunnel of a WebSocket calls it.
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
	if err != nil && c.uploads.Load() > 0 && len(p) >= piece && !c.held.Swap(true) {
		c.awaitClose(err)
	}
	return n, err
}

// awaitClose waits until what came before this error of a write is read. After
// a timeout, the other side may go on for as long as it likes.
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

// ReadFrom implements io.ReaderFrom. net/http calls it with what is left of a
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

// limit is a writer that takes no more than so many bytes.
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
