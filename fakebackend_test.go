package openailb

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
)

// fakeBackend answers as the test says and remembers who called.
type fakeBackend struct {
	name string

	mu    sync.Mutex
	reply http.HandlerFunc
	calls []call
}

// call is what arrived at a backend.
type call struct {
	at        time.Time
	request   *http.Request
	bodyHash  string
	bodyBytes int64
	readErr   error
}

func (b *fakeBackend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	at := time.Now()
	b.mu.Lock()
	reply := b.reply
	b.mu.Unlock()
	c := call{at: at, request: r}
	if early := r.Header.Get("X-Early"); early == "" || early != b.name && early != "1" {
		hash := sha256.New()
		c.bodyBytes, c.readErr = io.Copy(hash, r.Body)
		c.bodyHash = hex.EncodeToString(hash.Sum(nil))
	}
	b.mu.Lock()
	b.calls = append(b.calls, c)
	b.mu.Unlock()
	w.Header().Set("X-Backend", b.name)
	if reply != nil {
		reply(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, `{"id":"chatcmpl-1","object":"chat.completion"}`)
}

func (b *fakeBackend) replies(reply http.HandlerFunc) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reply = reply
}

// recovers makes the backend serve again.
func (b *fakeBackend) recovers() { b.replies(nil) }

func (b *fakeBackend) received() []call {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]call(nil), b.calls...)
}

func (b *fakeBackend) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls = nil
}

// status answers with a status, headers in pairs, and an error body.
func status(code int, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(code)
		io.WriteString(w, `{"error":{"message":"as told","type":"test","param":null,"code":null}}`)
	}
}

// throttled answers 429 with a Retry-After.
func throttled(retryAfter string) http.HandlerFunc { return status(429, "Retry-After", retryAfter) }

// says answers with a status, a body, and headers in pairs.
func says(code int, body string, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(code)
		io.WriteString(w, body)
	}
}

// wantsKey serves those that come with the key, and refuses others.
func wantsKey(key string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+key {
			status(401)(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"id":"chatcmpl-1"}`)
	}
}

// aborts closes the connection without an answer.
func aborts(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// garbage answers with what is not HTTP.
func garbage(w http.ResponseWriter, _ *http.Request) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	io.WriteString(conn, "SSH-2.0-OpenSSH_9.2p1\r\n")
	conn.Close()
}

const (
	streamPreamble = "data: {\"choices\":[],\"id\":\"\",\"model\":\"\",\"prompt_filter_results\":[{}]}\n\n" +
		"data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"
	streamContent = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hello\"}}]}\n\n"
	streamError   = "data: {\"error\":{\"message\":\"busy\",\"type\":\"server_error\",\"param\":null,\"code\":\"server_is_overloaded\"}}\n\n"
	streamEnd     = "data: [DONE]\n\n"
)

// streams answers with pieces of a stream, each flushed on its own. A piece may
// also be a time.Duration to wait, or a func to call.
func streams(pieces ...any) http.HandlerFunc {
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

func abort() { panic(http.ErrAbortHandler) }

func gzipped(text string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, text)
	w.Close()
	return b.String()
}

func zstandard(text string) string {
	w, _ := zstd.NewWriter(nil)
	return string(w.EncodeAll([]byte(text), nil))
}

// noise returns n random letters.
func noise(n int) string {
	source := rand.New(rand.NewPCG(uint64(n), 1))
	text := make([]byte, n)
	for i := range text {
		text[i] = byte('a' + source.IntN(26))
	}
	return string(text)
}

func sha(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// chunked hides a body's length from net/http.
func chunked(data []byte) io.Reader { return io.MultiReader(bytes.NewReader(data)) }
