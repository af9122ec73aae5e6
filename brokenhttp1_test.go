package openailb

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// rawBackend serves connections as fault says, after it has read the request.
func rawBackend(t *testing.T, fault func(conn net.Conn)) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				fault(conn)
			}()
		}
	}()
	return l.Addr().String()
}

// reads takes in one request, and then does what follows.
func reads(then func(conn net.Conn)) func(net.Conn) {
	return func(conn net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(conn))
		if err != nil {
			return
		}
		io.Copy(io.Discard, r.Body)
		then(conn)
	}
}

// sends writes text, and closes the connection.
func sends(text string) func(net.Conn) {
	return func(conn net.Conn) { io.WriteString(conn, text) }
}

// resets writes text, and resets the connection (RST).
func resets(text string) func(net.Conn) {
	return func(conn net.Conn) {
		io.WriteString(conn, text)
		reset(conn)
	}
}

// reset closes the TCP connection at once (RST), without a word of TLS.
func reset(conn net.Conn) {
	if c, ok := conn.(*tls.Conn); ok {
		conn = c.NetConn()
	}
	conn.(*net.TCPConn).SetLinger(0)
	conn.Close()
}

// stalls writes text, and nothing more until the balancer hangs up.
func stalls(text string) func(net.Conn) {
	return func(conn net.Conn) {
		io.WriteString(conn, text)
		io.Copy(io.Discard, conn)
	}
}

const (
	chunkedStream = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	oneChunk      = "3d\r\n" + streamContent + "\r\n"
	plainReply    = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 200000\r\n\r\n"
)

// fault is something that may go wrong with a backend.
type fault struct {
	name  string
	serve func(net.Conn) // nil: nobody listens
	// after tells that the client has something before it goes wrong
	after bool
	class string
	code  int // for a client whose last backend it is
}

// failOverOrFelt makes everything go wrong that can: with the first or the last
// backend, for a streamed request or another. Before the client has anything,
// another backend serves, and the last one's failure is an error that says so.
// After that, the client's reply breaks where the backend's does, and nobody
// else is asked.
func failOverOrFelt(t *testing.T, scheme, options string, faults []fault) {
	t.Helper()
	s := newSites(t, "https")
	errors := map[int]string{502: "upstream_unreachable", 504: "upstream_timeout"}
	var rows []subtest
	for _, f := range faults {
		for kind, body := range map[string]string{"streamed": `{"stream":true}`, "whole": `{"stream":false}`} {
			for _, position := range []string{"first", "last"} {
				name := fmt.Sprintf("bad%d", len(rows))
				bad := fmt.Sprintf("127.0.0.2:%d", 1+len(rows)) // where nobody listens
				if f.serve != nil {
					bad = rawBackend(t, f.serve)
				}
				b, serverB := listen(t, "b")
				second := ""
				if position == "first" {
					second = "backend " + serverB.URL + " {\nname b\npriority 2\n}"
				}
				url := s.add(fmt.Sprintf(`openai_lb {
					backend %s://%s {
						name %s
					}
					%s
					response_header_timeout 2s
					stream_first_event_timeout 2s
					stream_idle_timeout 2s
					%s
				}`, scheme, bad, name, second, options))
				client := 1 // two rows each by HTTP/1.1 and HTTP/2
				if (kind == "streamed") == (position == "first") {
					client = 2
				}
				rows = append(rows, subtest{f.name + " " + kind + " " + position, func(t *testing.T) {
					reply := post(s.newClient(t, client), url, body)
					want, calls := f.code, 0
					if position == "first" && !f.after {
						want, calls = 200, 1
					}
					if reply.status != want || (reply.err != nil) != f.after {
						t.Errorf("client got %d and then %v, want %d, broken: %v", reply.status, reply.err, want, f.after)
					}
					if n := len(b.received()); n != calls {
						t.Errorf("b was called %d times, want %d", n, calls)
					}
					attempt, benched := s.logged(t, name)
					if benched == nil {
						benched = new(logEntry)
					}
					if benched.Class != f.class {
						t.Errorf("%s is benched for %q, want %q: %s", name, benched.Class, f.class, attempt.Error)
					}
					if code, ours := errors[want]; ours {
						reply.wantError(t, want, code)
					}
				}})
			}
		}
	}
	s.serve(t)
	sideBySide(t, rows)
}

