package lbtest

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
)

// Backend answers as the test says and remembers who called.
type Backend struct {
	Name string

	mu    sync.Mutex
	reply http.HandlerFunc
	calls []Call
}

// Call is a request that arrived at a backend.
type Call struct {
	At        time.Time
	Request   *http.Request
	BodyHash  string
	BodyBytes int64
	// Beginning is the first 4 KiB of the body.
	Beginning []byte
	ReadErr   error
}

// ServeHTTP implements http.Handler.
func (b *Backend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := Call{At: time.Now(), Request: r}
	b.mu.Lock()
	reply := b.reply
	b.mu.Unlock()
	if early := r.Header.Get("X-Early"); early == "" || early != b.Name && early != "1" {
		hash := sha256.New()
		body := io.TeeReader(r.Body, hash)
		if c.Beginning, c.ReadErr = io.ReadAll(io.LimitReader(body, 4<<10)); c.ReadErr == nil {
			c.BodyBytes, c.ReadErr = io.Copy(io.Discard, body)
		}
		c.BodyBytes += int64(len(c.Beginning))
		r.Body = io.NopCloser(bytes.NewReader(c.Beginning)) // for the reply
		c.BodyHash = hex.EncodeToString(hash.Sum(nil))
	}
	b.mu.Lock()
	b.calls = append(b.calls, c)
	b.mu.Unlock()
	w.Header().Set("X-Backend", b.Name)
	if reply != nil {
		watched := &watchedWriter{ResponseWriter: w}
		if reply(watched, r); watched.begun {
			return
		}
	}
	if bytes.Contains(c.Beginning, []byte(`"stream":true`)) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, StreamContent+StreamEnd)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, `{"id":"chatcmpl-1","object":"chat.completion"}`)
}

// watchedWriter knows whether a reply has begun. One that only waits, and says
// nothing, is a reply like all others: an empty one would be no answer to a
// chat.
type watchedWriter struct {
	http.ResponseWriter
	begun bool
}

func (w *watchedWriter) WriteHeader(status int) {
	w.begun = w.begun || status >= 200
	w.ResponseWriter.WriteHeader(status)
}

func (w *watchedWriter) Write(p []byte) (int, error) {
	w.begun = true
	return w.ResponseWriter.Write(p)
}

func (w *watchedWriter) Flush() {
	w.begun = true
	_ = http.NewResponseController(w.ResponseWriter).Flush()
}

func (w *watchedWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	w.begun = true
	return http.NewResponseController(w.ResponseWriter).Hijack()
}

func (w *watchedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Replies has the backend answer so from now on. nil: it serves.
func (b *Backend) Replies(reply http.HandlerFunc) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reply = reply
}

// Recovers makes the backend serve again.
func (b *Backend) Recovers() { b.Replies(nil) }

// Received returns the requests that arrived, in order.
func (b *Backend) Received() []Call {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.calls)
}

// Forget empties what Received returns.
func (b *Backend) Forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls = nil
}

// Status answers with a status, headers in pairs, and an error body.
func Status(code int, headers ...string) http.HandlerFunc {
	return Says(code, `{"error":{"message":"as told","type":"test","param":null,"code":null}}`, headers...)
}

// Throttled answers 429 with a Retry-After.
func Throttled(retryAfter string) http.HandlerFunc { return Status(429, "Retry-After", retryAfter) }

// Says answers with a status, a body, and headers in pairs.
func Says(code int, body string, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(code)
		io.WriteString(w, body)
	}
}

// WantsKey serves those that come with the key, and refuses others.
func WantsKey(key string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+key {
			Status(401)(w, r)
			return
		}
		Says(200, `{"id":"chatcmpl-1"}`)(w, r)
	}
}

// Aborts closes the connection without an answer.
func Aborts(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

const (
	StreamPreamble = "data: {\"choices\":[],\"id\":\"\",\"model\":\"\",\"prompt_filter_results\":[{}]}\n\n" +
		"data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"
	StreamContent = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hello\"}}]}\n\n"
	StreamError   = "data: {\"error\":{\"message\":\"busy\",\"type\":\"server_error\",\"param\":null,\"code\":\"server_is_overloaded\"}}\n\n"
	StreamEnd     = "data: [DONE]\n\n"
)

// Streams answers with pieces of a stream, each flushed on its own. A piece may
// also be a time.Duration to wait, or a func to call.
func Streams(pieces ...any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		for _, piece := range pieces {
			switch p := piece.(type) {
			case string:
				io.WriteString(w, p)
				w.(http.Flusher).Flush()
			case time.Duration:
				select {
				case <-time.After(p):
				case <-r.Context().Done():
					return
				}
			case func():
				p()
			}
		}
	}
}

// Abort closes the connection in the midst of a reply.
func Abort() { panic(http.ErrAbortHandler) }

// Gzipped compresses text with gzip.
func Gzipped(text string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, text)
	w.Close()
	return b.String()
}

// Zstandard compresses text with zstd.
func Zstandard(text string) string {
	w, _ := zstd.NewWriter(nil)
	return string(w.EncodeAll([]byte(text), nil))
}

// Noise returns n random letters.
func Noise(n int) string {
	source := rand.New(rand.NewPCG(uint64(n), 1))
	text := make([]byte, n)
	for i := range text {
		text[i] = byte('a' + source.IntN(26))
	}
	return string(text)
}

// Hash returns the hash of a body, as Call has it.
func Hash(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// Chunked hides a body's length from net/http.
func Chunked(data []byte) io.Reader { return io.MultiReader(bytes.NewReader(data)) }

// Raw answers with these bytes, whatever they are, and closes the connection.
func Raw(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		io.WriteString(conn, text)
		conn.Close()
	}
}

// Hangs takes the request and never answers.
func Hangs(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
