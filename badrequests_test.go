package openailb

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

// TestAmbiguousRequestsAreNotSmuggledPast sends what proxies and servers were
// seen to disagree about (RFC 9112 sections 6.1, 6.3 and 11.2). A backend gets
// at most the one request, with the body that the answer was about.
func TestAmbiguousRequestsAreNotSmuggledPast(t *testing.T) {
	const hidden = "GET /admin HTTP/1.1\r\nHost: a\r\nX-Hidden: 1\r\n\r\n"
	chunked := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len("{}"), "{}")
	for name, request := range map[string]string{
		"both lengths":               "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked + hidden,
		"two lengths":                "Content-Length: 2\r\nContent-Length: 6\r\n\r\n{}" + hidden,
		"a list of lengths":          "Content-Length: 2, 6\r\n\r\n{}" + hidden,
		"a signed length":            "Content-Length: +2\r\n\r\n{}" + hidden,
		"a hexadecimal length":       "Content-Length: 0x2\r\n\r\n{}" + hidden,
		"a negative length":          "Content-Length: -2\r\n\r\n{}" + hidden,
		"an unknown coding":          "Transfer-Encoding: xchunked\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"chunked and more":           "Transfer-Encoding: chunked, identity\r\n\r\n" + chunked + hidden,
		"two codings":                "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + chunked + hidden,
		"a tab before the coding":    "Transfer-Encoding:\tchunked\r\nContent-Length: 4\r\n\r\n" + chunked + hidden,
		"a space before the colon":   "Transfer-Encoding : chunked\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"a folded header":            "X-Folded: a\r\n Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"a bare line feed in one":    "X-Bare: a\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"a bare carriage return":     "X-Bare: a\rTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"a zero byte":                "X-Zero: a\x00b\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"a chunk of no size":         "Transfer-Encoding: chunked\r\n\r\n\r\n{}\r\n0\r\n\r\n" + hidden,
		"a chunk of too large size":  "Transfer-Encoding: chunked\r\n\r\n10000000000000002\r\n{}\r\n0\r\n\r\n" + hidden,
		"a chunk with bare feeds":    "Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n" + hidden,
		"an upgrade":                 "Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"what is hop-by-hop":         "Connection: Content-Length, Api-Key\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"one request and another":    "Content-Length: 2\r\n\r\n{}" + hidden,
		"a body that ends too early": "Content-Length: 200\r\n\r\n{}" + hidden,
	} {
		t.Run(name, func(t *testing.T) {
			a, backend := listen(t, "a")
			address := serveAt(t, "openai_lb {\nclient_key x key-of-the-caller\nbackend "+backend.URL+" {\nauth api_key\napi_key key-of-a\n}\n}")
			conn, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			go func() {
				io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: lb\r\nApi-Key: key-of-the-caller\r\n"+request)
				conn.(*net.TCPConn).CloseWrite()
			}()
			conn.SetReadDeadline(time.Now().Add(10 * time.Second))
			var statuses []int
			for replies := bufio.NewReader(conn); ; {
				res, err := http.ReadResponse(replies, nil)
				if err != nil {
					break
				}
				io.Copy(io.Discard, res.Body)
				statuses = append(statuses, res.StatusCode)
			}
			calls := a.received()
			if len(calls) > 1 || len(calls) == 1 && (calls[0].request.URL.Path == "/admin" || calls[0].bodyHash != sha([]byte("{}")) && calls[0].readErr == nil) {
				t.Errorf("a got %d requests, the first %v with %d bytes", len(calls), calls[0].request.URL, calls[0].bodyBytes)
			}
			for _, c := range calls {
				if c.request.Header.Get("X-Hidden") != "" || c.request.Header.Get("Api-Key") != "key-of-a" {
					t.Errorf("a got %v", c.request.Header)
				}
			}
			if len(statuses) > 2 || len(statuses) == 2 && statuses[1] != 401 && statuses[1] != 400 {
				t.Errorf("client got %v: the hidden request was answered", statuses)
			}
			if len(calls) == 0 && (len(statuses) == 0 || statuses[0] < 400) && name != "a body that ends too early" {
				t.Errorf("client got %v", statuses)
			}
		})
	}
}

