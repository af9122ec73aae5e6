package openailb

import (
	"io"
	"net/http"
	"sync"
	"time"
)

// A client that stalls must not keep memory, a connection and a backend's place
// for ever.
const (
	// uploadGrace is how long a request's body may take at any pace, and
	// uploadRate the pace, in bytes per second, that it must keep on average
	// after that.
	uploadGrace = time.Minute
	uploadRate  = 8 << 10
	// stalledClientTimeout is how long a client may take no more of a reply.
	stalledClientTimeout = 2 * time.Minute
)

// upload is a request's body, the reading of which ends with
// os.ErrDeadlineExceeded if it comes too slowly.
type upload struct {
	io.ReadCloser
	control *http.ResponseController

	mu       sync.Mutex
	started  time.Time
	received int64
	timer    *time.Timer
	stopped  bool
}

// watchUpload begins the reading of a request's body. If Caddy itself was told
// how long that may take (read_body), nothing else counts.
func watchUpload(w http.ResponseWriter, r *http.Request) *upload {
	u := &upload{ReadCloser: r.Body, control: http.NewResponseController(w), started: time.Now()}
	if server, ok := r.Context().Value(http.ServerContextKey).(*http.Server); ok && server.ReadTimeout > 0 {
		return u
	}
	u.timer = time.AfterFunc(uploadGrace, u.check)
	return u
}

// due is when so much must have come that the pace is kept.
func (u *upload) due() time.Time {
	return u.started.Add(uploadGrace + time.Duration(u.received)*time.Second/uploadRate)
}

// check ends the reading if the body is late.
func (u *upload) check() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.stopped {
		return
	}
	if left := time.Until(u.due()); left > 0 {
		u.timer.Reset(left)
		return
	}
	// a server that cannot do this has limits of its own
	_ = u.control.SetReadDeadline(time.Now())
}

// Read implements io.Reader.
func (u *upload) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	u.mu.Lock()
	u.received += int64(n)
	u.mu.Unlock()
	if err != nil {
		u.stop()
	}
	return n, err
}

// stop ends the watch. No deadline is set after it.
func (u *upload) stop() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.stopped = true
	if u.timer != nil {
		u.timer.Stop()
	}
}

// stallWatch breaks off a reply of which the client takes no more.
type stallWatch struct {
	writer http.ResponseWriter // nil: nobody is watched

	mu      sync.Mutex
	timer   *time.Timer
	running bool
}

// start says that the client has something to take.
func (s *stallWatch) start() {
	if s.writer == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = true
	if s.timer == nil {
		s.timer = time.AfterFunc(stalledClientTimeout, s.breakOff)
	} else {
		s.timer.Reset(stalledClientTimeout)
	}
}

// stop says that it has taken it.
func (s *stallWatch) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = false
	if s.timer != nil {
		s.timer.Stop()
	}
}

func (s *stallWatch) breakOff() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running {
		// a server that cannot do this has limits of its own
		_ = http.NewResponseController(s.writer).SetWriteDeadline(time.Now())
	}
}
