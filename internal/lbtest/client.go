package lbtest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"mime/multipart"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// Reply is a reply that a client received.
type Reply struct {
	Status  int
	Header  http.Header
	Body    string
	Backend string
	Err     error
}

// Post sends a chat completion through the balancer.
func (w *World) Post(body string) Reply {
	return w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)))
}

// Request makes a request of the balancer.
func (w *World) Request(method, path string, body io.Reader) *http.Request {
	r := NewRequest(w.T, method, "http://lb"+path, body)
	r.Header.Set("Content-Type", "application/json")
	return r
}

// RequestWithKey makes a chat completion of a client that presents a key.
func (w *World) RequestWithKey(key string) *http.Request {
	r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
	r.Header.Set("Authorization", "Bearer "+key)
	return r
}

// PostStream asks for a streamed chat completion.
func (w *World) PostStream() Reply { return w.Post(`{"model":"gpt-4o","stream":true,"messages":[]}`) }

// Send sends a request, and reads all of the reply.
func (w *World) Send(r *http.Request) Reply { return send(w.Client, r) }

// WantServed checks that the client was served by one of the backends.
func (r Reply) WantServed(t *testing.T, backends ...string) {
	t.Helper()
	if r.Err != nil || r.Status != http.StatusOK || !slices.Contains(backends, r.Backend) {
		t.Fatalf("client got %d from %q (%v) %s, want 200 from one of %v", r.Status, r.Backend, r.Err, r.Body, backends)
	}
}

// WantStatus expects this status.
func (r Reply) WantStatus(t *testing.T, want int) {
	t.Helper()
	if r.Status != want {
		t.Errorf("client got %d %s (%v), want %d", r.Status, r.Body, r.Err, want)
	}
}

// WantError checks for an error as OpenAI words it, or Anthropic.
func (r Reply) WantError(t *testing.T, status int, code string) {
	t.Helper()
	var body struct {
		Error struct {
			Message, Type, Code string
			Param               any
			Details             struct {
				Code string `json:"error_code"`
			}
		}
	}
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	if err := json.Unmarshal([]byte(r.Body), &body); err != nil {
		t.Fatalf("%v in %q", err, r.Body)
	}
	if r.Status != status || cmp.Or(body.Error.Code, body.Error.Details.Code) != code || body.Error.Message == "" ||
		body.Error.Type == "" {
		t.Fatalf("client got %d %s, want %d with code %q", r.Status, r.Body, status, code)
	}
	if got := r.Header.Get("Content-Type"); got != "application/json" {
		t.Errorf("Content-Type is %q", got)
	}
	if r.Header.Get("X-Request-Id") == "" {
		t.Error("the reply has no X-Request-Id")
	}
}

// NewRequest makes a request, which ends with the test.
func NewRequest(t testing.TB, method, url string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Do sends a request, and closes the body of the reply at the end of the test.
func Do(t testing.TB, client *http.Client, r *http.Request) *http.Response {
	t.Helper()
	res, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return res
}

// NewClient is a client with connections of its own.
func NewClient(t *testing.T) *http.Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 300}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: time.Minute}
}

// ClientOf waits until the config answers that sets X-Config to this, and
// returns a client that is connected to it. Another connection may still meet
// the config before: Linux resets what waits at a socket that Caddy closes.
func ClientOf(t *testing.T, config, url string) *http.Client {
	t.Helper()
	var client *http.Client
	WaitFor(t, func() bool {
		client = NewClient(t)
		reply := Post(client, url, `{"model":"gpt-4o"}`)
		return reply.Err == nil && reply.Header.Get("X-Config") == config
	})
	return client
}

// Ask sends a request to a balancer on a real socket.
func Ask(client *http.Client, url string, headers ...string) Reply {
	return Post(client, url, `{"model":"gpt-4o"}`, headers...)
}

// Post sends a body to a balancer on a real socket.
func Post(client *http.Client, url, body string, headers ...string) Reply {
	return exchangeOnce(client, http.MethodPost, url, strings.NewReader(body), headers...)
}

// Get asks a balancer on a real socket for what is at a URL.
func Get(client *http.Client, url string, headers ...string) Reply {
	return exchangeOnce(client, http.MethodGet, url, http.NoBody, headers...)
}

func exchangeOnce(client *http.Client, method, url string, body io.Reader, headers ...string) Reply {
	r, err := http.NewRequest(method, url, body)
	if err != nil {
		return Reply{Err: err}
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return send(client, r)
}

func send(client *http.Client, r *http.Request) Reply {
	res, err := client.Do(r)
	if err != nil {
		return Reply{Err: err}
	}
	defer res.Body.Close()
	reply, err := io.ReadAll(res.Body)
	return Reply{res.StatusCode, res.Header, string(reply), res.Header.Get("X-Backend"), err}
}

// Stream is a stream that a client reads as it comes.
type Stream struct {
	Response *http.Response
	leave    context.CancelFunc
}

// Open asks for a streamed chat completion, to be read as it comes.
func (w *World) Open(t *testing.T) Stream {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	t.Cleanup(leave)
	return Stream{
		Do(t, w.Client, w.Request(http.MethodPost, "/v1/chat/completions",
			strings.NewReader(`{"stream":true}`)).WithContext(ctx)), leave,
	}
}

// Next returns the next n bytes.
func (s Stream) Next(t testing.TB, n int) string {
	t.Helper()
	buf := make([]byte, n)
	if _, err := io.ReadFull(s.Response.Body, buf); err != nil {
		t.Fatal(err)
	}
	return string(buf)
}

// FormOf is a multipart form with a model before or after a file.
func FormOf(model string, size int, modelFirst bool) (contentType string, body []byte) {
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
