package faults

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/net/http2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// For a client of HTTP/1.0, and nginx is one to its upstreams, a reply without
// a length ends with its connection.
func TestAClientOfHTTP10SeesThatAReplyWasCut(t *testing.T) {
	config, trust := backendTLS(t)
	whole := lbtest.StreamContent + lbtest.StreamEnd
	replies := []struct {
		name, backend string
		clean         bool
	}{
		{"a whole stream", "http://" + rawBackend(t, reads(sends(chunkedStream+oneChunk+"e\r\n"+lbtest.StreamEnd+"\r\n0\r\n\r\n"))), true},
		{"a whole stream of HTTP/1.0", "http://" + rawBackend(t, reads(sends("HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"+whole))), true},
		{"a whole stream of HTTP/2", "https://" + rawBackend(t, overTLS(config, answers(beginsStream, brings(whole), ends))), true},
		{"a stream that is closed", "http://" + rawBackend(t, reads(sends(chunkedStream+oneChunk))), false},
		{"a stream that is reset", "http://" + rawBackend(t, reads(resets(chunkedStream+oneChunk))), false},
		{"a stream of HTTP/1.0 that is reset", "http://" + rawBackend(t, reads(resets("HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"+lbtest.StreamContent))), false},
		{"a stream that stalls", "http://" + rawBackend(t, reads(stalls(chunkedStream+oneChunk))), false},
		{"a stream of HTTP/2 that is reset", "https://" + rawBackend(t, overTLS(config, answers(beginsStream, brings(lbtest.StreamContent), isReset(http2.ErrCodeInternal)))), false},
		{"a reply with a length that is closed", "http://" + rawBackend(t, reads(sends(plainReply+strings.Repeat("x", 100_000)))), false},
		{"an error that is closed", "http://" + rawBackend(t, reads(sends("HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n20000\r\n"+strings.Repeat("x", 100_000)))), false},
	}
	certificate, client := lbtest.ServerCertificate(t)
	trusts := client.Transport.(*http.Transport).TLSClientConfig
	for _, c := range []struct{ name, options, scheme, hello string }{
		{"by TCP", "", "http", ""},
		{"by TCP, if the server speaks nothing newer than HTTP/1.1", "protocols h1", "http", ""},
		{"behind the PROXY protocol", "listener_wrappers {\nproxy_protocol {\nallow 127.0.0.1/32\n}\n}", "http", "PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n"},
		{"by TLS", "", "https", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			port := lbtest.FreePort(t)
			address := fmt.Sprintf("127.0.0.1:%d", port)
			tlsLine, sites := "", ""
			if c.scheme == "https" {
				tlsLine = certificate
			}
			for n, reply := range replies {
				sites += fmt.Sprintf("handle /%d/* {\nuri strip_prefix /%[1]d\nopenai_lb {\nbackend %s\nstream_idle_timeout 1s\n%s\n}\n}\n", n, reply.backend, trust)
			}
			lbtest.Run(t, fmt.Sprintf("{\nadmin off\nauto_https off\ndefault_bind 127.0.0.1\nservers {\n%s\n}\n}\n%s://:%d {\n%s\n%s}", c.options, c.scheme, port, tlsLine, sites))
			connect := func() (net.Conn, error) {
				conn, err := net.Dial("tcp", address)
				if err != nil || c.scheme == "http" {
					return conn, err
				}
				own := trusts.Clone()
				own.NextProtos, own.ServerName = nil, "example.com"
				return tls.Client(conn, own), nil
			}
			var rows []lbtest.Row
			for n, reply := range replies {
				rows = append(rows, lbtest.Row{Name: reply.name, Test: func(t *testing.T) {
					for _, version := range []string{"1.0", "1.1"} {
						conn, err := connect()
						if err != nil {
							t.Fatal(err)
						}
						defer conn.Close()
						const body = `{"stream":true}`
						fmt.Fprintf(conn, "%sPOST /%d/v1/chat/completions HTTP/%s\r\nHost: example.com\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", c.hello, n, version, len(body), body)
						res, err := http.ReadResponse(bufio.NewReader(conn), nil)
						if err == nil {
							_, err = io.Copy(io.Discard, res.Body)
						}
						if (err == nil) != reply.clean {
							t.Errorf("HTTP/%s: the reply ends with %v", version, err)
						}
						if version == "1.0" && c.scheme == "http" && !reply.clean && !errors.Is(err, syscall.ECONNRESET) {
							t.Errorf("the reply ends with %v, not with a reset", err)
						}
						if version == "1.0" && c.scheme == "https" && !reply.clean && !strings.Contains(err.Error(), "tls: ") {
							t.Errorf("the reply ends with %v, not with an error of TLS: nginx takes anything else for a clean end", err)
						}
					}
				}})
			}
			lbtest.SideBySide(t, rows)
		})
	}
}
