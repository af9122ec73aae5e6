// Package bulk writes to a TCP connection in one piece what is in memory in one piece. net/http
// would copy it through a buffer that it makes for each request.
package bulk

import (
	"context"
	"io"
	"net"

	"github.com/openai-lb/caddy-openai-lb/internal/bufpool"
)

// Dialer is the function that opens the connections of an http.Transport.
type Dialer func(ctx context.Context, network, address string) (net.Conn, error)

// Over returns a dialer that uses this one.
func Over(dial Dialer) Dialer {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if tcp, ok := c.(*net.TCPConn); ok && err == nil {
			return &conn{tcp}, nil
		}
		return c, err
	}
}

// copySize is how much is copied at a time of what is not in one piece.
const copySize = 32 << 10

type conn struct{ *net.TCPConn }

// ReadFrom implements io.ReaderFrom. net/http calls it with what is left of a request's body
// after its first write.
func (c *conn) ReadFrom(r io.Reader) (int64, error) {
	if limited, ok := r.(*io.LimitedReader); ok {
		if body, ok := limited.R.(io.WriterTo); ok {
			n, err := body.WriteTo(&limit{c.TCPConn, limited.N})
			limited.N -= n
			return n, err
		}
		buffer := bufpool.Get(copySize)
		defer buffer.Put()
		return io.CopyBuffer(struct{ io.Writer }{c.TCPConn}, limited, buffer.Bytes[:copySize])
	}
	return c.TCPConn.ReadFrom(r)
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
