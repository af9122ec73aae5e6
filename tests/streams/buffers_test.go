package streams

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAModelBeyondTheBuffersIsRefusedWhereItMatters(t *testing.T) {
	padding := strings.Repeat("x", 8<<10)
	late := func(model string) []byte { return []byte(`{"user":"` + padding + `","model":"` + model + `"}`) }
	early := func(model string) []byte { return []byte(`{"model":"` + model + `","user":"` + padding + `"}`) }
	lateForm, lateFile := lbtest.FormOf("other", 8<<10, false)
	earlyForm, earlyFile := lbtest.FormOf("other", 8<<10, true)
	const apart = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a {\nmodel gpt-4o\n}\nbackend http://b {\nmodel other\n}\n}"
	const half = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a {\nmodel gpt-4o\n}\nbackend http://b\n}"
	const listed = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a {\nmodel gpt-4o\n}\n}"
	const alike = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a\n}"
	const azure = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a {\nauth api_key\napi_key k-of-a\nmodel gpt-4o\n}\nbackend http://b {\nauth api_key\napi_key k-of-b\nmodel other\n}\n}"
	const upload = "multipart/form-data; boundary=b"
	file := []byte("--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x.jsonl\"\r\n\r\n" + padding + "\r\n--b--\r\n")
	const chat, classic, speech = "/v1/chat/completions", "/openai/deployments/other/chat/completions?api-version=1", "/v1/audio/transcriptions"
	for _, c := range []struct {
		name, config, path, contentType string
		body                            []byte
		want                            string // who serves; none: 413
	}{
		{"late, and models are told apart", apart, chat, "", late("other"), ""},
		{"late, and some are told apart", half, chat, "", late("other"), ""},
		{"late, and nobody tells models apart", alike, chat, "", late("other"), "a"},
		{"early", apart, chat, "", early("other"), "b"},
		{"in the path, at a backend that needs it in the body", apart, classic, "", late("gpt-4o"), ""},
		{"in the path, at a backend that takes it there", azure, classic, "", late("gpt-4o"), "b"},
		{"late in a form", apart, speech, lateForm, lateFile, ""},
		{"early in a form", apart, speech, earlyForm, earlyFile, "b"},
		{"none, for a file", listed, "/v1/files", upload, file, "a"},
		{"none, for a file of Azure", listed, "/openai/files?api-version=1", upload, file, "a"},
		{"none, for a part of a file", listed, "/v1/uploads/upload_1/parts", upload, file, "a"},
		{"late, in another operation without inference", listed, "/v1/fine_tuning/jobs", "", late("gpt-4o"), ""},
	} {
		for _, framing := range []string{"with a length", "chunked"} {
			t.Run(c.name+", "+framing, func(t *testing.T) {
				for range 4 { // whoever chance prefers
					lbtest.InBubble(t, c.config, func(t *testing.T, w *lbtest.World) {
						var body io.Reader = bytes.NewReader(c.body)
						if framing == "chunked" {
							body = lbtest.Chunked(c.body)
						}
						r := w.Request(http.MethodPost, c.path, body)
						if c.contentType != "" {
							r.Header.Set("Content-Type", c.contentType)
						}
						reply := w.Send(r)
						if c.want != "" {
							reply.WantServed(t, c.want)
							if got := w.Backends[c.want].Received()[0]; c.path != classic && got.BodyHash != lbtest.Hash(c.body) {
								t.Errorf("%s got another body, of %d bytes", c.want, got.BodyBytes)
							}
							return
						}
						if n := w.TotalCalls(); n > 0 {
							t.Errorf("backends were called %d times", n)
						}
						reply.WantError(t, 413, "request_too_large")
						if !strings.Contains(reply.Body, "model") {
							t.Errorf("client got %s, which does not say what to do", reply.Body)
						}
					})
				}
			})
		}
	}
}

// bytesOf is a body of so many spaces, which takes no memory.
type bytesOf struct{ left int }

func (b *bytesOf) Read(p []byte) (int, error) {
	n := min(len(p), b.left)
	if n == 0 {
		return 0, io.EOF
	}
	for i := range p[:n] {
		p[i] = ' '
	}
	b.left -= n
	return n, nil
}

// heldBytes is how much memory is in use.
func heldBytes() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

func TestABodyOfUnknownLengthIsHeldOnce(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		more := make(chan struct{})
		w.Backends["a"].Replies(func(http.ResponseWriter, *http.Request) { <-more })
		const size = 32<<20 - 100
		before := heldBytes()
		done := make(chan lbtest.Reply)
		go func() {
			done <- w.Send(w.Request(http.MethodPost, "/v1/chat/completions", io.MultiReader(strings.NewReader("{}"), &bytesOf{size})))
		}()
		synctest.Wait()
		held := heldBytes() - before
		close(more)
		(<-done).WantServed(t, "a")
		if got := w.Backends["a"].Received()[0].BodyBytes; got != size+2 {
			t.Fatalf("a got %d bytes", got)
		}
		if held > size*5/4 {
			t.Errorf("a body of %d bytes holds %d", size, held)
		}
	})
}