func TestWhateverGoesWrongIsFailedOverOrFelt(t *testing.T) {
	if len(streamContent) != 0x3d {
		t.Fatalf("the chunk's size is %x", len(streamContent))
	}
	failOverOrFelt(t, "http", "", []fault{
		{"refused", nil, false, "unreachable", 502},
		{"accepted and closed", func(net.Conn) {}, false, "unreachable", 502},
		{"accepted and silent", stalls(""), false, "timeout", 504},
		{"reset at once", resets(""), false, "unreachable", 502},
		{"reset after the request", reads(resets("")), false, "unreachable", 502},
		{"closed after the request", reads(sends("")), false, "unreachable", 502},
		{"silent after the request", reads(stalls("")), false, "timeout", 504},
		{"TLS to a plain port", reads(sends("\x15\x03\x01\x00\x02\x02\x46")), false, "unreachable", 502},
		{"half a status line", reads(sends("HTTP/1.1 20")), false, "unreachable", 502},
		{"half the headers", reads(resets("HTTP/1.1 200 OK\r\nContent-Type: text/ev")), false, "unreachable", 502},
		{"headers that stall", reads(stalls("HTTP/1.1 200 OK\r\nContent-Type: text/ev")), false, "timeout", 504},
		{"an interim reply and nothing more", reads(resets("HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")), false, "unreachable", 502},
		{"a reply before the upload", func(conn net.Conn) {
			if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
				stalls("HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")(conn)
			}
		}, false, "overloaded", 503},
		{"an error cut in its body", reads(sends("HTTP/1.1 500 Oops\r\nContent-Length: 1000\r\n\r\n{")), false, "failed", 502},
		{"an error that stalls", reads(stalls("HTTP/1.1 500 Oops\r\nContent-Length: 1000\r\n\r\n{")), false, "failed", 502},
		{"a stream without an event", reads(sends(chunkedStream + "0\r\n\r\n")), false, "failed", 502},
		{"a stream reset before an event", reads(resets(chunkedStream)), false, "failed", 502},
		{"a stream reset in its first event", reads(resets(chunkedStream + "10\r\ndata: {\"choic")), false, "failed", 502},
		{"a stream closed after content", reads(sends(chunkedStream + oneChunk)), true, "broken_stream", 200},
		{"a stream reset after content", reads(resets(chunkedStream + oneChunk)), true, "broken_stream", 200},
		{"a stream that stalls after content", reads(stalls(chunkedStream + oneChunk)), true, "broken_stream", 200},
		{"a stream with a broken chunk", reads(sends(chunkedStream + oneChunk + "zz\r\n")), true, "broken_stream", 200},
		{"a reply shorter than it says", reads(sends(plainReply + strings.Repeat("x", 100_000))), true, "broken_stream", 200},
		{"a reply reset in its middle", reads(resets(plainReply + strings.Repeat("x", 100_000))), true, "broken_stream", 200},
	})
}

func TestAStalledConnectionIsClosedNotLeaked(t *testing.T) {
	gone := make(chan time.Time, 1)
	address := rawBackend(t, reads(func(conn net.Conn) {
		io.WriteString(conn, chunkedStream+oneChunk)
		io.Copy(io.Discard, conn) // returns when the balancer hangs up
		gone <- time.Now()
	}))
	site := serveAt(t, "openai_lb {\nbackend http://"+address+"\nstream_idle_timeout 200ms\n}")
	if reply := ask(newClient(t), "http://"+site+"/v1/chat/completions"); reply.err == nil {
		t.Error("the client got a clean end")
	}
	select {
	case <-gone:
	case <-time.After(20 * time.Second):
		t.Error("the backend's connection is still open")
	}
}
