package faults

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// echoed is the key that backends put wherever a reply has a place for text.
const echoed = "sk-echoed-by-the-backend"

// echoes are replies to the request of a client, which break or not.
var echoes = map[string]string{
	"a line that is not HTTP":                echoed + "\r\n\r\n",
	"a line without an end":                  echoed,
	"a status that is a key":                 "HTTP/1.1 " + echoed + "\r\n\r\n",
	"a version that is a key":                "HTTP/" + echoed + " 200 OK\r\n\r\n",
	"a reason that is a key":                 "HTTP/1.1 400 " + echoed + "\r\nContent-Length: 0\r\n\r\n",
	"a header without a colon":               "HTTP/1.1 200 OK\r\nno colon " + echoed + "\r\n\r\n",
	"a header that begins with a blank":      "HTTP/1.1 200 OK\r\n " + echoed + ": x\r\n\r\n",
	"a header's name with a blank":           "HTTP/1.1 200 OK\r\n" + echoed + " : x\r\n\r\n",
	"a header's name":                        "HTTP/1.1 200 OK\r\n" + echoed + ": x\r\nContent-Length: 2\r\n\r\n{}",
	"a header's value":                       "HTTP/1.1 200 OK\r\nX-Debug: " + echoed + "\r\nContent-Length: 2\r\n\r\n{}",
	"a length":                               "HTTP/1.1 200 OK\r\nContent-Length: " + echoed + "\r\n\r\n",
	"two lengths":                            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: " + echoed + "\r\n\r\n",
	"a transfer encoding":                    "HTTP/1.1 200 OK\r\nTransfer-Encoding: " + echoed + "\r\n\r\n",
	"a trailer that is announced":            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: " + echoed + "\r\n\r\n0\r\n" + echoed + ": x\r\n\r\n",
	"a trailer that is not allowed":          "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: Content-Length, " + echoed + "\r\n\r\n0\r\n\r\n",
	"another protocol":                       "HTTP/1.1 101 " + echoed + "\r\nConnection: upgrade\r\nUpgrade: " + echoed + "\r\n\r\n" + echoed,
	"an interim reply":                       "HTTP/1.1 103 Early Hints\r\nLink: " + echoed + "\r\n\r\n" + echoed + "\r\n\r\n",
	"a broken interim reply":                 "HTTP/1.1 103 Early Hints\r\n" + echoed + "\r\n\r\n",
	"a redirect":                             "HTTP/1.1 302 Found\r\nLocation: https://elsewhere.example/" + echoed + "\r\nContent-Length: 0\r\n\r\n",
	"a redirect that is no URL":              "HTTP/1.1 307 Found\r\nLocation: %zz://" + echoed + "\r\nContent-Length: 0\r\n\r\n",
	"an error":                               errorWith("500 Oops"),
	"a throttle":                             errorWith("429 Later"),
	"a rejected key":                         errorWith("401 No"),
	"a missing model":                        errorWith("404 None"),
	"no JSON":                                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 24\r\n\r\n" + echoed,
	"no gzip":                                "HTTP/1.1 500 OK\r\nContent-Encoding: gzip\r\nContent-Length: 24\r\n\r\n" + echoed,
	"more than the reply":                    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}" + echoed,
	"a stream's first chunk":                 chunkedStream + echoed + "\r\n",
	"a chunk's length":                       chunkedStream + oneChunk + echoed + "\r\n",
	"a chunk's end":                          chunkedStream + oneChunk + "1\r\n" + echoed + "\r\n",
	"a chunk's extension":                    chunkedStream + oneChunk + "1;" + strings.Repeat(echoed, 1000) + "\r\n",
	"a stream's trailer without a colon":     chunkedStream + oneChunk + "0\r\nno colon " + echoed + "\r\n\r\n",
	"a stream's trailer":                     chunkedStream + oneChunk + "0\r\nX-Debug: " + echoed + "\r\n\r\n",
	"a stream's trailer of that name":        chunkedStream + oneChunk + "0\r\n" + echoed + ": x\r\n\r\n",
	"a stream's trailer with a blank":        chunkedStream + oneChunk + "0\r\n " + echoed + ": x\r\n\r\n",
	"a stream's error":                       chunkedStream + oneChunk + chunk(`data: {"error":{"message":"`+echoed+`","code":"x"}}`+"\n\n"),
	"a stream's error before its content":    chunkedStream + chunk(`data: {"error":{"message":"x","code":"`+echoed+`"}}`+"\n\n"),
	"a whole reply that ends in its trailer": "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + echoed + "\r\n\r\n",
}

func chunk(text string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(text), text) }

