package verdict

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// TestAHostNameIsNoCause has errors as Caddy's DialError wraps them, which has
// no Unwrap.
func TestAHostNameIsNoCause(t *testing.T) {
	for text, want := range map[string]string{
		"dial tcp: lookup east.invalid on 127.0.0.53:53: no such host":       "dns",
		"dial tcp: lookup east.invalid on 127.0.0.53:53: server misbehaving": "dns",
		"dial tcp4: lookup east.invalid: i/o timeout":                        "dns",
		"dial tcp 127.0.0.1:443: connect: connection refused":                "refused",
		"net/http: TLS handshake timeout":                                    "timeout",
	} {
		if got := CauseOf(errors.New(text)); got != want {
			t.Errorf("%q is %s, want %s", text, got, want)
		}
	}
}

// TestAWordForWhatTheNetworkDoes meets real errors, as net/http wraps them.
func TestAWordForWhatTheNetworkDoes(t *testing.T) {
	secured := httptest.NewTLSServer(http.NotFoundHandler())
	defer secured.Close()
	secured.Config.ErrorLog = nil
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	for want, c := range map[string]struct {
		url  string
		dial func(context.Context, string, string) (net.Conn, error)
	}{
		"dns":         {url: "http://backend.invalid", dial: withoutResolver},
		"refused":     {url: "http://" + closedPort(t)},
		"certificate": {url: secured.URL},
		"tls":         {url: "https" + plain.URL[len("http"):]},
		"timeout":     {url: "http://backend", dial: neverConnects},
		"reset":       {url: "http://" + replies(t, func(c *net.TCPConn) { c.SetLinger(0) })},
		"closed":      {url: "http://" + replies(t, func(*net.TCPConn) {})},
		"malformed":   {url: "http://" + replies(t, func(c *net.TCPConn) { io.WriteString(c, "SSH-2.0-OpenSSH_9.9\r\n\r\n") })},
	} {
		t.Run(want, func(t *testing.T) {
			transport := &http.Transport{DialContext: c.dial}
			defer transport.CloseIdleConnections()
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.url, http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			res, err := transport.RoundTrip(req)
			if err == nil {
				res.Body.Close()
				t.Fatal("there was a reply")
			}
			if got := CauseOf(fmt.Errorf("attempt: %w", err)); got != want {
				t.Errorf("%q is %s", err, got)
			}
			// Caddy's error for a connection that was not made has no Unwrap
			if got := CauseOf(errors.New(err.Error())); got != want {
				t.Errorf("the text %q alone is %s", err, got)
			}
		})
	}
}

func withoutResolver(_ context.Context, _, address string) (net.Conn, error) {
	return nil, &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Err: "no such host", Name: address, IsNotFound: true}}
}

func neverConnects(ctx context.Context, _, _ string) (net.Conn, error) {
	return (&net.Dialer{Timeout: time.Nanosecond}).DialContext(ctx, "tcp", "127.0.0.1:9")
}

// closedPort is an address on which no server listens.
func closedPort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// replies is the address of a server that reads a request, and then does this.
func replies(t *testing.T, reply func(*net.TCPConn)) string {
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
			if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
				reply(conn.(*net.TCPConn))
			}
			conn.Close()
		}
	}()
	return l.Addr().String()
}

func TestAWordForOtherErrors(t *testing.T) {
	for want, err := range map[string]error{
		"":        nil,
		"stalled": fmt.Errorf("reading: %w", &CauseError{"stalled", "nothing came"}),
		"tls":     fmt.Errorf("remote: %w", tls.AlertError(40)),
		"closed":  io.ErrUnexpectedEOF,
		"other":   errors.New("something else"),
	} {
		if got := CauseOf(err); got != want {
			t.Errorf("%v is %q, want %q", err, got, want)
		}
	}
}

// TestWhatABackendSentIsNotPartOfAnError meets texts of net/http, some of which
// quote a reply.
func TestWhatABackendSentIsNotPartOfAnError(t *testing.T) {
	for text, want := range map[string]CauseError{
		`malformed HTTP response "a"`: {"malformed", "malformed HTTP response"},
		`net/http: HTTP/1.x transport connection broken: malformed MIME header line: "EOF"`:                {"malformed", "net/http: HTTP/1.x transport connection broken: malformed MIME header line"},
		`net/http: HTTP/1.x transport connection broken: no such host`:                                     {"other", "net/http: HTTP/1.x transport connection broken"},
		`http2: server sent GOAWAY and closed the connection; LastStreamID=1, ErrCode=NO_ERROR, debug="a"`: {"closed", "http2: server sent GOAWAY and closed the connection; LastStreamID=1, ErrCode=NO_ERROR"},
		`stream error: stream ID 1; PROTOCOL_ERROR; invalid header field name "a"`:                         {"reset", "stream error: stream ID 1; PROTOCOL_ERROR"},
		`connection error: COMPRESSION_ERROR`:                                                              {"malformed", "connection error: COMPRESSION_ERROR"},
		`invalid byte in chunk length`:                                                                     {"malformed", "invalid byte in chunk length"},
		`tls: failed to verify certificate: x509: certificate signed by unknown authority (possibly "a")`:  {"certificate", "tls: failed to verify certificate: x509: certificate signed by unknown authority"},
		`dial tcp 192.0.2.1:443: connect: connection refused`:                                              {"refused", "dial tcp 192.0.2.1:443: connect: connection refused"},
		`something else, EOF`: {"other", "the connection failed"},
	} {
		own, ok := errors.AsType[*CauseError](OwnWords(errors.New(text)))
		if !ok || *own != want {
			t.Errorf("%s becomes %v", text, own)
		}
	}
	for err, want := range map[error]string{
		&tls.CertificateVerificationError{Err: x509.HostnameError{Certificate: &x509.Certificate{DNSNames: []string{"a"}}, Host: "b"}}: "tls: the certificate is for another host",
		&net.OpError{Op: "proxyconnect", Net: "tcp", Err: errors.New(`malformed HTTP response "a"`)}:                                   "proxy: malformed HTTP response",
		&net.OpError{Op: "read", Net: "tcp", Err: errors.New("connection reset")}:                                                      "read tcp: connection reset",
		fmt.Errorf("a: %w", io.EOF): "unexpected EOF", // which must not end a body as if it were whole
		io.EOF:                      "EOF",
	} {
		if got := OwnWords(err).Error(); got != want {
			t.Errorf("%v becomes %q", err, got)
		}
	}
}

func TestAReadWithoutAnErrorAllocatesNothing(t *testing.T) {
	for _, err := range []error{nil, io.EOF} {
		if n := testing.AllocsPerRun(100, func() { _ = OwnWords(err) }); n > 0 {
			t.Errorf("%v allocations for %v", n, err)
		}
	}
}
