package replay

import (
	"bytes"
	"io"
	"sync"
	"sync/atomic"

	"github.com/openai-lb/caddy-openai-lb/internal/bufpool"
)

// Upload is a body on its way to one backend. Its methods can be called on nil,
// which is the upload of an attempt that never began.
type Upload struct {
	body   *Body
	length int64
	// small is a body in one piece, and long is any other. isSmall tells which
	// of them it is.
	small   bytes.Reader
	isSmall bool
	long    *reader
	// joined has the bytes of a small body that is not sent as it came.
	joined *bufpool.Buffer
	// settled tells that small was let go, or must not be: if net/http sends
	// the body once more, nobody knows which of the two it sent.
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

// Sent lets go of a body of which net/http has sent all. The request would hold
// it for as long as the reply streams. net/http does not read the body again.
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

// Abandon ends the reading, so that the body can be sent from its beginning
// again. It reports false if a part was read that cannot be read twice.
func (u *Upload) Abandon() bool {
	if u == nil || u.long == nil || u.body.tail == nil {
		return true // any number may read what is in memory
	}
	return u.long.abandon()
}

// Stalled reports whether the client has not sent all of its body yet.
func (u *Upload) Stalled() bool { return u != nil && u.long != nil && u.long.inTail() }

// reader reads the body for one attempt.
type reader struct {
	body     *Body
	progress interface{ Extend() }

	mu       sync.Mutex
	segments [][]byte
	closed   bool
	waits    bool // for the client
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
	r.waits = err == nil
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
	r.drop()
	if r.body.tail == nil {
		return 0, io.EOF
	}
	r.body.touch()
	r.waits = true
	return 0, nil
}

func (r *reader) inTail() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.waits
}

func (r *reader) abandon() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.body.wasTouched() {
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

// drop lets go of what is in memory.
func (r *reader) drop() {
	if r.segments != nil {
		r.segments = nil
		r.body.left()
	}
}