func TestAHeaderOverCaddysLimitIsRefused(t *testing.T) {
	a, backend := listen(t, "a")
	address := serveAt(t, "openai_lb {\nbackend "+backend.URL+"\n}")
	reply := ask(newClient(t), "http://"+address+"/v1/x", "X-Large", strings.Repeat("x", 2<<20))
	if reply.err == nil && reply.status != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("client got %d, want 431", reply.status)
	}
	if n := len(a.received()); n != 0 {
		t.Errorf("a was called %d times", n)
	}
}

// TestACompressedErrorIsReadNoFurtherThanItsLimit decodes what is a thousand
// times as long as it looks.
func TestACompressedErrorIsReadNoFurtherThanItsLimit(t *testing.T) {
	zeros := make([]byte, 64<<20)
	var zipped, zstdCoded bytes.Buffer
	z := gzip.NewWriter(&zipped)
	z.Write(zeros)
	z.Close()
	s, err := zstd.NewWriter(&zstdCoded)
	if err != nil {
		t.Fatal(err)
	}
	s.Write(zeros)
	s.Close()
	for encoding, bomb := range map[string][]byte{"gzip": zipped.Bytes(), "zstd": zstdCoded.Bytes()} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		text, all := decode(bomb, encoding)
		runtime.ReadMemStats(&after)
		if len(text) > errorBodyLimit || all {
			t.Errorf("%s: %d bytes of %d were decoded to %d", encoding, len(bomb), 64<<20, len(text))
		}
		if used := after.TotalAlloc - before.TotalAlloc; used > 8<<20 {
			t.Errorf("%s: decoding took %d bytes of memory", encoding, used)
		}
	}
}

func TestABackendCannotSayWhenItIsBackBeyondTheLimit(t *testing.T) {
	for _, hint := range []string{"86400", "99999999999999999999", "1e300", "Fri, 31 Dec 9999 23:59:59 GMT", "106751d"} {
		inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
			w.backends["a"].replies(throttled(hint))
			reply := w.post(`{}`)
			reply.wantError(t, 429, "rate_limit_exceeded")
			w.backends["a"].recovers()
			time.Sleep(5 * time.Minute)
			w.post(`{}`).wantServed(t, "a")
		})
	}
}

// TestABodyThatStallsIsNotWaitedFor uses Caddy's own limit, with a body that is
// kept for replay and one that streams to the backend.
func TestABodyThatStallsIsNotWaitedFor(t *testing.T) {
	for _, buffers := range []string{"1MiB", "1B"} {
		a, backend := listen(t, "a")
		port := freePort(t)
		run(t, fmt.Sprintf("{\nadmin off\nservers {\ntimeouts {\nread_body_idle 200ms\n}\n}\n}\nhttp://:%d {\nopenai_lb {\nbackend %s\nrequest_buffers %s\n}\n}", port, backend.URL, buffers))
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		io.WriteString(conn, "POST /v1/x HTTP/1.1\r\nHost: lb\r\nContent-Length: 100\r\n\r\n{\"model\":")
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(buffers, err)
		}
		body, _ := io.ReadAll(res.Body)
		if res.StatusCode != 408 || !strings.Contains(string(body), `"code":"request_timeout"`) {
			t.Errorf("with request_buffers %s, client got %d %s", buffers, res.StatusCode, body)
		}
		ask(newClient(t), fmt.Sprintf("http://127.0.0.1:%d/v1/x", port)).wantServed(t, "a")
		for _, c := range a.received() {
			if c.readErr == nil && c.bodyBytes == 9 {
				t.Error("a took a part of the body for all of it")
			}
		}
	}
}
