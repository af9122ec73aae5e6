package openailb

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestABackendWithoutHeadersInTimeIsLeft(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		backend http://b {
			priority 2
		}
		response_header_timeout 30s
	}`, func(t *testing.T, w *world) {
		left := make(chan time.Time, 1)
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			left <- time.Now()
		})
		start := time.Now()
		w.post(`{}`).wantServed(t, "b")
		if waited := time.Since(start); waited != 30*time.Second {
			t.Errorf("waited %s for a, want 30s", waited)
		}
		if at := <-left; at.Sub(start) != 30*time.Second {
			t.Errorf("a felt the end after %s, want 30s", at.Sub(start))
		}
		w.post(`{}`).wantServed(t, "b")
		w.wantCalls(map[string]int{"a": 1, "b": 2})

		w.backends["b"].replies(func(rw http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		w.post(`{}`).wantError(t, 504, "upstream_timeout")
	})
}

func TestASilentBackendIsLeftInTime(t *testing.T) {
	silent := func(rw http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for body, want := range map[string]time.Duration{`{"stream":true}`: 5 * time.Second, `{"stream":false}`: 20 * time.Second} {
		inBubble(t, `openai_lb {
			backend http://a
			backend http://b {
				priority 2
			}
			response_header_timeout 20s
			stream_first_event_timeout 5s
		}`, func(t *testing.T, w *world) {
			w.backends["a"].replies(silent)
			start := time.Now()
			w.post(body).wantServed(t, "b")
			if waited := time.Since(start); waited != want {
				t.Errorf("%s waited %s for a, want %s", body, waited, want)
			}
		})
	}
}

func TestNoAttemptBeginsThatItsCallerCannotWaitFor(t *testing.T) {
	inBubble(t, threeInOrder, func(t *testing.T, w *world) {
		slow := func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(40 * time.Second)
			status(500)(rw, r)
		}
		w.backends["a"].replies(slow)
		w.backends["b"].replies(slow)
		r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
		r.Header.Set("X-Stainless-Read-Timeout", "60")
		if reply := w.send(r); reply.status != 500 || reply.backend != "b" {
			t.Errorf("client got %d of %q, want b's 500", reply.status, reply.backend)
		}
		w.wantCalls(map[string]int{"a": 1, "b": 1, "c": 0})
	})
}

func TestALongUploadIsNotATimeout(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nstream_first_event_timeout 10s\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			buf := make([]byte, 64<<10)
			for {
				time.Sleep(time.Second)
				if _, err := io.ReadFull(r.Body, buf); err != nil {
					break
				}
			}
			streams(streamContent, streamEnd)(rw, r)
		})
		r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true,"x":"`+strings.Repeat("x", 4<<20)+`"}`))
		r.Header.Set("X-Early", "a")
		w.send(r).wantServed(t, "a")
	})
}

