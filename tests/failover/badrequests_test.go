package failover

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
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
			a, backend := lbtest.Listen(t, "a")
			address := lbtest.ServeAt(t, "openai_lb {\nclient_key x key-of-the-caller\nbackend "+backend.URL+" {\nauth api_key\napi_key key-of-a\n}\n}")
			conn, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			go func() {
				io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: lb\r\nApi-Key: key-of-the-caller\r\n"+request)
				conn.(*net.TCPConn).CloseWrite()
			}()
			conn.SetReadDeadline(time.Now().Add(2 * time.Minute))
			var statuses []int
			for replies := bufio.NewReader(conn); ; {
				res, err := http.ReadResponse(replies, nil)
				if err != nil {
					break
				}
				io.Copy(io.Discard, res.Body)
				statuses = append(statuses, res.StatusCode)
			}
			calls := a.Received()
			if len(calls) > 1 || len(calls) == 1 && (calls[0].Request.URL.Path == "/admin" || calls[0].BodyHash != lbtest.Hash([]byte("{}")) && calls[0].ReadErr == nil) {
				t.Errorf("a got %d requests, the first %v with %d bytes", len(calls), calls[0].Request.URL, calls[0].BodyBytes)
			}
			for _, c := range calls {
				if c.Request.Header.Get("X-Hidden") != "" || c.Request.Header.Get("Api-Key") != "key-of-a" {
					t.Errorf("a got %v", c.Request.Header)
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
	a, backend := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, "openai_lb {\nbackend "+backend.URL+"\n}")
	reply := lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/v1/x", "X-Large", strings.Repeat("x", 2<<20))
	if reply.Err == nil && reply.Status != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("client got %d, want 431", reply.Status)
	}
	if n := len(a.Received()); n != 0 {
		t.Errorf("a was called %d times", n)
	}
}

func TestOddRequestsReachABackendOrAnAnswerAndStartNoCooldown(t *testing.T) {
	backend := &lbtest.Backend{Name: "a"}
	_, server := lbtest.Listen(t, "unused")
	server.Config.Handler = backend
	address := lbtest.ServeAt(t, "openai_lb {\nbackend "+server.URL+"\nresponse_header_timeout 20s\n}")
	for _, request := range []string{
		"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
		"GET http:foo HTTP/1.1\r\nHost: x\r\n\r\n",
		"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
		"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
		"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /v1/x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n",
	} {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, request)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		conn.Close()
		if err != nil {
			t.Errorf("%q gives %v", request, err)
			continue
		}
		if res.StatusCode >= 500 {
			t.Errorf("%q gives %d", request, res.StatusCode)
		}
	}
	lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/v1/x").WantServed(t, "a")
}

func TestNoPathLeadsOutOfABackendsBasePath(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a/team-a\n}", func(t *testing.T, w *lbtest.World) {
		for _, path := range []string{"/v1/../../admin", "/v1/%2e%2e/admin", "/..", "/v1/x%2F..%2F..%2Fadmin", "/./v1", "/v1/..%5C..%5Cadmin"} {
			r := w.Request(http.MethodPost, "/", nil)
			r.URL.Opaque = "//lb" + path
			w.Send(r).WantError(t, 400, "invalid_path")
		}
		w.WantCalls(map[string]int{"a": 0})
		w.Send(w.Request(http.MethodPost, "/v1/files/..a/.b", nil)).WantServed(t, "a")
	})
}

func TestABodyOverALimitIsRefusedInOpenAIsWords(t *testing.T) {
	_, server := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, "request_body {\nmax_size 1KB\n}\nopenai_lb {\nbackend "+server.URL+"\n}")
	r := lbtest.NewRequest(t, http.MethodPost, "http://"+address+"/v1/chat/completions", lbtest.Chunked(make([]byte, 4000)))
	res := lbtest.Do(t, lbtest.NewClient(t), r)
	body, err := io.ReadAll(res.Body)
	lbtest.Reply{Status: res.StatusCode, Header: res.Header, Body: string(body), Err: err}.WantError(t, 413, "request_too_large")
}
