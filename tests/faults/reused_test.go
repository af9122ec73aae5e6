package faults

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// keepsAlive serves one request on each connection, keeps it, and does this
// once the next request comes. It counts the requests.
func keepsAlive(asked *atomic.Int32, next func(net.Conn)) func(net.Conn) {
	return func(conn net.Conn) {
		received := bufio.NewReader(conn)
		for n := range 2 {
			r, err := http.ReadRequest(received)
			if err != nil {
				return
			}
			io.Copy(io.Discard, r.Body)
			if asked.Add(1); n == 1 {
				next(conn)
				return
			}
			io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Backend: a\r\nContent-Length: 2\r\n\r\n{}")
		}
	}
}

// servesOne is the same by HTTP/2.
func servesOne(asked *atomic.Int32, next func(frames)) func(net.Conn) {
	return func(conn net.Conn) {
		n := 0
		answers(func(f frames) {
			asked.Add(1)
			if n++; n == 2 {
				next(f)
				return
			}
			begins("content-type", "application/json", "x-backend", "a")(f)
			brings("{}")(f)
			ends(f)
		})(conn)
	}
}

// Servers close connections that are idle, and some requests are on their way
// just then: uvicorn and Node after 5 s.
func TestARequestThatAReusedConnectionLosesIsSentAgainOnANewOne(t *testing.T) {
	config, trust := backendTLS(t)
	plain := config.Clone()
	plain.NextProtos = nil
	for _, c := range []struct {
		name  string
		serve func(t *testing.T, asked *atomic.Int32) (address string)
		// again reports whether a new connection is tried, which it is not if
		// the reply has begun
		again bool
	}{
		{"closed", func(t *testing.T, asked *atomic.Int32) string {
			return "http://" + rawBackend(t, keepsAlive(asked, sends("")))
		}, true},
		{"reset", func(t *testing.T, asked *atomic.Int32) string {
			return "http://" + rawBackend(t, keepsAlive(asked, resets("")))
		}, true},
		{"closed, TLS", func(t *testing.T, asked *atomic.Int32) string {
			return "https://" + rawBackend(t, overTLS(plain, keepsAlive(asked, sends(""))))
		}, true},
		{"cut, TLS", func(t *testing.T, asked *atomic.Int32) string {
			return "https://" + rawBackend(t, overTLS(plain, keepsAlive(asked, cuts(""))))
		}, true},
		{"reset, TLS", func(t *testing.T, asked *atomic.Int32) string {
			return "https://" + rawBackend(t, overTLS(plain, keepsAlive(asked, resets(""))))
		}, true},
		{"closed, HTTP/2", func(t *testing.T, asked *atomic.Int32) string {
			return "https://" + rawBackend(t, overTLS(config, servesOne(asked, hangsUp)))
		}, true},
		{"cut, HTTP/2", func(t *testing.T, asked *atomic.Int32) string {
			return "https://" + rawBackend(t, overTLS(config, servesOne(asked, isCut)))
		}, true},
		{"closed in its reply", func(t *testing.T, asked *atomic.Int32) string {
			return "http://" + rawBackend(t, keepsAlive(asked, sends("HTTP/1.1 200 O")))
		}, false},
		{"reset in its reply", func(t *testing.T, asked *atomic.Int32) string {
			return "http://" + rawBackend(t, keepsAlive(asked, resets("HTTP/1.1 200 OK\r\nContent-T")))
		}, false},
		{"reset by a word of HTTP/2", func(t *testing.T, asked *atomic.Int32) string {
			return "https://" + rawBackend(t, overTLS(config, servesOne(asked, isReset(2))))
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, kind := range []struct {
				name, path, body string
				repeatable       bool
			}{
				{"a chat", "chat/completions", `{"model":"gpt-4o"}`, true},
				{"a long chat", "chat/completions", `{"model":"gpt-4o","text":"` + strings.Repeat("x", 300<<10) + `"}`, true},
				{"a batch", "batches", "{}", false},
			} {
				if kind.name == "a long chat" && strings.HasSuffix(c.name, "HTTP/2") {
					continue // these backends open no window for it
				}
				t.Run(kind.name, func(t *testing.T) {
					var asked atomic.Int32
					s := lbtest.NewSites(t, "http")
					url := s.Add("openai_lb {\nbackend " + c.serve(t, &asked) + " {\nname a\n}\n" + trust + "\n}")
					s.Serve(t)
					url = strings.Replace(url, "chat/completions", kind.path, 1)
					client := s.NewClient(t, 1)
					lbtest.Post(client, url, kind.body).WantServed(t, "a")
					reply := lbtest.Post(client, url, kind.body)
					_, cooldown := s.LoggedOf(t, "a")
					if c.again && kind.repeatable {
						reply.WantServed(t, "a")
						if n := asked.Load(); n != 3 || cooldown != nil {
							t.Errorf("the backend had %d requests, want 3, and got the cooldown %+v", n, cooldown)
						}
						return
					}
					if n := asked.Load(); n != 2 || reply.Status != 502 {
						t.Errorf("the client got %d, and the backend had %d requests, want 502 and 2", reply.Status, n)
					}
				})
			}
		})
	}
}