func errorWith(status string) string {
	body := fmt.Sprintf(`{"error":{"message":%[1]q,"code":%[1]q,"type":%[1]q}}`, echoed)
	return fmt.Sprintf("HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body)
}

// framed are the same for HTTP/2.
var framed = map[string][]func(frames){
	"it goes away with a key":               {goesAwaySaying},
	"it goes away with a key and hangs up":  {goesAwaySaying, hangsUp},
	"it goes away with a key after content": {beginsStream, brings(lbtest.StreamContent), goesAwaySaying, hangsUp},
	"a status that is a key":                {sendsHeaders(echoed), ends},
	"a header's value":                      {begins("x-debug", echoed), ends},
	"a header's name":                       {begins(echoed, "x"), ends},
	"a header's name in capitals":           {begins("X-"+echoed, "x"), ends},
	"a header's name with a blank":          {begins("x "+echoed, "x"), ends},
	"a header's value with a line":          {begins("x-debug", "a\n"+echoed), ends},
	"a pseudo header":                       {begins(":"+echoed, "x"), ends},
	"a length":                              {begins("content-length", echoed), ends},
	"a header twice":                        {sendsHeaders("200", ":status", echoed), ends},
	"a trailer":                             {beginsStream, brings(lbtest.StreamContent), trails("x-debug", echoed)},
	"a trailer's name in capitals":          {beginsStream, brings(lbtest.StreamContent), trails("X-"+echoed, "x")},
	"a trailer that is a pseudo header":     {beginsStream, brings(lbtest.StreamContent), trails(":"+echoed, "x")},
	"an interim reply":                      {sendsHeaders("103", "link", echoed), sendsHeaders("103", ":"+echoed, "x"), ends},
	"bytes that are no frame":               {func(f frames) { f.conn.Write([]byte(strings.Repeat(echoed, 10))) }},
	"bytes that are no frame after content": {beginsStream, brings(lbtest.StreamContent), func(f frames) { f.conn.Write([]byte(strings.Repeat(echoed, 10))) }, hangsUp},
	"a frame of another type":               {func(f frames) { f.WriteRawFrame(0xfe, 0, f.stream, []byte(echoed)) }, beginsStream, brings(lbtest.StreamContent), isReset(http2.ErrCodeInternal)},
	"an unfinished header":                  {func(f frames) { f.WriteRawFrame(http2.FrameHeaders, 4, f.stream, []byte(echoed)) }},
}

func goesAwaySaying(f frames) { f.WriteGoAway(f.stream, http2.ErrCodeEnhanceYourCalm, []byte(echoed)) }

// trails ends the stream with trailers in pairs.
func trails(headers ...string) func(frames) {
	return func(f frames) {
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: f.stream, BlockFragment: block(headers...), EndHeaders: true, EndStream: true})
	}
}

func hangUp(conn net.Conn) { conn.Close() }

// TestNoReplyGetsAKeyIntoTheLog has backends put the key of a request, their
// own or the caller's, where the errors of net/http quote it. No line of the
// log, Caddy's own among them, may show it.
func TestNoReplyGetsAKeyIntoTheLog(t *testing.T) {
	config, trust := backendTLS(t)
	named, root := certificateFor(t, echoed+".example", time.Now().Add(time.Hour))
	s := lbtest.NewSites(t, "https")
	var rows []lbtest.Row
	add := func(name, backend, options string) {
		for _, auth := range []string{"auth bearer\napi_key " + echoed, "auth passthrough"} {
			url := s.Add(fmt.Sprintf("openai_lb {\nbackend %s {\n%s\n}\nresponse_header_timeout 1s\nstream_first_event_timeout 1s\nstream_idle_timeout 1s\n%s\n}", backend, auth, options))
			rows = append(rows, lbtest.Row{Name: name + " " + strings.Fields(auth)[1], Waits: true, Test: func(t *testing.T) {
				client := s.NewClient(t, 1)
				client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
				for _, body := range []string{`{"stream":true}`, `{}`} {
					reply := lbtest.Post(client, url, body, "Authorization", "Bearer "+echoed)
					if text := strings.ToLower(fmt.Sprint(reply.Header)); strings.Contains(text, echoed) {
						t.Errorf("client got %s", text)
					}
				}
				lbtest.Get(client, url, "Authorization", "Bearer "+echoed, "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA==")
			}})
		}
	}
	for name, text := range echoes {
		add(name, "http://"+rawBackend(t, reads(sends(text))), "")
	}
	for name, steps := range framed {
		add("HTTP/2: "+name, "https://"+rawBackend(t, overTLS(config, answers(steps...))), trust)
	}
	add("TLS: a plain reply", "https://"+rawBackend(t, afterHello(sends("HTTP/1.1 400 "+echoed+"\r\n\r\n"+echoed))), trust)
	add("TLS: no TLS", "https://"+rawBackend(t, afterHello(sends(echoed))), trust)
	elsewhere := &tls.Config{Certificates: []tls.Certificate{named}}
	_, port, _ := net.SplitHostPort(rawBackend(t, overTLS(elsewhere, hangUp)))
	add("TLS: another name", "https://localhost:"+port, "transport http {\ntls_trust_pool file "+root+"\n}")
	add("TLS: an unknown issuer", "https://localhost:"+port, "")
	s.Serve(t)
	lbtest.SideBySide(t, rows)
	lines := 0
	for line := range strings.Lines(s.Log(t)) {
		lines++
		if i := strings.Index(strings.ToLower(line), echoed); i >= 0 {
			t.Errorf("the key is logged: %s … %s", line[:150], line[max(0, i-100):i])
		}
	}
	if lines < 5*len(rows) {
		t.Errorf("%d lines are logged of %d pools", lines, len(rows))
	}
}
