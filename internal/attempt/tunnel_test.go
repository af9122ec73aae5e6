package attempt

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// side is the backend's. Its other end is a pipe's.
type side struct {
	net.Conn
	closed chan time.Time
}

func (*side) CloseWrite() error { return nil }

func (s *side) Close() error {
	select {
	case s.closed <- time.Now():
	default:
	}
	return s.Conn.Close()
}

// client is a ResponseWriter that knows its deadlines.
type client struct {
	http.ResponseWriter
	read, write time.Time
}

func (c *client) SetReadDeadline(at time.Time) error  { c.read = at; return nil }
func (c *client) SetWriteDeadline(at time.Time) error { c.write = at; return nil }

func TestATunnelEndsAGracePeriodAfterOneOfItsSides(t *testing.T) {
	for name, c := range map[string]struct {
		ends func(tunnel io.ReadWriteCloser, backend net.Conn, unload func())
		want time.Duration
		// first is when the first side ends.
		first time.Duration
	}{
		"the client": {func(tunnel io.ReadWriteCloser, _ net.Conn, _ func()) {
			tunnel.(interface{ CloseWrite() error }).CloseWrite()
			tunnel.Read(make([]byte, 1)) // until it is closed
		}, Grace, 0},
		"the backend": {func(tunnel io.ReadWriteCloser, backend net.Conn, _ func()) {
			backend.Close()
			tunnel.Read(make([]byte, 1))
			time.Sleep(time.Minute)
		}, Grace, 0},
		"one soon after the other": {func(tunnel io.ReadWriteCloser, backend net.Conn, _ func()) {
			tunnel.(interface{ CloseWrite() error }).CloseWrite()
			time.Sleep(time.Second)
			backend.Close()
			tunnel.Read(make([]byte, 1))
			time.Sleep(time.Second)
		}, 2 * time.Second, 0},
		"none, but reverse_proxy closes all tunnels": {func(tunnel io.ReadWriteCloser, _ net.Conn, unload func()) {
			unload()
			_, _ = tunnel.Write(make([]byte, 1)) // which the backend does not read
		}, Grace, 0},
		"neither": {func(io.ReadWriteCloser, net.Conn, func()) { time.Sleep(time.Hour) }, time.Hour, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				begin, backend, client := time.Now(), &side{near, make(chan time.Time, 1)}, new(client)
				closing, unload := context.WithCancel(t.Context())
				defer unload()
				tunnel := newTunnel(closing, client, backend, nil)
				c.ends(tunnel, far, unload)
				tunnel.Close()
				if got := (<-backend.closed).Sub(begin); got != c.want {
					t.Errorf("the backend's side is closed after %s, want %s", got, c.want)
				}
				if until := begin.Add(c.first + Grace); !client.read.Equal(until) || !client.write.Equal(until) {
					t.Errorf("the client's side ends at %s and %s", client.read, client.write)
				}
				tunnel.CloseWrite()
				far.Close()
			})
		})
	}
}

// wrapped is a writer like Caddy's: its deadline belongs to the goroutine that
// writes.
type wrapped struct {
	*client
	until time.Time
}

func (w *wrapped) Unwrap() http.ResponseWriter { return w.client }

func (w *wrapped) SetWriteDeadline(at time.Time) error {
	w.until = at
	return nil
}

func TestTheEndOfAClientLimitsAWriteInProgressAndThoseAfterIt(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer far.Close()
		w := &wrapped{client: new(client)}
		tunnel := newTunnel(context.Background(), w, &side{near, make(chan time.Time, 1)}, nil)
		defer tunnel.Close()
		read := func() {
			go io.WriteString(far, "more")
			if _, err := tunnel.Read(make([]byte, 4)); err != nil {
				t.Fatal(err)
			}
		}
		read() // and now it goes to the client, while
		tunnel.CloseWrite()
		until := time.Now().Add(Grace)
		if !w.write.Equal(until) || !w.until.IsZero() {
			t.Errorf("the write in progress ends at %s, and later ones at %s", w.write, w.until)
		}
		read()
		if !w.until.Equal(until) {
			t.Errorf("later writes end at %s, want %s", w.until, until)
		}
	})
}

func TestASideThatCannotBeHalfClosedEndsTheTunnel(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	tunnel := newTunnel(context.Background(), new(client), near, nil)
	defer tunnel.Close()
	if err := tunnel.CloseWrite(); err == nil {
		t.Error("reverse_proxy would wait for the other side")
	}
}

