package openailb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/standard"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// world is a balancer, its clients and its backends, real but for the wires:
// net/http and reverse_proxy talk over pipes in memory, so that inside a
// synctest bubble time passes only while everybody waits.
type world struct {
	t        *testing.T
	handler  *Handler
	client   *http.Client
	logs     *observer.ObservedLogs
	backends map[string]*fakeBackend

	mu        sync.Mutex
	listeners map[string]*pipeListener
}

// inBubble runs a test in virtual time, and fails it if it leaves a goroutine.
func inBubble(t *testing.T, config string, test func(*testing.T, *world)) {
	t.Helper()
	cfg := provisionedConfig(t)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, cfg, config)
		test(t, w)
	})
}

// overAllVersions runs a test with each version of HTTP on both sides of a
// balancer with these options, which has a backend called a.
func overAllVersions(t *testing.T, options string, test func(*testing.T, *world)) {
	t.Helper()
	for _, wire := range wires {
		t.Run(fmt.Sprintf("HTTP/%d to HTTP/%d", wire.client, wire.backend), func(t *testing.T) {
			config := options
			if wire.backend == 2 {
				config += "\nreverse_proxy {\ntransport http {\nversions h2c\n}\n}"
			}
			inBubble(t, "openai_lb {\nbackend http://a\n"+config+"\n}", func(t *testing.T, w *world) {
				if wire.client == 2 {
					w.useHTTP2()
				}
				test(t, w)
				if got := w.backends["a"].received()[0].request.ProtoMajor; got != wire.backend {
					t.Errorf("a is called by HTTP/%d", got)
				}
			})
		})
	}
}

// provisionedConfig is an empty Caddy configuration to load modules into.
func provisionedConfig(t *testing.T) caddy.Context {
	t.Helper()
	ctx, err := caddy.ProvisionContext(&caddy.Config{Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		"default": {BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(`{"output":"discard"}`)}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return ctx
}

// newWorld serves a balancer with this openai_lb block at "lb:80", and a
// backend at port 80 of each host that the block names.
func newWorld(t *testing.T, cfg caddy.Context, config string) *world {
	t.Helper()
	// the last cleanup: a net/http server lingers on a connection it closed
	t.Cleanup(func() { time.Sleep(time.Second) })
	w := &world{t: t, backends: make(map[string]*fakeBackend), listeners: make(map[string]*pipeListener)}
	ctx, cancel := caddy.NewContext(cfg)
	t.Cleanup(cancel)
	w.handler = loadHandler(t, ctx, config)
	w.handler.Transport.HTTP.Transport.DialContext = w.dial
	pool.Random = seeded()
	core, logs := observer.New(zap.DebugLevel)
	w.logs = logs
	t.Cleanup(func() {
		if t.Failed() {
			for _, entry := range logs.All() {
				t.Log(entry.Level, entry.Message, entry.ContextMap())
			}
		}
	})
	w.handler.balancer.logger = zap.New(core)
	for _, b := range w.handler.Backends {
		host := b.url.Hostname()
		if w.backends[host] == nil {
			w.backends[host] = &fakeBackend{name: host}
			w.serve(b.dial(), w.backends[host])
		}
	}
	server := new(caddyhttp.Server)
	w.serve("lb:80", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), rw, server)
		err := w.handler.ServeHTTP(rw, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil }))
		var failure caddyhttp.HandlerError
		if errors.As(err, &failure) {
			rw.WriteHeader(failure.StatusCode)
		}
	}))
	transport := &http.Transport{DialContext: w.dial, DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	w.client = &http.Client{Transport: transport}
	return w
}

