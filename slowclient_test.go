package openailb

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// overBothVersions runs a test with a client of HTTP/1.1 and one of HTTP/2.
func overBothVersions(t *testing.T, config string, test func(*testing.T, *world)) {
	t.Helper()
	t.Run("HTTP/1.1", func(t *testing.T) { inBubble(t, config, test) })
	t.Run("HTTP/2", func(t *testing.T) {
		inBubble(t, config, func(t *testing.T, w *world) {
			w.useHTTP2()
			test(t, w)
		})
	})
}

// trickle sends a request whose body comes in pieces, with a pause after each.
func (w *world) trickle(piece string, pieces int, pause time.Duration) clientReply {
	r, pipe := io.Pipe()
	go func() {
		defer pipe.Close()
		for range pieces {
			if _, err := io.WriteString(pipe, piece); err != nil {
				return // the server reads no more
			}
			time.Sleep(pause)
		}
	}()
	request := w.request(http.MethodPost, "/v1/chat/completions", r)
	request.ContentLength = int64(len(piece) * pieces)
	reply := w.send(request)
	r.Close()
	return reply
}

func TestABodyThatComesTooSlowlyIsNotWaitedFor(t *testing.T) {
	for _, buffers := range []string{"1MiB", "1B"} {
		overBothVersions(t, "openai_lb {\nbackend http://a\nrequest_buffers "+buffers+"\n}", func(t *testing.T, w *world) {
			for _, c := range []struct {
				name   string
				piece  string
				pieces int
				pause  time.Duration
				within time.Duration
			}{
				{"nothing", strings.Repeat("x", 1000), 2, time.Hour, uploadGrace},
				{"a byte now and then", "x", 1000, 10 * time.Second, uploadGrace + time.Second},
				{"a good beginning", strings.Repeat("x", 10*uploadRate), 2, time.Hour, uploadGrace + 10*time.Second},
			} {
				began := time.Now()
				reply := w.trickle(c.piece, c.pieces, c.pause)
				if took := time.Since(began); took > c.within+time.Second {
					t.Errorf("%s: it was waited for %v", c.name, took)
				}
				if reply.err == nil && (reply.status != 408 || !strings.Contains(reply.body, `"code":"request_timeout"`)) {
					t.Errorf("%s: client got %d %s", c.name, reply.status, reply.body)
				}
				if reply.err != nil && buffers == "1MiB" {
					t.Errorf("%s: client got %v", c.name, reply.err)
				}
			}
			time.Sleep(time.Hour) // the clients give up
			for _, c := range w.backends["a"].received() {
				if c.readErr == nil {
					t.Errorf("a got %d bytes for a whole body", c.bodyBytes)
				}
			}
			if benches := w.logged("backend benched"); len(benches) > 0 {
				t.Errorf("a was benched for a client: %v", benches)
			}
		})
	}
}

func TestABodyThatComesSlowlyButSteadilyArrives(t *testing.T) {
	for _, buffers := range []string{"32MiB", "1B"} {
		overBothVersions(t, "openai_lb {\nbackend http://a\nrequest_buffers "+buffers+"\n}", func(t *testing.T, w *world) {
			reply := w.trickle(strings.Repeat("x", 2*uploadRate), 600, time.Second)
			reply.wantServed(t, "a")
			if got := w.backends["a"].received()[0].bodyBytes; got != 1200*uploadRate {
				t.Errorf("a got %d bytes", got)
			}
			// nothing of it is left for the next request
			time.Sleep(uploadGrace)
			w.post(`{}`).wantServed(t, "a")
		})
	}
}

const beginning = "it begins"

// begin sends the first of a reply. Thereafter no goroutine of reverse_proxy's
// waits for a lock that a write holds, during which no virtual time would pass.
func begin(w http.ResponseWriter) {
	io.WriteString(w, beginning)
	w.(http.Flusher).Flush()
	time.Sleep(time.Second)
}

func TestAReplyThatNobodyTakesEnds(t *testing.T) {
	overBothVersions(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		ended := make(chan time.Time, 1)
		w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
			begin(rw)
			for r.Context().Err() == nil {
				if _, err := rw.Write(make([]byte, 64<<10)); err != nil {
					break
				}
			}
			ended <- time.Now()
		})
		res, err := w.client.Do(w.request(http.MethodGet, "/v1/files/f/content", http.NoBody))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if _, err := io.ReadFull(res.Body, make([]byte, len(beginning)+1000)); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if took := (<-ended).Sub(began); took > stalledClientTimeout+time.Second {
			t.Errorf("the backend was kept for %v", took)
		}
		if _, err := io.Copy(io.Discard, res.Body); err == nil {
			t.Error("the client saw a clean end")
		}
		if benches := w.logged("backend benched"); len(benches) > 0 {
			t.Errorf("a was benched for a client: %v", benches)
		}
	})
}

func TestAReplyThatIsTakenSlowlyArrives(t *testing.T) {
	whole := bytes.Repeat([]byte("0123456789abcdef"), 128<<10/16*40)
	overBothVersions(t, "openai_lb {\nbackend http://a\nstream_idle_timeout 5m\n}", func(t *testing.T, w *world) {
		w.backends["a"].replies(func(rw http.ResponseWriter, _ *http.Request) {
			begin(rw)
			rw.Write(whole)
		})
		res, err := w.client.Do(w.request(http.MethodGet, "/v1/files/f/content", http.NoBody))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if _, err := io.CopyN(io.Discard, res.Body, int64(len(beginning))); err != nil {
			t.Fatal(err)
		}
		var got bytes.Buffer
		for err == nil {
			_, err = io.CopyN(&got, res.Body, 128<<10)
			time.Sleep(time.Minute)
		}
		if err != io.EOF || !bytes.Equal(got.Bytes(), whole) {
			t.Errorf("client got %d of %d bytes: %v", got.Len(), len(whole), err)
		}
	})
}

func TestCaddysOwnLimitOnBodiesComesBeforeOurs(t *testing.T) {
	r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("x"))
	for timeout, want := range map[time.Duration]bool{0: true, time.Hour: false} {
		server := &http.Server{ReadTimeout: timeout}
		u := watchUpload(httptest.NewRecorder(), r.WithContext(context.WithValue(t.Context(), http.ServerContextKey, server)))
		if watched := u.timer != nil; watched != want {
			t.Errorf("with read_body %v, it is watched over: %v", timeout, watched)
		}
		u.stop()
	}
}
