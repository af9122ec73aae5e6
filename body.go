package openailb

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

var errBodyGone = errors.New("the request body is no longer there")

// body is a request's body: what fits into memory, to be sent as often as
// needed, and what follows it, which can be read only once.
type body struct {
	// mu guards against the write loop of an attempt that net/http has not
	// ended yet when the next one begins.
	mu      sync.Mutex
	prefix  []byte
	tail    io.ReadCloser // nil: prefix is all of it
	touched bool          // tail is being read
	tailErr error         // what reading it failed with
	gone    bool          // prefix was let go
	length  int64         // -1: unknown
}

// initialBufferSize limits what a Content-Length alone can make us allocate.
const initialBufferSize = 1 << 20

// read takes in r's body, of which up to limit bytes are kept for replay.
func (b *body) read(r *http.Request, limit int64) error {
	if r.Body == nil || r.Body == http.NoBody {
		return nil
	}
	var buf bytes.Buffer
	buf.Grow(int(min(max(r.ContentLength, 0), limit, initialBufferSize)) + bytes.MinRead)
	// one byte over the limit tells a body of just the limit from a longer one
	n, err := buf.ReadFrom(io.LimitReader(r.Body, limit+1))
	if err != nil {
		return err
	}
	b.prefix, b.length = buf.Bytes(), n
	if n > limit {
		b.tail, b.length = r.Body, r.ContentLength
	}
	return nil
}

// attach makes the body that of an outgoing request, with model in place of
// the one that it asks for, unless that is empty. progress is called whenever
// more of it is about to be sent.
func (b *body) attach(out *http.Request, asks *openaiapi.Request, model string, progress func()) *bodyReader {
	reader := b.reader(asks, model, progress)
	out.Body, out.ContentLength, out.GetBody, out.TransferEncoding = reader, reader.length, nil, nil
	if len(out.Trailer) > 0 {
		out.ContentLength = -1 // HTTP/1.1 carries trailers in chunks only
	} else if reader.length == 0 {
		out.Body = http.NoBody
	}
	if b.tail == nil {
		// lets net/http recover by itself from an idle connection that died
		out.GetBody = func() (io.ReadCloser, error) {
			if again := b.reader(asks, model, progress); again != nil {
				return again, nil
			}
			return nil, errBodyGone
		}
	}
	return reader
}

// reader reads the body from its beginning. It is nil if that is gone.
func (b *body) reader(asks *openaiapi.Request, model string, progress func()) *bodyReader {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone {
		return nil
	}
	r := &bodyReader{body: b, length: b.length, progress: progress, segments: [][]byte{b.prefix}}
	if model == "" {
		return r
	}
	r.segments = asks.WithModel(b.prefix, model)
	if r.length >= 0 {
		r.length -= int64(len(b.prefix))
		for _, segment := range r.segments {
			r.length += int64(len(segment))
		}
	}
	return r
}

// release lets go of the bytes, but for readers that still send them.
func (b *body) release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.prefix, b.gone = nil, true
}

func (b *body) touch() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.touched = true
}

// readTail reads what was not buffered, and remembers why that failed: it is
// the client's fault, not that of the backend that misses the rest.
func (b *body) readTail(p []byte) (int, error) {
	n, err := b.tail.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.tailErr = err
	}
	return n, err
}

func (b *body) failure() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.tailErr
}

// bodyReader reads the body for one attempt.
type bodyReader struct {
	body     *body
	length   int64
	progress func()

	mu       sync.Mutex
	segments [][]byte
	closed   bool
}

func (r *bodyReader) Read(p []byte) (int, error) {
	r.progress()
	n, err := r.readBuffered(p)
	if n > 0 || err != nil || len(p) == 0 {
		return n, err
	}
	return r.body.readTail(p)
}

// readBuffered reads what is in memory. At the end of it, it returns nothing
// at all if the tail comes next.
func (r *bodyReader) readBuffered(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, errBodyGone
	}
	for len(r.segments) > 0 {
		n := copy(p, r.segments[0])
		r.segments[0] = r.segments[0][n:]
		if n > 0 {
			return n, nil
		}
		if len(p) == 0 {
			return 0, nil
		}
		r.segments[0] = nil
		r.segments = r.segments[1:]
	}
	r.segments = nil
	if r.body.tail == nil {
		return 0, io.EOF
	}
	r.body.touch()
	return 0, nil
}

// abandon ends the reading so that the body can be sent from its beginning
// again. It fails if some of it was read that cannot be read twice.
func (r *bodyReader) abandon() bool {
	if r == nil || r.body.tail == nil {
		return true // any number may read what is in memory
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.body.mu.Lock()
	defer r.body.mu.Unlock()
	if r.body.touched {
		return false
	}
	r.closed, r.segments = true, nil
	return true
}

// Close ends the reading. It closes nothing but itself: the server closes the
// request's body.
func (r *bodyReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed, r.segments = true, nil
	return nil
}

// goneBody stands for a body that went to the backends. A handler that comes
// after them must not take it for an empty one.
type goneBody struct{}

func (goneBody) Read([]byte) (int, error) { return 0, errBodyGone }
func (goneBody) Close() error             { return nil }
