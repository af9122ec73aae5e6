package faults

import (
	"bufio"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestWhateverGoesWrongIsFailedOverOrFelt(t *testing.T) {
	if len(lbtest.StreamContent) != 0x3d {
		t.Fatalf("the chunk's size is %x", len(lbtest.StreamContent))
	}
	failOverOrFelt(t, "http", "", []fault{
		{"refused", nil, false, "unreachable", 502},
		{"accepted and closed", func(net.Conn) {}, false, "failed", 502},
		{"accepted and silent", stalls(""), false, "timeout", 504},
		{"reset at once", resets(""), false, "failed or unreachable", 502},
		{"reset after the request", reads(resets("")), false, "failed", 502},
		{"closed after the request", reads(sends("")), false, "failed", 502},
		{"silent after the request", reads(stalls("")), false, "timeout", 504},
		{"TLS to a plain port", reads(sends("\x15\x03\x01\x00\x02\x02\x46")), false, "failed", 502},
		{"half a status line", reads(sends("HTTP/1.1 20")), false, "failed", 502},
		{"half the headers", reads(resets("HTTP/1.1 200 OK\r\nContent-Type: text/ev")), false, "failed", 502},
		{"headers that stall", reads(stalls("HTTP/1.1 200 OK\r\nContent-Type: text/ev")), false, "timeout", 504},
		{"an interim reply and nothing more", reads(resets("HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")), false, "failed", 502},
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
		{"a stream that stalls after content", reads(stalls(chunkedStream + oneChunk)), true, "", 200},
		{"a stream with a broken chunk", reads(sends(chunkedStream + oneChunk + "zz\r\n")), true, "broken_stream", 200},
		{"a reply shorter than it says", reads(sends(plainReply + strings.Repeat("x", 100_000))), true, "broken_stream", 200},
		{"a reply reset in its middle", reads(resets(plainReply + strings.Repeat("x", 100_000))), true, "broken_stream", 200},
	})
}
