package faults

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestABackendWithoutHeadersInTimeIsLeft(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a b", "response_header_timeout 30s"), func(t *testing.T, w *lbtest.World) {
		left := make(chan time.Time, 1)
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			left <- time.Now()
		})
		start := time.Now()
		w.Post(`{}`).WantServed(t, "b")
		if waited := time.Since(start); waited != 30*time.Second {
			t.Errorf("waited %s for a, want 30s", waited)
		}
		if at := <-left; at.Sub(start) != 30*time.Second {
			t.Errorf("a felt the end after %s, want 30s", at.Sub(start))
		}
		w.Post(`{}`).WantServed(t, "b")
		w.WantCalls(map[string]int{"a": 1, "b": 2})

		w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		w.Post(`{}`).WantError(t, 504, "upstream_timeout")
	})
}

func TestASilentBackendIsLeftInTime(t *testing.T) {
	silent := func(rw http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for body, want := range map[string]time.Duration{`{"stream":true}`: 5 * time.Second, `{"stream":false}`: 20 * time.Second} {
		lbtest.InBubble(t, lbtest.InOrder("a b", "response_header_timeout 20s\nstream_first_event_timeout 5s"), func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(silent)
			start := time.Now()
			w.Post(body).WantServed(t, "b")
			if waited := time.Since(start); waited != want {
				t.Errorf("%s waited %s for a, want %s", body, waited, want)
			}
		})
	}
}

func TestNoAttemptBeginsAfterTheTimeForAttempts(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a b c", "lb_try_duration 60s"), func(t *testing.T, w *lbtest.World) {
		slow := func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(40 * time.Second)
			lbtest.Status(500)(rw, r)
		}
		w.Backends["a"].Replies(slow)
		w.Backends["b"].Replies(slow)
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
		if reply := w.Send(r); reply.Status != 500 || reply.Backend != "b" {
			t.Errorf("client got %d of %q, want b's 500", reply.Status, reply.Backend)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
	})
}

func TestALongUploadIsNotATimeout(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nstream_first_event_timeout 10s\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			buf := make([]byte, 64<<10)
			for {
				time.Sleep(time.Second)
				if _, err := io.ReadFull(r.Body, buf); err != nil {
					break
				}
			}
			lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd)(rw, r)
		})
		r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true,"x":"`+strings.Repeat("x", 4<<20)+`"}`))
		r.Header.Set("X-Early", "a")
		w.Send(r).WantServed(t, "a")
	})
}

func TestASlowUploadOfALongBodyIsNotATimeout(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a
		request_buffers 1KiB
		response_header_timeout 10s
	}`, func(t *testing.T, w *lbtest.World) {
		reader, writer := io.Pipe()
		go func() {
			for range 10 {
				writer.Write(bytes.Repeat([]byte("x"), 100<<10))
				time.Sleep(9 * time.Second)
			}
			writer.Close()
		}()
		w.Send(w.Request(http.MethodPost, "/v1/files", reader)).WantServed(t, "a")
		if got := w.Backends["a"].Received()[0].BodyBytes; got != 1000<<10 {
			t.Errorf("a got %d bytes, want all 1000 KiB", got)
		}
	})
}

func TestAClientThatUploadsSlowlyIsNotATimeout(t *testing.T) {
	pieces := []string{`{"stream":true,"messages":["`, lbtest.Noise(20_000), lbtest.Noise(30_000), lbtest.Noise(40_000), lbtest.Noise(50_000), `"]}`}
	for kind, buffers := range map[string]string{"kept for replay": "1MB", "streamed on": "1KB"} {
		t.Run(kind, func(t *testing.T) {
			lbtest.OverAllVersions(t, "stream_first_event_timeout 10s\nresponse_header_timeout 10s\nrequest_buffers "+buffers, func(t *testing.T, w *lbtest.World) {
				body, upload := io.Pipe()
				go func() {
					for _, piece := range pieces {
						io.WriteString(upload, piece)
						time.Sleep(9 * time.Second)
					}
					upload.Close()
				}()
				w.Send(w.Request(http.MethodPost, "/v1/chat/completions", body)).WantServed(t, "a")
				got := w.Backends["a"].Received()
				if len(got) != 1 || got[0].BodyHash != lbtest.Hash([]byte(strings.Join(pieces, ""))) {
					t.Errorf("a was called %d times, and got %d bytes, %v", len(got), got[0].BodyBytes, got[0].ReadErr)
				}
				if cooldowns := w.Logged("cooldown started"); len(cooldowns) > 0 {
					t.Errorf("got the cooldowns %v", cooldowns)
				}
			})
		})
	}
}

// TestABodyThatStallsIsNotWaitedFor uses Caddy's own limit, with a body that is
// kept for replay and one that streams to the backend.
func TestABodyThatStallsIsNotWaitedFor(t *testing.T) {
	for _, buffers := range []string{"1MiB", "1B"} {
		a, backend := lbtest.Listen(t, "a")
		address := lbtest.ServeAt(t, "openai_lb {\nbackend "+backend.URL+"\nrequest_buffers "+buffers+"\n}", "servers {\ntimeouts {\nread_body_idle 200ms\n}\n}")
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		io.WriteString(conn, "POST /v1/x HTTP/1.1\r\nHost: lb\r\nContent-Length: 100\r\n\r\n{\"model\":")
		conn.SetReadDeadline(time.Now().Add(2 * time.Minute))
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(buffers, err)
		}
		body, _ := io.ReadAll(res.Body)
		if res.StatusCode != 408 || !strings.Contains(string(body), `"code":"request_timeout"`) {
			t.Errorf("with request_buffers %s, client got %d %s", buffers, res.StatusCode, body)
		}
		lbtest.Ask(lbtest.NewClient(t), "http://"+address+"/v1/x").WantServed(t, "a")
		for _, c := range a.Received() {
			if c.ReadErr == nil && c.BodyBytes == 9 {
				t.Error("a took a part of the body for all of it")
			}
		}
	}
}

func TestAStalledConnectionIsClosedNotLeaked(t *testing.T) {
	gone := make(chan time.Time, 1)
	address := rawBackend(t, reads(func(conn net.Conn) {
		io.WriteString(conn, chunkedStream+oneChunk)
		io.Copy(io.Discard, conn) // returns when the balancer hangs up
		gone <- time.Now()
	}))
	site := lbtest.ServeAt(t, "openai_lb {\nbackend http://"+address+"\nstream_idle_timeout 200ms\n}")
	if reply := lbtest.Ask(lbtest.NewClient(t), "http://"+site+"/v1/chat/completions"); reply.Err == nil {
		t.Error("the client got a clean end")
	}
	select {
	case <-gone:
	case <-time.After(2 * time.Minute):
		t.Error("the backend's connection is still open")
	}
}