// A request that kills its connection must not kill one after the other.
func TestARequestIsSentTwiceAtMostToConnectionsThatLoseIt(t *testing.T) {
	s := lbtest.NewSites(t, "http")
	var asked, waiting atomic.Int32
	begin := make(chan struct{})
	address := rawBackend(t, func(conn net.Conn) {
		received := bufio.NewReader(conn)
		for {
			r, err := http.ReadRequest(received)
			if err != nil {
				return
			}
			io.Copy(io.Discard, r.Body)
			if r.Header.Get("X-Deadly") != "" {
				asked.Add(1)
				return
			}
			waiting.Add(1)
			<-begin
			io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Backend: a\r\nContent-Length: 2\r\n\r\n{}")
		}
	})
	url := s.Add("openai_lb {\nbackend http://" + address + " {\nname a\n}\n}")
	s.Serve(t)
	client := s.NewClient(t, 1)
	served := make(chan lbtest.Reply)
	const idle = 10
	for range idle {
		go func() { served <- lbtest.Ask(client, url) }()
	}
	lbtest.WaitFor(t, func() bool { return waiting.Load() == idle })
	close(begin)
	for range idle {
		(<-served).WantServed(t, "a")
	}
	lbtest.Ask(client, url, "X-Deadly", "1").WantError(t, 502, "upstream_unreachable")
	if n := asked.Load(); n != 2 {
		t.Errorf("it was sent %d times, want 2", n)
	}
}

// A backend that was restarted has lost all of its connections at once.
func TestARequestIsServedAlthoughAllIdleConnectionsLoseIt(t *testing.T) {
	s := lbtest.NewSites(t, "http")
	var asked, waiting atomic.Int32
	begin := make(chan struct{})
	url := s.Add("openai_lb {\nbackend http://" + rawBackend(t, func(conn net.Conn) {
		received := bufio.NewReader(conn)
		for n := range 2 {
			r, err := http.ReadRequest(received)
			if err != nil {
				return
			}
			io.Copy(io.Discard, r.Body)
			if asked.Add(1); n == 1 {
				return
			}
			waiting.Add(1)
			<-begin
			io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Backend: b\r\nContent-Length: 2\r\n\r\n{}")
		}
	}) + " {\nname b\n}\n}")
	s.Serve(t)
	client := s.NewClient(t, 1)
	served := make(chan lbtest.Reply)
	const idle = 10
	for range idle {
		go func() { served <- lbtest.Ask(client, url) }()
	}
	lbtest.WaitFor(t, func() bool { return waiting.Load() == idle })
	close(begin)
	for range idle {
		(<-served).WantServed(t, "b")
	}
	lbtest.Ask(client, url).WantServed(t, "b")
	if _, cooldown := s.LoggedOf(t, "b"); cooldown != nil || asked.Load() != idle+2 {
		t.Errorf("the backend had %d requests, want %d, and got the cooldown %+v", asked.Load(), idle+2, cooldown)
	}
}
