// Package lbtest is what tests of the balancer share: a balancer in virtual
// time with its clients and its backends ([World]), Caddy itself with many
// balancers ([Sites]) or one ([Run], [ServeAt]), and backends that answer as a
// test says ([Backend]). Only tests import it.
//
// # Virtual time
//
// [InBubble] runs a test in a bubble of testing/synctest. Clients, handler and
// backends are connected by pipes in memory, so all goroutines belong to the
// bubble. Its clock stands still while any of them runs, and jumps to the next
// timer when all of them wait. So a test may sleep for hours, and measure the
// exact length of a cooldown. It must not wait for the network, or for a
// goroutine from outside of the bubble: the clock stands still meanwhile. A
// goroutine that is left at the end fails the test.
//
// A World has a fixed seed of random numbers, and forgets the ids of stored
// objects at its end. Its handler's log lines are in [World.Logs], and are
// shown if the test fails.
//
// # Real time
//
// [Run], [ServeAt] and [Sites] start Caddy itself. There is one Caddy in a
// process, so tests that use them must not run in parallel. The rows of a Sites
// may. When such a test is over, Caddy stops. A Sites also waits until
// everything is gone that was started since NewSites. [Main] gives Caddy
// folders of its own, so the user's stay as they are: each package that starts
// Caddy calls it from TestMain.
//
// A [Backend] is safe for concurrent use. It records every call that it gets.
package lbtest

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/standard"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// World is a balancer, its clients and its backends, real but for the wires:
// net/http and the handler talk over pipes in memory, so that inside a
// synctest bubble time passes only while everybody waits.
type World struct {
	T       *testing.T
	Handler *openailb.Handler
	Client  *http.Client // by HTTP/1.1, until UseHTTP2
	// Logs has the handler's log lines since the world began.
	Logs     *observer.ObservedLogs
	Backends map[string]*Backend // by host
	// Shows are headers that each reply gets, as by Caddy's directive `header
	// >Name value`. They may have placeholders.
	Shows map[string]string
	// Prepares, if it is set, changes a request before the handler gets it.
	Prepares func(*http.Request) *http.Request
	// ReadIdle, if it is set, is how long a body may stall, as in Caddy's
	// server.
	ReadIdle time.Duration

	mu        sync.Mutex
	listeners map[string]*pipeListener
}

// InBubble runs a test in virtual time, and fails it if it leaves a goroutine.
func InBubble(t *testing.T, config string, test func(*testing.T, *World)) {
	t.Helper()
	emptyConfig() // outside of the bubble, whose end it outlives
	bubble.Test(t, func(t *testing.T) { test(t, newWorld(t, config)) })
}

// OverBothVersions runs a test with a client of HTTP/1.1 and one of HTTP/2.
func OverBothVersions(t *testing.T, config string, test func(*testing.T, *World)) {
	t.Helper()
	t.Run("HTTP/1.1", func(t *testing.T) { InBubble(t, config, test) })
	t.Run("HTTP/2", func(t *testing.T) {
		InBubble(t, config, func(t *testing.T, w *World) {
			w.UseHTTP2()
			test(t, w)
		})
	})
}

// OverAllVersions runs a test with each version of HTTP on both sides of a
// balancer with these options, which has a backend called a.
func OverAllVersions(t *testing.T, options string, test func(*testing.T, *World)) {
	t.Helper()
	for _, wire := range Wires {
		t.Run(fmt.Sprintf("HTTP/%d to HTTP/%d", wire.Client, wire.Backend), func(t *testing.T) {
			config := options
			if wire.Backend == 2 {
				config += "\ntransport http {\nversions h2c\n}"
			}
			InBubble(t, "openai_lb {\nbackend http://a\n"+config+"\n}", func(t *testing.T, w *World) {
				if wire.Client == 2 {
					w.UseHTTP2()
				}
				test(t, w)
				if got := w.Backends["a"].Received()[0].Request.ProtoMajor; got != wire.Backend {
					t.Errorf("a is called by HTTP/%d", got)
				}
			})
		})
	}
}