// useHTTP2 makes the client speak HTTP/2.
func (w *world) useHTTP2() {
	transport := &http.Transport{DialContext: w.dial, Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	w.t.Cleanup(transport.CloseIdleConnections)
	w.client = &http.Client{Transport: transport}
}

// seeded returns a source of random numbers that are the same in every run.
func seeded() func() float64 {
	var mu sync.Mutex
	source := rand.New(rand.NewPCG(1, 2))
	return func() float64 {
		mu.Lock()
		defer mu.Unlock()
		return source.Float64()
	}
}

// loadHandler takes an openai_lb block the way Caddy does: through JSON.
func loadHandler(t *testing.T, ctx caddy.Context, config string) *Handler {
	t.Helper()
	var parsed Handler
	if err := parsed.UnmarshalCaddyfile(caddyfile.NewTestDispenser(config)); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(&parsed)
	if err != nil {
		t.Fatal(err)
	}
	module, err := ctx.LoadModuleByID("http.handlers.openai_lb", text)
	if err != nil {
		t.Fatal(err)
	}
	return module.(*Handler)
}

func (w *world) serve(addr string, handler http.Handler) {
	l := &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}
	w.mu.Lock()
	w.listeners[addr] = l
	w.mu.Unlock()
	server := &http.Server{Handler: handler, Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	l.server = server
	go server.Serve(l)
	w.t.Cleanup(func() { server.Close() })
}

// restart closes all connections of a host and serves new ones.
func (w *world) restart(host string) {
	w.listeners[host+":80"].server.Close()
	w.serve(host+":80", w.backends[host])
}

// stop makes the host refuse connections.
func (w *world) stop(host string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listeners[host+":80"].server.Close()
	delete(w.listeners, host+":80")
}

func (w *world) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	w.mu.Lock()
	l := w.listeners[addr]
	w.mu.Unlock()
	if l == nil {
		return nil, &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	}
	client, server := net.Pipe()
	select {
	case l.conns <- server:
		return client, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type pipeListener struct {
	server *http.Server
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

// answer is what a client received.
type clientReply struct {
	status  int
	header  http.Header
	body    string
	backend string
	err     error
}

// post sends a chat completion through the balancer.
func (w *world) post(body string) clientReply {
	return w.send(w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)))
}

func (w *world) request(method, path string, body io.Reader) *http.Request {
	r, err := http.NewRequestWithContext(w.t.Context(), method, "http://lb"+path, body)
	if err != nil {
		w.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	return r
}

func (w *world) send(r *http.Request) clientReply {
	res, err := w.client.Do(r)
	if err != nil {
		return clientReply{err: err}
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return clientReply{res.StatusCode, res.Header, string(body), res.Header.Get("X-Backend"), err}
}

// wantServed checks that the client was served by one of the backends.
func (r clientReply) wantServed(t *testing.T, backends ...string) {
	t.Helper()
	if r.err != nil || r.status != http.StatusOK || !slices.Contains(backends, r.backend) {
		t.Fatalf("client got %d from %q (%v) %s, want 200 from one of %v", r.status, r.backend, r.err, r.body, backends)
	}
}

// wantError checks for an error as OpenAI words it.
func (r clientReply) wantError(t *testing.T, status int, code string) {
	t.Helper()
	var body struct {
		Error struct {
			Message, Type, Code string
			Param               any
		}
	}
	if r.err != nil {
		t.Fatal(r.err)
	}
	if err := json.Unmarshal([]byte(r.body), &body); err != nil {
		t.Fatalf("%v in %q", err, r.body)
	}
	if r.status != status || body.Error.Code != code || body.Error.Message == "" || body.Error.Type == "" {
		t.Fatalf("client got %d %s, want %d with code %q", r.status, r.body, status, code)
	}
	if got := r.header.Get("Content-Type"); got != "application/json" {
		t.Errorf("Content-Type is %q", got)
	}
	if r.header.Get("X-Request-Id") == "" {
		t.Error("the reply has no X-Request-Id")
	}
}

// wantCalls checks how many requests each backend has had.
func (w *world) wantCalls(want map[string]int) {
	w.t.Helper()
	for name, n := range want {
		if got := len(w.backends[name].received()); got != n {
			w.t.Errorf("%s was called %d times, want %d", name, got, n)
		}
	}
}

// logged returns the log's entries with this message.
func (w *world) logged(message string) []observer.LoggedEntry {
	return w.logs.FilterMessage(message).All()
}

func levels(entries []observer.LoggedEntry) (levels []zapcore.Level) {
	for _, e := range entries {
		levels = append(levels, e.Level)
	}
	return levels
}

const threeBackends = `openai_lb {
	backend http://a {
		priority 1
	}
	backend http://b {
		priority 2
		weight 3
	}
	backend http://c {
		priority 2
		weight 1
	}
}`

const threeInOrder = `openai_lb {
	backend http://a
	backend http://b {
		priority 2
	}
	backend http://c {
		priority 3
	}
}`

const backendKey = "sk-key-of-the-backend"

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

func (w *world) requestWithKey(key string) *http.Request {
	r := w.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`))
	r.Header.Set("Authorization", "Bearer "+key)
	return r
}

// stream asks for a streamed chat completion.
func (w *world) stream() clientReply { return w.post(`{"model":"gpt-4o","stream":true,"messages":[]}`) }

// useSource makes a source that of the member's backend.
func (w *world) useSource(name string, source CredentialSource) {
	for _, b := range w.handler.Backends {
		if b.Name == name {
			b.source = source
		}
	}
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
