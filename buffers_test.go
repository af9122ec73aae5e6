package openailb

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// formOf is a multipart form with a model before or after a file.
func formOf(model string, size int, modelFirst bool) (contentType string, body []byte) {
	var b bytes.Buffer
	form := multipart.NewWriter(&b)
	if modelFirst {
		form.WriteField("model", model)
	}
	file, _ := form.CreateFormFile("file", "x.wav")
	file.Write(make([]byte, size))
	if !modelFirst {
		form.WriteField("model", model)
	}
	form.Close()
	return form.FormDataContentType(), b.Bytes()
}

func TestAModelBeyondTheBuffersIsRefusedWhereItMatters(t *testing.T) {
	padding := strings.Repeat("x", 8<<10)
	late := func(model string) []byte { return []byte(`{"user":"` + padding + `","model":"` + model + `"}`) }
	early := func(model string) []byte { return []byte(`{"model":"` + model + `","user":"` + padding + `"}`) }
	lateForm, lateFile := formOf("other", 8<<10, false)
	earlyForm, earlyFile := formOf("other", 8<<10, true)
	const apart = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a {\nmodel gpt-4o\n}\nbackend http://b {\nmodel other\n}\n}"
	const half = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a {\nmodel gpt-4o\n}\nbackend http://b\n}"
	const alike = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a\n}"
	const azure = "openai_lb {\nrequest_buffers 1KiB\nbackend http://a {\nauth api_key\napi_key k-of-a\nmodel gpt-4o\n}\nbackend http://b {\nauth api_key\napi_key k-of-b\nmodel other\n}\n}"
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
	} {
		for _, framing := range []string{"with a length", "chunked"} {
			t.Run(c.name+", "+framing, func(t *testing.T) {
				for range 4 { // whoever chance prefers
					inBubble(t, c.config, func(t *testing.T, w *world) {
						var body io.Reader = bytes.NewReader(c.body)
						if framing == "chunked" {
							body = chunked(c.body)
						}
						r := w.request(http.MethodPost, c.path, body)
						if c.contentType != "" {
							r.Header.Set("Content-Type", c.contentType)
						}
						reply := w.send(r)
						if c.want != "" {
							reply.wantServed(t, c.want)
							if got := w.backends[c.want].received()[0]; c.path != classic && got.bodyHash != sha(c.body) {
								t.Errorf("%s got another body, of %d bytes", c.want, got.bodyBytes)
							}
							return
						}
						if n := w.totalCalls(); n > 0 {
							t.Errorf("backends were called %d times", n)
						}
						reply.wantError(t, 413, "request_too_large")
						if !strings.Contains(reply.body, "model") {
							t.Errorf("client got %s, which does not say what to do", reply.body)
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
	inBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *world) {
		more := make(chan struct{})
		w.backends["a"].replies(func(http.ResponseWriter, *http.Request) { <-more })
		const size = 32<<20 - 100
		before := heldBytes()
		done := make(chan clientReply)
		go func() {
			done <- w.send(w.request(http.MethodPost, "/v1/chat/completions", io.MultiReader(strings.NewReader("{}"), &bytesOf{size})))
		}()
		synctest.Wait()
		held := heldBytes() - before
		close(more)
		(<-done).wantServed(t, "a")
		if got := w.backends["a"].received()[0].bodyBytes; got != size+2 {
			t.Fatalf("a got %d bytes", got)
		}
		if held > size*5/4 {
			t.Errorf("a body of %d bytes holds %d", size, held)
		}
	})
}

// TestACallerThatDoesNotReadHoldsLittle counts what a backend can write of a
// long reply before it has to wait: all of that is held for the caller.
func TestACallerThatDoesNotReadHoldsLittle(t *testing.T) {
	for _, version := range []string{"1.1", "h2c"} {
		for _, kind := range []string{"text/event-stream", "application/octet-stream"} {
			t.Run(version+" "+kind, func(t *testing.T) {
				config := fmt.Sprintf("openai_lb {\nbackend http://a\nreverse_proxy {\nflush_interval -1\ntransport http {\nversions %s\n}\n}\n}", version)
				inBubble(t, config, func(t *testing.T, w *world) {
					written := 0
					w.backends["a"].replies(func(rw http.ResponseWriter, r *http.Request) {
						if want := map[string]int{"1.1": 1, "h2c": 2}[version]; r.ProtoMajor != want {
							t.Errorf("a was reached by %s", r.Proto)
						}
						rw.Header().Set("Content-Type", kind)
						io.WriteString(rw, streamContent)
						rw.(http.Flusher).Flush()
						time.Sleep(time.Second) // until reverse_proxy has flushed the headers
						piece := []byte(strings.Repeat(streamContent, 64))
						for written < 8<<20 {
							n, err := rw.Write(piece)
							if written += n; err != nil {
								return
							}
							rw.(http.Flusher).Flush()
						}
					})
					res, err := w.client.Do(w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"stream":true}`)))
					if err != nil {
						t.Fatal(err)
					}
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
