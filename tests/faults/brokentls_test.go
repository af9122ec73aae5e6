package faults

import (
	"crypto/tls"
	"io"
	"net"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestWhateverGoesWrongInTLSIsFailedOverOrFelt(t *testing.T) {
	in, ago := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	good, goodFile := certificateFor(t, "127.0.0.1", in)
	other, otherFile := certificateFor(t, "other.example.com", in)
	expired, expiredFile := certificateFor(t, "127.0.0.1", ago)
	unknown, _ := certificateFor(t, "127.0.0.1", in)
	shows := func(certificate tls.Certificate, then func(net.Conn)) func(net.Conn) {
		return overTLS(&tls.Config{Certificates: []tls.Certificate{certificate}}, then)
	}
	serves := reads(sends("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"))
	trust := "transport http {\ntls_trust_pool file " + goodFile + " " + otherFile + " " + expiredFile + "\n}"
	failOverOrFelt(t, "https", trust, []fault{
		{"refused", nil, false, "unreachable", 502},
		{"closed before the handshake", func(net.Conn) {}, false, "unreachable", 502},
		{"closed in the handshake", afterHello(sends("")), false, "unreachable", 502},
		{"reset in the handshake", afterHello(resets("")), false, "unreachable", 502},
		{"silent in the handshake", afterHello(stalls("")), false, "timeout", 504},
		{"bytes that are no TLS", afterHello(sends("\x00\x01\x02 not TLS at all")), false, "unreachable", 502},
		{"HTTP in place of TLS", afterHello(sends("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")), false, "unreachable", 502},
		{"half a hello", afterHello(sends("\x16\x03\x03\x00\x7a\x02\x00")), false, "unreachable", 502},
		{"an alert", afterHello(sends("\x15\x03\x03\x00\x02\x02\x28")), false, "unreachable", 502},
		{"a certificate of nobody we trust", shows(unknown, serves), false, "unreachable", 502},
		{"a certificate for another host", shows(other, serves), false, "unreachable", 502},
		{"a certificate that is over", shows(expired, serves), false, "unreachable", 502},
		{"closed after the handshake", shows(good, func(net.Conn) {}), false, "failed", 502},
		{"garbage after the handshake", shows(good, func(conn net.Conn) {
			io.WriteString(conn.(*tls.Conn).NetConn(), "not TLS any more")
		}), false, "failed", 502},
		{"cut before the headers", shows(good, reads(cuts(""))), false, "failed", 502},
		{"cut after content", shows(good, reads(cuts(chunkedStream+oneChunk))), true, "broken_stream", 200},
		{"reset after content", shows(good, reads(resets(chunkedStream+oneChunk))), true, "broken_stream", 200},
		// Go takes a FIN for the end here, with or without the farewell of TLS
		{"reset where the connection's end is the reply's", shows(good, reads(resets("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"+lbtest.StreamContent))), true, "broken_stream", 200},
		{"garbage after content", shows(good, reads(func(conn net.Conn) {
			io.WriteString(conn, chunkedStream+oneChunk)
			io.WriteString(conn.(*tls.Conn).NetConn(), "not TLS any more")
		})), true, "broken_stream", 200},
	})
}