// TestABodyIsReleasedWhenNothingCanSendItAgain has a backend think for long
// about a large prompt.
func TestABodyIsReleasedWhenNothingCanSendItAgain(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	lbtest.WriteFile(t, key, "key-in-a-file")
	const size = 16 << 20
	for _, c := range []struct {
		name, config string
		headers      bool // the backend has sent its headers
		reused       bool // on a connection that was used before
		released     bool
	}{
		{"one backend", "backend http://a {\napi_key key-of-a\n}", false, false, true},
		{"one backend without a key", "backend http://a", false, false, true},
		{"one backend for the model", "backend http://a {\nmodel m\n}\nbackend http://b {\nmodel n\n}", false, false, true},
		{"no retries", "backend http://a\nbackend http://b {\npriority 2\n}\nlb_retries 0", false, false, true},
		{"headers on a used connection", "backend http://a", true, true, true},
		{"a used connection, which may be closed just then", "backend http://a", false, true, false},
		{"a key that may be renewed", "backend http://a {\napi_key {file." + key + "}\n}", false, false, false},
		{"another backend", "backend http://a\nbackend http://b {\npriority 2\n}", false, false, false},
		{"another backend that is drained", "backend http://a\nbackend http://b {\nweight 0\n}", false, false, false},
		{"requests that wait", "backend http://a\nwait 10s", false, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\n"+c.config+"\n}", func(t *testing.T, w *lbtest.World) {
				if c.reused {
					w.Post(`{"model":"m"}`).WantServed(t, "a")
				}
				more := make(chan struct{})
				w.Backends["a"].Replies(func(rw http.ResponseWriter, _ *http.Request) {
					if c.headers {
						rw.Header().Set("Content-Type", "text/event-stream")
						rw.WriteHeader(200)
						rw.(http.Flusher).Flush()
					}
					<-more
					io.WriteString(rw, lbtest.StreamContent+"data: [DONE]\n\n")
				})
				before := heldBytes()
				done := make(chan lbtest.Reply)
				go func() {
					body := io.MultiReader(strings.NewReader(`{"model":"m","stream":true}`), &bytesOf{size})
					done <- w.Send(w.Request(http.MethodPost, "/v1/chat/completions", body))
				}()
				time.Sleep(time.Second)
				synctest.Wait()
				if held := heldBytes() - before; held > size/2 == c.released {
					t.Errorf("while it waits, %d bytes are held, want it released: %v", held, c.released)
				}
				close(more)
				(<-done).WantServed(t, "a")
			})
		})
	}
}

// TestAFinalAttemptThatFailsIsAnswered: nothing follows it, and the body is
// gone.
func TestAFinalAttemptThatFailsIsAnswered(t *testing.T) {
	for name, c := range map[string]struct {
		reply http.HandlerFunc
		want  int
	}{
		"a throttle":               {lbtest.Throttled("20"), 429},
		"a failure":                {lbtest.Status(500), 500},
		"a refused key":            {lbtest.Status(401), 502},
		"a firewall":               {lbtest.Says(403, "<html>no</html>"), 403},
		"a missing model":          {lbtest.Says(404, `{"error":{"code":"model_not_found","message":"no"}}`), 404},
		"a stream without content": {lbtest.Streams("data: [DONE]\n\n"), 502},
		"a cut connection": {func(w http.ResponseWriter, _ *http.Request) {
			conn, _, _ := w.(http.Hijacker).Hijack()
			conn.Close()
		}, 502},
		"silence": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, 504},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a {\napi_key key-of-a\n}\n}", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				for i := range 4 { // also on connections that were used before
					body := fmt.Sprintf(`{"model":"m","stream":true,"user":"%d%s"}`, i, strings.Repeat("x", 100_000))
					if reply := w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body))); reply.Status != c.want {
						t.Errorf("got a %d %s, want %d", reply.Status, reply.Body, c.want)
					}
					time.Sleep(time.Hour)
				}
				w.Backends["a"].Replies(lbtest.Streams(lbtest.StreamContent, "data: [DONE]\n\n"))
				w.PostStream().WantServed(t, "a")
			})
		})
	}
}

