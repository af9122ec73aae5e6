package faults

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
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
	oneChunk      = "3d\r\n" + lbtest.StreamContent + "\r\n"
	plainReply    = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 200000\r\n\r\n"
)

// certificateFor makes a certificate that signs itself, and a file of it.
func certificateFor(t *testing.T, host string, until time.Time) (certificate tls.Certificate, file string) {
	t.Helper()
	certificate, err := lbtest.NewCertificate(until, host)
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "root.pem")
	lbtest.WritePEM(t, file, "CERTIFICATE", certificate.Certificate[0])
	return certificate, file
}

// afterHello takes in what the balancer says first, and then does what follows.
func afterHello(then func(net.Conn)) func(net.Conn) {
	return func(conn net.Conn) {
		header := make([]byte, 5) // of a TLS record, which ends with its length
		if _, err := io.ReadFull(conn, header); err != nil {
			return
		}
		io.CopyN(io.Discard, conn, int64(header[3])<<8|int64(header[4]))
		then(conn)
	}
}

// cuts writes text, and closes the connection without a word of TLS.
func cuts(text string) func(net.Conn) {
	return func(conn net.Conn) {
		io.WriteString(conn, text)
		conn.(*tls.Conn).NetConn().Close()
	}
}

// backendTLS returns what an https backend shows to its clients, and the
// options that make a balancer trust it.
func backendTLS(t *testing.T) (config *tls.Config, options string) {
	t.Helper()
	file, keyFile := lbtest.WriteCertificate(t)
	certificate, err := tls.LoadX509KeyPair(file, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{certificate}, NextProtos: []string{"h2"}},
		"transport http {\ntls_trust_pool file " + file + "\n}"
}

// overTLS does what follows once TLS is there.
func overTLS(config *tls.Config, then func(net.Conn)) func(net.Conn) {
	return func(conn net.Conn) {
		server := tls.Server(conn, config)
		if server.Handshake() == nil {
			then(server)
		}
	}
}

// frames is a request that a raw HTTP/2 backend has read.
type frames struct {
	conn net.Conn
	*http2.Framer
	stream uint32
}

// answers serves an HTTP/2 connection: each request with these steps. It ends
// when the balancer hangs up, or a step does.
func answers(steps ...func(frames)) func(net.Conn) {
	return func(conn net.Conn) {
		if _, err := io.ReadFull(conn, make([]byte, len(http2.ClientPreface))); err != nil {
			return
		}
		framer := http2.NewFramer(conn, conn)
		framer.WriteSettings()
		for {
			frame, err := framer.ReadFrame()
			if err != nil {
				return
			}
			if settings, ok := frame.(*http2.SettingsFrame); ok && !settings.IsAck() {
				framer.WriteSettingsAck()
			}
			switch frame.Header().Type {
			case http2.FrameHeaders, http2.FrameData:
				if frame.Header().Flags.Has(http2.FlagDataEndStream) { // the same bit for headers
					for _, step := range steps {
						step(frames{conn, framer, frame.Header().StreamID})
					}
				}
			}
		}
	}
}

// begins sends the headers of a 200, and others in pairs.
func begins(headers ...string) func(frames) { return sendsHeaders("200", headers...) }

// sendsHeaders sends headers in pairs.
func sendsHeaders(status string, headers ...string) func(frames) {
	return func(f frames) {
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: f.stream, BlockFragment: block(append([]string{":status", status}, headers...)...), EndHeaders: true})
	}
}

// block encodes headers in pairs.
func block(headers ...string) []byte {
	var encoded bytes.Buffer
	encoder := hpack.NewEncoder(&encoded)
	for i := 0; i+1 < len(headers); i += 2 {
		encoder.WriteField(hpack.HeaderField{Name: headers[i], Value: headers[i+1]})
	}
	return encoded.Bytes()
}

// brings sends a part of the body.
func brings(text string) func(frames) {
	return func(f frames) { f.WriteData(f.stream, false, []byte(text)) }
}

// isReset ends the stream with an error.
func isReset(code http2.ErrCode) func(frames) {
	return func(f frames) { f.WriteRSTStream(f.stream, code) }
}

// goesAway takes no more requests on the connection: not even this one, unless
// it was seen.
func goesAway(seen bool, code http2.ErrCode) func(frames) {
	return func(f frames) {
		var last uint32
		if seen {
			last = f.stream
		}
		f.WriteGoAway(last, code, nil)
	}
}

var (
	beginsStream = begins("content-type", "text/event-stream")
	ends         = func(f frames) { f.WriteData(f.stream, true, nil) }
	hangsUp      = func(f frames) { f.conn.Close() }
	isSilent     = func(frames) {}
	isGarbage    = func(f frames) { io.WriteString(f.conn, "HTTP/1.1 400 Bad Request\r\n\r\n") }
	isCut        = func(f frames) { reset(f.conn) }
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
// else is asked. Only the time that a row waits for is short: no other row is
// to end for it on a busy machine.
func failOverOrFelt(t *testing.T, scheme, options string, faults []fault) {
	t.Helper()
	s := lbtest.NewSites(t, "https")
	errors := map[int]string{502: "upstream_unreachable", 504: "upstream_timeout"}
	var rows []lbtest.Row
	for _, f := range faults {
		header, idle := "1m", "1m"
		if f.class == "timeout" {
			header = "2s"
		}
		if f.after {
			idle = "2s"
		}
		for kind, body := range map[string]string{"streamed": `{"stream":true}`, "whole": `{"stream":false}`} {
			for _, position := range []string{"first", "last"} {
				name := fmt.Sprintf("bad%d", len(rows))
				bad := fmt.Sprintf("127.0.0.2:%d", 1+len(rows)) // where nobody listens
				if f.serve != nil {
					bad = rawBackend(t, f.serve)
				}
				b, serverB := lbtest.Listen(t, "b")
				second := ""
				if position == "first" {
					second = "backend " + serverB.URL + " {\nname b\npriority 2\n}"
				}
				url := s.Add(fmt.Sprintf(`openai_lb {
					backend %s://%s {
						name %s
					}
					%s
					response_header_timeout %[5]s
					stream_first_event_timeout %[5]s
					stream_idle_timeout %[6]s
					%[7]s
				}`, scheme, bad, name, second, header, idle, options))
				client := 1 // two rows each by HTTP/1.1 and HTTP/2
				if (kind == "streamed") == (position == "first") {
					client = 2
				}
				rows = append(rows, lbtest.Row{Name: f.name + " " + kind + " " + position, Test: func(t *testing.T) {
					reply := lbtest.Post(s.NewClient(t, client), url, body)
					want, calls := f.code, 0
					if position == "first" && !f.after {
						want, calls = 200, 1
					}
					if reply.Status != want || (reply.Err != nil) != f.after {
						t.Errorf("client got %d and then %v, want %d, broken: %v", reply.Status, reply.Err, want, f.after)
					}
					if n := len(b.Received()); n != calls {
						t.Errorf("b was called %d times, want %d", n, calls)
					}
					attempt, cooldown := s.LoggedOf(t, name)
					if cooldown == nil {
						cooldown = new(lbtest.LogEntry)
					}
					if !slices.Contains(strings.Split(f.class, " or "), cooldown.Class) {
						t.Errorf("%s got a cooldown for %q, want one for %q: %s", name, cooldown.Class, f.class, attempt.Error)
					}
					if code, ours := errors[want]; ours {
						reply.WantError(t, want, code)
					}
				}, Waits: f.class == "timeout"})
			}
		}
	}
	s.Serve(t)
	lbtest.SideBySide(t, rows)
}