// script is a backend's side that sends these bytes and then fails. It takes
// what it is sent until it is full.
type script struct {
	io.Reader
	fails error
	full  error
}

func (s *script) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if errors.Is(err, io.EOF) {
		err = s.fails
	}
	return n, err
}

func (s *script) Write(p []byte) (int, error) { return len(p), s.full }
func (*script) CloseWrite() error             { return nil }
func (*script) Close() error                  { return nil }

func TestATunnelIsBrokenIfTheBackendEndsItAndNothingElseDid(t *testing.T) {
	const (
		data, ping, closing = "\x81\x02hi", "\x89\x00", "\x88\x02\x03\xe8"
		masked              = "\x88\x82abcd\x62\x8a"
	)
	reset := &net.OpError{Op: "read", Err: syscall.ECONNRESET}
	write := func(text string) func(*tunnel) { return func(t *tunnel) { io.WriteString(t, text) } }
	for name, c := range map[string]struct {
		backend string
		fails   error
		full    error
		before  func(*tunnel)
		want    error // nil: it is not broken
		begun   bool
	}{
		"the end":                              {"", io.EOF, nil, nil, errNoClose, false},
		"a reset":                              {"", reset, nil, nil, reset, false},
		"a reset after a ping":                 {ping, reset, nil, nil, reset, false},
		"the end after data":                   {data, io.EOF, nil, nil, errNoClose, true},
		"a reset after data":                   {ping + data + ping, reset, nil, nil, reset, true},
		"a continuation":                       {"\x80\x00", io.EOF, nil, nil, errNoClose, true},
		"the end after a close frame":          {data + closing, io.EOF, nil, nil, nil, false},
		"a reset after a close frame":          {closing + "more", reset, nil, nil, nil, false},
		"the client's close frame":             {data, io.EOF, nil, write(masked), nil, false},
		"a reset after the client's":           {"", reset, nil, write(masked), nil, false},
		"the client's close frame is refused":  {"", net.ErrClosed, reset, write(masked), nil, false},
		"the client's data is refused":         {"", net.ErrClosed, reset, write(data), reset, false},
		"a refusal after a close frame":        {closing, net.ErrClosed, reset, write(data), nil, false},
		"the client left":                      {"", io.EOF, nil, func(t *tunnel) { t.CloseWrite() }, nil, false},
		"the client left, and that is refused": {"", reset, reset, func(t *tunnel) { t.CloseWrite(); io.WriteString(t, data) }, nil, false},
		"we closed it":                         {"", net.ErrClosed, nil, func(t *tunnel) { t.Close() }, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, size := range []int{1, 3, 4096} {
				var got error
				begun, calls := false, 0
				tun := newTunnel(context.Background(), new(client), &script{strings.NewReader(c.backend), c.fails, c.full}, func(reason error, data bool) {
					got, begun = reason, data
					calls++
				})
				if c.before != nil {
					c.before(tun)
				}
				sent, _ := io.ReadAll(struct{ io.Reader }{&chunks{tun, size}})
				tun.Close()
				if !errors.Is(got, c.want) || calls > 1 || begun != c.begun || string(sent) != c.backend {
					t.Errorf("in pieces of %d: %v, begun %v, %d times after %q", size, got, begun, calls, sent)
				}
			}
		})
	}
}

// chunks reads a few bytes at a time.
type chunks struct {
	io.Reader
	size int
}

func (c *chunks) Read(p []byte) (int, error) { return c.Reader.Read(p[:min(len(p), c.size)]) }

// FuzzFrames holds frames that are read in pieces against those that are read
// at once.
func FuzzFrames(f *testing.F) {
	f.Add([]byte("\x81\x02hi\x89\x00\x88\x00"), 1)
	f.Add([]byte("\x81\x82abcdhi\x80\x7e\x00\x02hi\x88\x00"), 3)
	f.Add([]byte("\x82\x7f\x00\x00\x00\x00\x00\x00\x00\x01x\x88\x00"), 5)
	f.Add([]byte("\x82\xff\xff\xff\xff\xff\xff\xff\xff\xffabcd\x88\x00"), 2)
	f.Fuzz(func(t *testing.T, sent []byte, size int) {
		var whole, pieces ending
		whole.watch(sent)
		for rest := sent; len(rest) > 0; {
			n := max(1, min(len(rest), size))
			pieces.watch(rest[:n])
			rest = rest[n:]
		}
		if whole != pieces {
			t.Errorf("at once %+v, in pieces of %d %+v", whole, size, pieces)
		}
	})
}
