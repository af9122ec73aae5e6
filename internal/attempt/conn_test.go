package attempt

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

func clientOf(t testing.TB) *http.Client {
	transport := &http.Transport{DialContext: Dialing(new(net.Dialer).DialContext)}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func TestABodyArrivesAsItIs(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Write(body)
	}))
	defer server.Close()
	c := clientOf(t)
	for _, size := range []int{1, 3900, 4096, 5000, 64 << 10, 3 << 20} {
		text := strings.Repeat("0123456789abcdef", size/16+1)[:size]
		for name, body := range map[string]io.Reader{
			"in memory": bytes.NewReader([]byte(text)), "in pieces": io.MultiReader(strings.NewReader(text)),
		} {
			r, _ := http.NewRequest(http.MethodPost, server.URL, io.NopCloser(body))
			r.ContentLength = int64(size)
			res, err := c.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(res.Body)
			if res.Body.Close(); string(got) != text || err != nil {
				t.Errorf("of %d bytes %s, %d came back, %v", size, name, len(got), err)
			}
		}
	}
}

func TestNoMoreIsWrittenThanAnnounced(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	c, err := Dialing(new(net.Dialer).DialContext)(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	peer, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	body := bytes.NewReader(make([]byte, 100))
	if n, err := c.(io.ReaderFrom).ReadFrom(&io.LimitedReader{R: body, N: 60}); n != 60 || err == nil {
		t.Errorf("%d bytes were written, %v, want 60 and an error", n, err)
	}
	c.Close()
	if got, err := io.ReadAll(peer); len(got) != 60 || err != nil {
		t.Errorf("%d bytes arrived, %v, want 60", len(got), err)
	}
}

// refusing is a connection whose other side takes nothing.
type refusing struct {
	net.Conn
	err error
}

func (r refusing) Write([]byte) (int, error) { return 0, r.err }
func (r refusing) Close() error              { return nil }

func TestAFailedWriteOfAnUploadWaitsUntilItsReaderCloses(t *testing.T) {
	closes := func(c net.Conn) {
		time.Sleep(200 * time.Millisecond)
		c.Close()
	}
	goesOn := func(net.Conn) {}
	for _, c := range []struct {
		name    string
		uploads int
		length  int // of the write
		err     error
		reader  func(net.Conn)
		wait    time.Duration
	}{
		{"the reader has met the end", 1, piece, syscall.EPIPE, closes, 200 * time.Millisecond},
		{"the other side goes on", 2, piece, syscall.EPIPE, goesOn, time.Second},
		{"the write was late", 1, piece, os.ErrDeadlineExceeded, goesOn, 0},
		{"a request that is no upload, or a handshake", 0, 3000, syscall.ECONNRESET, goesOn, 0},
		{"the end of a TLS connection, which its reader writes", 1, 31, syscall.EPIPE, goesOn, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				conn, err := Dialing(func(context.Context, string, string) (net.Conn, error) {
					return refusing{err: c.err}, nil
				})(t.Context(), "tcp", "")
				if err != nil {
					t.Fatal(err)
				}
				for range c.uploads {
					uploadBegins(tls.Client(tls.Client(conn, nil), nil)) // to a backend behind a proxy
				}
				uploadBegins(conn)
				uploadEnds(conn)
				go c.reader(conn)
				for _, wait := range []time.Duration{c.wait, 0} { // once only
					begin := time.Now()
					if _, err := conn.Write(make([]byte, c.length)); err != c.err || time.Since(begin) != wait {
						t.Errorf("the write returned %v after %s, want %v after %s", err, time.Since(begin), c.err, wait)
					}
				}
			})
		})
	}
}

// counting is a connection that counts the writes to it.
type counting struct {
	net.Conn
	writes *int
}

func (c counting) Write(p []byte) (int, error) {
	*c.writes++
	return c.Conn.Write(p)
}

// BenchmarkPost shows what WriteBuffer saves.
func BenchmarkPost(b *testing.B) {
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }))
	defer server.Close()
	body := make([]byte, 8000)
	for _, buffer := range []int{4 << 10, WriteBuffer} {
		b.Run(strconv.Itoa(buffer), func(b *testing.B) {
			writes := 0
			transport := &http.Transport{WriteBufferSize: buffer, DialContext: Dialing(func(ctx context.Context, network, address string) (net.Conn, error) {
				c, err := new(net.Dialer).DialContext(ctx, network, address)
				return counting{c, &writes}, err
			})}
			defer transport.CloseIdleConnections()
			c := http.Client{Transport: transport}
			b.ReportAllocs()
			for b.Loop() {
				res, err := c.Post(server.URL, "application/json", bytes.NewReader(body))
				if err != nil {
					b.Fatal(err)
				}
				res.Body.Close()
			}
			b.ReportMetric(float64(writes)/float64(b.N), "writes/op")
		})
	}
}
