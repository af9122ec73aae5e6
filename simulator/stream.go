package simulator

import (
	"encoding/json"
	"net/http"
	"time"
)

// stream sends server-sent events and flushes each one. After the end of the
// stream, it drops further events. It aborts when the client leaves.
type stream struct {
	x     *exchange
	sent  int // events so far
	ended bool
	buf   []byte
}

// startStream writes the headers of a stream. They are sent with its first event.
func (x *exchange) startStream() *stream {
	hdr := x.w.Header()
	hdr.Set("content-type", "text/event-stream; charset=utf-8")
	hdr.Set("cache-control", "no-cache, must-revalidate")
	x.header(http.StatusOK)
	return &stream{x: x}
}

// send sends an event. Events of the Responses API have a name; those of chat
// have none.
func (s *stream) send(name string, v any) {
	if s.ended || s.disturb() {
		return
	}
	s.event(name, v)
	s.sent++
}

func (s *stream) event(name string, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		panic("simulator: " + err.Error()) // cannot happen: v is a type of this package
	}
	b := s.buf[:0]
	if name != "" {
		b = append(append(append(b, "event: "...), name...), '\n')
	}
	b = append(b, "data: "...)
	if s.sent == 0 && s.x.fault.kind == faultNullErrorChunk {
		s.x.acted()
		b, data = append(b, `{"error":null,`...), data[1:]
	}
	b = append(append(b, data...), "\n\n"...)
	s.write(b)
	s.buf = b
}

// done sends the end mark of chat and completions.
func (s *stream) done() {
	if s.ended || s.unfinished() {
		return
	}
	s.write([]byte("data: [DONE]\n\n"))
}

// pause waits for the time between two tokens.
func (s *stream) pause() {
	if !s.ended && !s.x.wait(time.Duration(s.x.h.TokenLatency)) {
		s.x.abort()
	}
}

func (s *stream) write(b []byte) {
	if s.x.gone() {
		s.x.abort()
	}
	_, err := s.x.w.Write(b)
	if err == nil {
		err = s.x.flush()
	}
	if err != nil {
		s.x.cancelled = true
		s.x.abort()
	}
}
