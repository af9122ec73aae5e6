// Package wire sends the replies of a simulator: whole, as a stream of events,
// or as the messages of a WebSocket. It defines the shapes of errors, and the
// faults.
//
// A fault is an [Action]. A [Client], its [Stream] or its [Socket] applies the
// fault of the request while it sends, at the place that the fault names:
// instead of the reply, before the headers, in the middle of the body, or
// before an event with a number. A fault that breaks the connection aborts the
// handler with http.ErrAbortHandler. A fault takes effect once, and is counted
// then.
//
// A reply that hangs waits until its client leaves or the config is unloaded. A
// Client belongs to the goroutine that serves its request.
package wire

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"
)

// Client is the client of one request, and what it was sent so far.
type Client struct {
	w        http.ResponseWriter
	r        *http.Request
	unloaded context.Context // done when the config is unloaded
	onFault  func()          // called once, when the fault takes effect
	isSilent func() bool     // whether nothing more may be sent

	Fault   Action // of the request
	faulted bool

	Status    int  // 0: no reply
	Cancelled bool // it left before the end
}

// NewClient returns the client that gets its reply through w.
func NewClient(unloaded context.Context, w http.ResponseWriter, r *http.Request, onFault func(),
	isSilent func() bool) *Client {
	return &Client{w: w, r: r, unloaded: unloaded, onFault: onFault, isSilent: isSilent}
}

// Header returns the headers of the reply, until it is sent.
func (c *Client) Header() http.Header { return c.w.Header() }

func (c *Client) sendHeader(status int) {
	c.HangIfSilent()
	c.Status = status
	c.w.WriteHeader(status)
}

// Send sends a whole reply.
func (c *Client) Send(rep *Reply) {
	hdr := c.Header()
	for name, values := range rep.Header {
		hdr[name] = values
	}
	if rep.ContentType != "" {
		hdr.Set("content-type", rep.ContentType)
	}
	hdr.Set("content-length", strconv.Itoa(len(rep.Body)))
	c.sendHeader(rep.Status)
	if c.r.Method == http.MethodHead {
		return
	}
	if c.Fault.kind == "json_cut" && rep.Status == http.StatusOK {
		c.acted()
		_, _ = c.w.Write(rep.Body[:len(rep.Body)/2])
		_ = c.flush()
		c.abort()
	}
	if _, err := c.w.Write(rep.Body); err != nil {
		c.Cancelled = true
	}
}

// flush sends what was written so far. It is not an error if the writer cannot
// flush.
func (c *Client) flush() error {
	err := http.NewResponseController(c.w).Flush()
	if errors.Is(err, http.ErrNotSupported) {
		return nil
	}
	return err
}

// Wait waits for d. It reports whether the client is still connected.
func (c *Client) Wait(d time.Duration) bool {
	if d > 0 {
		select {
		case <-time.After(d):
		case <-c.r.Context().Done():
		}
	}
	return !c.gone()
}

// HangIfSilent waits until the client leaves if nothing more may be sent.
func (c *Client) HangIfSilent() {
	if c.isSilent() {
		c.acted()
		c.hang()
	}
}

// hang waits until the client leaves, or the config is unloaded.
func (c *Client) hang() {
	select {
	case <-c.r.Context().Done():
		c.Cancelled = true
	case <-c.unloaded.Done():
	}
	c.abort()
}

// gone reports whether the client has left. It also records that in c.
func (c *Client) gone() bool {
	if c.r.Context().Err() != nil {
		c.Cancelled = true
	}
	return c.Cancelled
}

// Leave records that the client left, and ends its request.
func (c *Client) Leave() {
	c.Cancelled = true
	c.abort()
}

// abort breaks the connection, so that the client sees that the reply is
// incomplete.
func (c *Client) abort() {
	panic(http.ErrAbortHandler)
}

// Stream sends server-sent events and flushes each one. After the end of the
// stream, it drops further events. It aborts when the client leaves.
type Stream struct {
	Named bool // its errors are events of the Responses API, which have names
	Skip  int  // how many events are left out, because the client has them
	Ended bool // by a fault

	c    *Client
	sent int // events so far
	buf  []byte
}

// Stream writes the headers of a stream. They are sent with its first event.
func (c *Client) Stream() *Stream {
	hdr := c.Header()
	hdr.Set("content-type", "text/event-stream; charset=utf-8")
	hdr.Set("cache-control", "no-cache, must-revalidate")
	c.sendHeader(http.StatusOK)
	return &Stream{c: c}
}

// Send sends an event. Events of the Responses API have a name; those of chat
// have none. Without a value, it is the end mark of chat.
func (s *Stream) Send(name string, v any) {
	if s.Skip > 0 {
		s.Skip--
		return
	}
	if s.Ended || s.disturb() {
		return
	}
	if v == nil {
		s.write([]byte("data: [DONE]\n\n"))
	} else {
		s.event(name, v)
	}
	s.sent++
}

func (s *Stream) event(name string, v any) {
	b := s.buf[:0]
	if name != "" {
		b = append(append(append(b, "event: "...), name...), '\n')
	}
	b = append(b, "data: "...)
	b = append(append(b, encode(v)...), "\n\n"...)
	s.write(b)
	s.buf = b
}

func (s *Stream) write(b []byte) {
	if s.c.gone() {
		s.c.abort()
	}
	s.c.HangIfSilent()
	_, err := s.c.w.Write(b)
	if err == nil {
		err = s.c.flush()
	}
	if err != nil {
		s.c.Leave()
	}
}