// newWorld serves a balancer with this openai_lb block at "lb:80", and a
// backend at port 80 of each host that the block names.
func newWorld(t *testing.T, config string) *World {
	t.Helper()
	// the last cleanup: a net/http server lingers on a connection it closed
	t.Cleanup(func() { time.Sleep(time.Second) })
	random.Seed(1, 2)
	logged.TakeAll()
	w := &World{T: t, Logs: logged, Backends: make(map[string]*Backend), listeners: make(map[string]*pipeListener)}
	t.Cleanup(forgetIDs)
	w.Handler = loadHandler(t, Context(t), config)
	w.Handler.Sender.HTTP.Transport.DialContext = w.Dial
	t.Cleanup(func() {
		if t.Failed() {
			for _, entry := range w.Logs.All() {
				t.Log(entry.Level, entry.Message, entry.ContextMap())
			}
		}
	})
	for _, b := range w.Handler.Backends {
		address, err := url.Parse(b.URL)
		if err != nil {
			t.Fatal(err)
		}
		host := address.Hostname()
		if w.Backends[host] == nil {
			w.Backends[host] = &Backend{Name: host}
			w.Serve(net.JoinHostPort(host, cmp.Or(address.Port(), "80")), w.Backends[host])
		}
	}
	server := new(caddyhttp.Server)
	w.Serve("lb:80", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), rw, server)
		if w.Prepares != nil {
			r = w.Prepares(r)
		}
		if w.ReadIdle > 0 {
			body := &caddyhttp.IdleTimeoutReader{ReadCloser: r.Body, Ctrl: http.NewResponseController(rw),
				Deadline: caddyhttp.IdleDeadline{Timeout: w.ReadIdle}, Logger: zap.NewNop(),
				ClearBetweenReads: r.ProtoMajor == 2}
			defer body.HandlerDone()
			r = r.WithContext(caddyhttp.ContextWithIdleTimeouts(r.Context(), body, nil))
			r.Body = body
		}
		balance := caddyhttp.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) error {
			return w.Handler.ServeHTTP(rw, r,
				caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil }))
		})
		var err error
		if w.Shows == nil {
			err = balance(rw, r)
		} else {
			err = w.showing().ServeHTTP(rw, r, balance)
		}
		var failure caddyhttp.HandlerError
		if errors.As(err, &failure) {
			rw.WriteHeader(failure.StatusCode)
		}
	}))
	transport := &http.Transport{DialContext: w.Dial, DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	w.Client = &http.Client{Transport: transport}
	return w
}

// showing is Caddy's directive header for what the world shows.
func (w *World) showing() *headers.Handler {
	set := make(http.Header)
	for name, value := range w.Shows {
		set.Set(name, value)
	}
	return &headers.Handler{Response: &headers.RespHeaderOps{HeaderOps: &headers.HeaderOps{Set: set}, Deferred: true}}
}

// UseHTTP2 makes the client speak HTTP/2.
func (w *World) UseHTTP2() {
	transport := &http.Transport{DialContext: w.Dial, Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	w.T.Cleanup(transport.CloseIdleConnections)
	w.Client = &http.Client{Transport: transport}
}

// WantCalls checks how many requests each backend has had.
func (w *World) WantCalls(want map[string]int) {
	w.T.Helper()
	for name, n := range want {
		if got := len(w.Backends[name].Received()); got != n {
			w.T.Errorf("%s was called %d times, want %d", name, got, n)
		}
	}
}

// Logged returns the log's entries with this message.
func (w *World) Logged(message string) []observer.LoggedEntry {
	return w.Logs.FilterMessage(message).All()
}

// AllReply has all backends answer so.
func (w *World) AllReply(reply http.HandlerFunc) {
	for _, b := range w.Backends {
		b.Replies(reply)
	}
}

// TotalCalls is how many requests all backends have had.
func (w *World) TotalCalls() (n int) {
	for _, b := range w.Backends {
		n += len(b.Received())
	}
	return n
}

// WantNobodyBlamed checks that the log has no cooldown and no broken reply.
func (w *World) WantNobodyBlamed() {
	w.T.Helper()
	for _, message := range []string{"cooldown started", "reply broken"} {
		for _, entry := range w.Logged(message) {
			w.T.Errorf("%s: %v", message, entry.ContextMap())
		}
	}
}

// Ready asks at the ready_path.
func (w *World) Ready(method string) Reply { return w.Send(w.Request(method, "/readyz", nil)) }

// WantReady checks that it answers that there is a backend to use.
func (w *World) WantReady() {
	w.T.Helper()
	got := w.Ready(http.MethodGet)
	if got.Status != http.StatusOK || got.Body != `{"status":"ready"}` ||
		got.Header.Get("Cache-Control") != "no-store" ||
		got.Header.Get("Content-Type") != "application/json" || got.Header.Get("Retry-After") != "" {
		w.T.Errorf("got %d %v %s (%v), want ready", got.Status, got.Header, got.Body, got.Err)
	}
}

// WantNotReady checks that it answers that there is none, and when to come
// back.
func (w *World) WantNotReady(retryAfter string) {
	w.T.Helper()
	got := w.Ready(http.MethodGet)
	got.WantError(w.T, http.StatusServiceUnavailable, "no_backend_usable")
	if got.Header.Get("Retry-After") != retryAfter || got.Header.Get("Cache-Control") != "no-store" {
		w.T.Errorf("got %v, want Retry-After %q", got.Header, retryAfter)
	}
}

// Levels are those of the entries.
func Levels(entries []observer.LoggedEntry) (levels []zapcore.Level) {
	for _, e := range entries {
		levels = append(levels, e.Level)
	}
	return levels
}