// TestACallerThatDoesNotReadHoldsLittle counts what a backend can write of a
// long reply before it has to wait: all of that is held for the caller.
func TestACallerThatDoesNotReadHoldsLittle(t *testing.T) {
	for _, version := range []string{"1.1", "h2c"} {
		for _, kind := range []string{"text/event-stream", "application/octet-stream"} {
			t.Run(version+" "+kind, func(t *testing.T) {
				config := fmt.Sprintf("openai_lb {\nbackend http://a\ntransport http {\nversions %s\n}\n}", version)
				lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
					written := 0
					w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
						if want := map[string]int{"1.1": 1, "h2c": 2}[version]; r.ProtoMajor != want {
							t.Errorf("a was reached by %s", r.Proto)
						}
						rw.Header().Set("Content-Type", kind)
						io.WriteString(rw, lbtest.StreamContent)
						rw.(http.Flusher).Flush()
						time.Sleep(time.Second) // until the headers are flushed
						piece := []byte(strings.Repeat(lbtest.StreamContent, 64))
						for written < 8<<20 {
							n, err := rw.Write(piece)
							if written += n; err != nil {
								return
							}
							rw.(http.Flusher).Flush()
						}
					})
					res := lbtest.Do(t, w.Client, w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true}`)))
					time.Sleep(2 * time.Second)
					synctest.Wait()
					if written > 1<<20 {
						t.Errorf("a could write %d bytes that nobody reads", written)
					}
					// and one that reads gets all of it
					all, err := io.Copy(io.Discard, res.Body)
					res.Body.Close()
					if err != nil || all < 8<<20 {
						t.Errorf("the client read %d bytes (%v)", all, err)
					}
				})
			})
		}
	}
}

// TestAClientThatPausesStartsNoCooldown has a client read nothing until the
// backend has given up. It waits five seconds for each write: where a busy
// machine takes most of a second to fill the sockets' buffers, a backend that
// waits for one gives up on the balancer.
func TestAClientThatPausesStartsNoCooldown(t *testing.T) {
	s := lbtest.NewSites(t, "https")
	piece := "data: {\"choices\":[{\"delta\":{\"content\":\"" + lbtest.Noise(64<<10) + "\"}}]}\n\n"
	var rows []lbtest.Row
	for _, wire := range lbtest.Wires {
		a, backend, options := listenBy(t, wire.Backend, "a")
		gaveUp := make(chan struct{})
		a.Replies(func(w http.ResponseWriter, r *http.Request) {
			defer close(gaveUp)
			w.Header().Set("Content-Type", "text/event-stream")
			for {
				http.NewResponseController(w).SetWriteDeadline(time.Now().Add(5 * time.Second))
				if _, err := io.WriteString(w, piece); err != nil {
					return
				}
			}
		})
		name := fmt.Sprintf("a%d", len(rows))
		url := s.Add("openai_lb {\nbackend " + backend + " {\nname " + name + "\n}\n" + options + "\n}")
		rows = append(rows, lbtest.Row{Name: fmt.Sprintf("HTTP/%d to HTTP/%d", wire.Client, wire.Backend), Test: func(t *testing.T) {
			res, err := s.NewClient(t, wire.Client).Post(url, "application/json", strings.NewReader(`{"stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if _, err := io.CopyN(io.Discard, res.Body, 1000); err != nil {
				t.Fatal(err)
			}
			lbtest.Within(t, "the backend gives up", gaveUp)
			if n, err := io.Copy(io.Discard, res.Body); err == nil {
				t.Errorf("the reply ends after %d bytes as if it were whole", n)
			}
			lbtest.WaitFor(t, func() bool { return s.Handled(t, url) == 1 })
			if _, cooldown := s.LoggedOf(t, name); cooldown != nil {
				t.Errorf("got the cooldown %+v", cooldown)
			}
		}, Waits: true})
	}
	s.Serve(t)
	lbtest.SideBySide(t, rows)
}

func TestAClientThatReadsSlowlySlowsItsBackendDown(t *testing.T) {
	const size = 16 << 20 // more than the buffers of all sockets on the way
	s := lbtest.NewSites(t, "https")
	piece := "data: {\"choices\":[{\"delta\":{\"content\":\"" + lbtest.Noise(64<<10) + "\"}}]}\n\n"
	var rows []lbtest.Row
	for _, wire := range lbtest.Wires[1:3] { // each version on each side
		a, backend, options := listenBy(t, wire.Backend, "a")
		var sent atomic.Int64
		a.Replies(func(w http.ResponseWriter, r *http.Request) {
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
		url := s.Add("openai_lb {\nbackend " + backend + " {\nname " + name + "\n}\nstream_idle_timeout 1s\n" + options + "\n}")
		rows = append(rows, lbtest.Row{Name: fmt.Sprintf("HTTP/%d to HTTP/%d", wire.Client, wire.Backend), Test: func(t *testing.T) {
			res, err := s.NewClient(t, wire.Client).Post(url, "application/json", strings.NewReader(`{"stream":true}`))
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
			if _, cooldown := s.LoggedOf(t, name); cooldown != nil {
				t.Errorf("got the cooldown %+v", cooldown)
			}
		}})
	}
	s.Serve(t)
	lbtest.SideBySide(t, rows)
}
