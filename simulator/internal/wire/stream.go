package wire

import "net/http"

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