func TestASlowUploadOfALongBodyIsNotATimeout(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a
		request_buffers 1KiB
		response_header_timeout 10s
	}`, func(t *testing.T, w *world) {
		reader, writer := io.Pipe()
		go func() {
			for range 10 {
				writer.Write(bytes.Repeat([]byte("x"), 100<<10))
				time.Sleep(9 * time.Second)
			}
			writer.Close()
		}()
		w.send(w.request(http.MethodPost, "/v1/files", reader)).wantServed(t, "a")
		if got := w.backends["a"].received()[0].bodyBytes; got != 1000<<10 {
			t.Errorf("a got %d bytes, want all 1000 KiB", got)
		}
	})
}

func TestAClientThatUploadsSlowlyIsNotATimeout(t *testing.T) {
	pieces := []string{`{"stream":true,"messages":["`, noise(20_000), noise(30_000), noise(40_000), noise(50_000), `"]}`}
	for kind, buffers := range map[string]string{"kept for replay": "1MB", "streamed on": "1KB"} {
		t.Run(kind, func(t *testing.T) {
			overAllVersions(t, "stream_first_event_timeout 10s\nresponse_header_timeout 10s\nrequest_buffers "+buffers, func(t *testing.T, w *world) {
				body, upload := io.Pipe()
				go func() {
					for _, piece := range pieces {
						io.WriteString(upload, piece)
						time.Sleep(9 * time.Second)
					}
					upload.Close()
				}()
				w.send(w.request(http.MethodPost, "/v1/chat/completions", body)).wantServed(t, "a")
				got := w.backends["a"].received()
				if len(got) != 1 || got[0].bodyHash != sha([]byte(strings.Join(pieces, ""))) {
					t.Errorf("a was called %d times, and got %d bytes, %v", len(got), got[0].bodyBytes, got[0].readErr)
				}
				if benched := w.logged("backend benched"); len(benched) > 0 {
					t.Errorf("logged %v", benched)
				}
			})
		})
	}
}

// TestABodyThatStallsIsNotWaitedFor uses Caddy's own limit, with a body that is
// kept for replay and one that streams to the backend.
func TestABodyThatStallsIsNotWaitedFor(t *testing.T) {
	for _, buffers := range []string{"1MiB", "1B"} {
		a, backend := listen(t, "a")
		address := serveAt(t, "openai_lb {\nbackend "+backend.URL+"\nrequest_buffers "+buffers+"\n}", "servers {\ntimeouts {\nread_body_idle 200ms\n}\n}")
		conn, err := net.Dial("tcp", address)
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
		ask(newClient(t), "http://"+address+"/v1/x").wantServed(t, "a")
		for _, c := range a.received() {
			if c.readErr == nil && c.bodyBytes == 9 {
				t.Error("a took a part of the body for all of it")
			}
		}
	}
}

func TestAClientThatReadsSlowlyIsNotAStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		backend, wire := io.Pipe()
		ctx, cancel := context.WithCancelCause(t.Context())
		b := &replyBody{backend: new(http.Response), body: backend, idle: 10 * time.Second, deadline: &deadline{cancel: cancel}}
		go func() {
			for range 3 {
				io.WriteString(wire, "x")
			}
			<-ctx.Done()
			wire.CloseWithError(ctx.Err())
		}()
		for range 3 {
			if n, err := b.Read(make([]byte, 1)); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			time.Sleep(time.Hour) // the client's pause
		}
		start := time.Now()
		if _, err := b.Read(make([]byte, 1)); err != errIdleStream || time.Since(start) != 10*time.Second {
			t.Errorf("a backend that stalls gives %v after %s", err, time.Since(start))
		}
	})
}

func TestAClientThatReadsSlowlySlowsItsBackendDown(t *testing.T) {
	const size = 16 << 20 // more than the buffers of all sockets on the way
	s := newSites(t, "https")
	piece := "data: {\"choices\":[{\"delta\":{\"content\":\"" + noise(64<<10) + "\"}}]}\n\n"
	var rows []subtest
	for _, wire := range wires[1:3] { // each version on each side
		a, backend, options := listenBy(t, wire.backend, "a")
		var sent atomic.Int64
		a.replies(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for sent.Load() < size {
				n, err := io.WriteString(w, piece)
				if err != nil {
					return
				}
				sent.Add(int64(n))
			}
		})
		name := fmt.Sprintf("a%d", len(rows))
		url := s.add("openai_lb {\nbackend " + backend + " {\nname " + name + "\n}\nstream_idle_timeout 1s\n" + options + "\n}")
		rows = append(rows, subtest{name: fmt.Sprintf("HTTP/%d to HTTP/%d", wire.client, wire.backend), test: func(t *testing.T) {
			res, err := s.newClient(t, wire.client).Post(url, "application/json", strings.NewReader(`{"stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			hash := sha256.New()
			if _, err := io.CopyN(hash, res.Body, 1000); err != nil {
				t.Fatal(err)
			}
			time.Sleep(1500 * time.Millisecond) // where a stall is 1 s; no virtual time, since reverse_proxy locks while it writes
			if sent.Load() >= size {
				t.Error("the backend has sent all: the reply is held somewhere, or too small for this test")
			}
			if _, err := io.Copy(hash, res.Body); err != nil {
				t.Fatal(err)
			}
			want := sha256.New()
			for range sent.Load() / int64(len(piece)) {
				io.WriteString(want, piece)
			}
			if string(hash.Sum(nil)) != string(want.Sum(nil)) {
				t.Error("the reply is not what it was")
			}
			if _, benched := s.loggedOf(t, name); benched != nil {
				t.Errorf("benched %+v", benched)
			}
		}})
	}
	s.serve(t)
	sideBySide(t, rows)
}

func TestAStalledConnectionIsClosedNotLeaked(t *testing.T) {
	gone := make(chan time.Time, 1)
	address := rawBackend(t, reads(func(conn net.Conn) {
		io.WriteString(conn, chunkedStream+oneChunk)
		io.Copy(io.Discard, conn) // returns when the balancer hangs up
		gone <- time.Now()
	}))
	site := serveAt(t, "openai_lb {\nbackend http://"+address+"\nstream_idle_timeout 200ms\n}")
	if reply := ask(newClient(t), "http://"+site+"/v1/chat/completions"); reply.err == nil {
		t.Error("the client got a clean end")
	}
	select {
	case <-gone:
	case <-time.After(20 * time.Second):
		t.Error("the backend's connection is still open")
	}
}
