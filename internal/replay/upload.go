package replay

import (
	"bytes"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Upload is a body on its way to one backend. Its methods can be called on nil,
// which is the upload of an attempt that never started.
type Upload struct {
	body   *Body
	length int64
	// small is a body in one piece, and long is any other. isSmall reports
	// which of them it is.
	small   bytes.Reader
	isSmall bool
	long    *reader
	// joined has the bytes of a small body that is not sent as it came.
	joined *Buffer
	// decoded reports whether the body came in zstd and is sent without it,
	// because something in it changes.
	decoded bool
	// settled reports whether small was let go, or must not be: if net/http
	// sends the body once more, it is not known which of the two it sent.
	settled atomic.Bool
}

func (u *Upload) setSmall(body []byte) {
	u.isSmall = true
	u.small.Reset(body)
}

func (u *Upload) reader() io.ReadCloser {
	if u.isSmall {
		return io.NopCloser(&u.small) // which net/http knows to be in memory
	}
	return u.long
}

// Sent frees a body that net/http has sent completely. Otherwise the request
// would keep it for as long as the reply streams. net/http does not read the
// body again.
func (u *Upload) Sent() {
	if u == nil || !u.isSmall || u.settled.Swap(true) {
		return
	}
	if u.small.Reset(nil); u.joined == nil {
		u.body.left()
	} else {
		u.joined.Put()
	}
}

// Abandon ends the reading, so that the body can be sent again from its
// beginning. It reports false if a part that cannot be read twice was read.
func (u *Upload) Abandon() bool {
	if u == nil || u.long == nil || u.body.tail == nil {
		return true // any number may read what is in memory
	}
	return u.long.abandon()
}

const (
	// leastPace is how many bytes a client must send each second to keep up.
	leastPace = 64 << 10
	// stall is how far behind that pace a client stalls its upload.
	stall = time.Second
)

// Stalled reports whether the client keeps the backend waiting for the rest of
// the body, or did so just before: it pauses, or is far slower than any
// network. The backend may then give up. That may be known only when the client
// has gone on, and its last bytes were written to a connection that the backend
// had closed.
func (u *Upload) Stalled() bool { return u != nil && u.long != nil && u.long.late() >= stall }

// Ended reports whether all of the body was read. Then the client's connection
// is free for its next request.
func (u *Upload) Ended() bool {
	if u == nil || u.long == nil {
		return true
	}
	u.long.mu.Lock()
	defer u.long.mu.Unlock()
	return u.long.body.tail == nil || !u.long.ended.IsZero()
}

// Long reports whether the body takes more than one write, so that a connection
// may break in the middle of it.
func (u *Upload) Long() bool { return u != nil && u.long != nil }

// reader reads the body for one attempt.
type reader struct {
	body     *Body
	progress interface{ Extend() }

	mu       sync.Mutex
	segments [][]byte
	closed   bool
	// writing reports whether a part of the first segment is being written,
	// straight from the memory of the body. It is given back only after that.
	writing bool
	// lateness is how late the client is, by leastPace, and since is when the
	// reader began to wait for it. Zero: the reader does not wait.
	lateness time.Duration
	since    time.Time
	ended    time.Time // is when the end of the body was read, or zero
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	r.progress.Extend()
	n, err := r.readBuffered(p)
	if n > 0 || err != nil || len(p) == 0 {
		return n, err
	}
	n, err = r.body.readTail(p)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lateness = max(0, r.lateness+time.Since(r.since)-time.Duration(n)*time.Second/leastPace)
	if r.since = (time.Time{}); err != nil && r.ended.IsZero() {
		r.ended = time.Now()
	}
	return n, err
}

// readBuffered reads what is in memory. It returns neither bytes nor an error
// if the tail comes next.
func (r *reader) readBuffered(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return 0, errGone
	}
	if segment := r.segment(); len(segment) > 0 {
		n := copy(p, segment)
		r.segments[0] = segment[n:]
		return n, nil
	}
	r.drop()
	if r.body.tail == nil {
		return 0, io.EOF
	}
	r.body.touched.Store(true)
	r.since = time.Now()
	return 0, nil
}

// segment returns the rest of the first segment that is not empty. It is empty
// if nothing in memory is left. The caller holds the lock.
func (r *reader) segment() []byte {
	for len(r.segments) > 0 && len(r.segments[0]) == 0 {
		r.segments[0] = nil
		r.segments = r.segments[1:]
	}
	if len(r.segments) == 0 {
		return nil
	}
	return r.segments[0]
}

// writeSize is how much of what is in memory is written at a time.
const writeSize = 64 << 10

// WriteTo implements io.WriterTo. It writes what is in memory without a copy,
// which for a body of megabytes costs as much as its reading. What is streamed
// is copied, through Read.
func (r *reader) WriteTo(w io.Writer) (written int64, err error) {
	for {
		r.progress.Extend()
		part, err := r.lend()
		if err != nil {
			return written, err
		}
		if len(part) == 0 {
			break
		}
		n, err := w.Write(part)
		r.wrote(n)
		if written += int64(n); err != nil {
			return written, err
		}
	}
	buffer := GetBuffer(writeSize)
	defer buffer.Put()
	n, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, buffer.Bytes[:writeSize])
	return written + n, err
}

// lend returns the next part of what is in memory, which stays there until
// wrote is called. It is empty if nothing is left.
func (r *reader) lend() ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errGone
	}
	segment := r.segment()
	r.writing = len(segment) > 0
	return segment[:min(len(segment), writeSize)], nil
}

// wrote records that so many bytes of the part were written, and that no more
// of it will be.
func (r *reader) wrote(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writing = false
	if r.segments[0] = r.segments[0][n:]; r.closed {
		r.drop()
	}
}

func (r *reader) late() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.ended.IsZero() && time.Since(r.ended) >= stall:
		return 0 // nothing more is waited for
	case r.since.IsZero():
		return r.lateness
	}
	return r.lateness + time.Since(r.since)
}

func (r *reader) abandon() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.body.touched.Load() {
		return false
	}
	r.closed = true
	r.drop()
	return true
}

// Close ends the reading. It does not close the client's body: the server does
// that.
func (r *reader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	r.drop()
	return nil
}

// drop lets the memory of the body go, unless a part of it is being written.
// The caller holds the lock.
func (r *reader) drop() {
	if r.segments != nil && !r.writing {
		r.segments = nil
		r.body.left()
	}
}
