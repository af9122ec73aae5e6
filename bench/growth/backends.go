package main

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// answer returns the answer of the backend at a port to a request with that
// head: pieces, as a backend flushes them. A nil piece keeps the reply open
// until the connection is closed. It is set between two measurements.
var answer func(port int, head []byte) [][]byte

// backend is a connection to a backend in memory.
type backend struct {
	port int

	mu    sync.Mutex
	wakes sync.Cond
	// head is the part of a request's head that was read. Once inBody is true,
	// left is the number of bytes of its body that were not read yet.
	head   []byte
	left   int
	inBody bool
	// reply is the part of the reply that has yet to be read.
	reply  [][]byte
	closed bool
}

func newBackend(address string) *backend {
	_, port, _ := net.SplitHostPort(address)
	b := new(backend)
	b.port, _ = strconv.Atoi(port)
	b.wakes.L = &b.mu
	return b
}

func (b *backend) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(p)
	if !b.inBody {
		b.head = append(b.head, p...)
		end := bytes.Index(b.head, []byte("\r\n\r\n"))
		if end < 0 {
			return n, nil
		}
		p, b.left, b.inBody = b.head[end+4:], 0, true
		if _, value, ok := bytes.Cut(b.head[:end], []byte("Content-Length: ")); ok {
			value, _, _ = bytes.Cut(value, []byte("\r"))
			b.left, _ = strconv.Atoi(string(value))
		}
	}
	if b.left -= len(p); b.left <= 0 {
		b.reply = append(b.reply[:0], answer(b.port, b.head)...)
		b.inBody, b.head = false, b.head[:0]
		b.wakes.Signal()
	}
	return n, nil
}

// Read returns one piece at a time.
func (b *backend) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.closed && (len(b.reply) == 0 || b.reply[0] == nil) {
		b.wakes.Wait()
	}
	if b.closed {
		return 0, io.EOF
	}
	n := copy(p, b.reply[0])
	if b.reply[0] = b.reply[0][n:]; len(b.reply[0]) == 0 {
		b.reply = b.reply[1:]
	}
	return n, nil
}

func (b *backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.wakes.Broadcast()
	return nil
}

func (*backend) LocalAddr() net.Addr              { return new(net.TCPAddr) }
func (*backend) RemoteAddr() net.Addr             { return new(net.TCPAddr) }
func (*backend) SetDeadline(time.Time) error      { return nil }
func (*backend) SetReadDeadline(time.Time) error  { return nil }
func (*backend) SetWriteDeadline(time.Time) error { return nil }

// whole is a response with a body, and further fields of its header.
func whole(status int, fields, body string) []byte {
	return []byte("HTTP/1.1 " + strconv.Itoa(status) + " " + http.StatusText(status) +
		"\r\nContent-Type: application/json\r\n" + fields +
		"Content-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body)
}

var (
	completion = `{"id":"chatcmpl-123","object":"chat.completion","created":1677652288,"model":"gpt-4o-mini","choices":[{"index":0,` +
		`"message":{"role":"assistant","content":"` + strings.Repeat("Hello there, how may I assist you today? ", 20) +
		`"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":12,"total_tokens":21}}`
	served    = whole(http.StatusOK, "", completion)
	throttled = whole(http.StatusTooManyRequests, "Retry-After: 250\r\n", `{"error":{"code":"429","message":"Please retry after 250 seconds."}}`)
)

func serve(int, []byte) [][]byte { return [][]byte{served} }

// stream is a stream of so many events of that length.
func stream(events, length int) [][]byte {
	event := `data: {"id":"chatcmpl-123","object":"chat.completion.chunk","created":1677652288,"model":"gpt-4o-mini",` +
		`"choices":[{"index":0,"delta":{"content":"`
	end := `"},"finish_reason":null}]}` + "\n\n"
	event += strings.Repeat("Hello ", max(1, (length-len(event)-len(end))/6)) + end
	chunk := []byte(strconv.FormatInt(int64(len(event)), 16) + "\r\n" + event + "\r\n")
	reply := [][]byte{[]byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")}
	for range events {
		reply = append(reply, chunk)
	}
	return append(reply, []byte("e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"))
}
