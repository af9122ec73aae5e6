package azure

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// balancer is a Caddy with these openai_lb options.
type balancer struct {
	t      *testing.T
	client *http.Client
	admin  string
	socket string
	logs   string
	// reloads are how many configs there were.
	reloads int
}

// start runs Caddy itself, as `caddy run` does.
func start(t *testing.T, options string) *balancer {
	t.Helper()
	return startWithAdmin(t, "off", options)
}

func startWithAdmin(t *testing.T, admin, options string) *balancer {
	t.Helper()
	lbtest.ShowLog(t)
	dir := t.TempDir()
	b := &balancer{t: t, admin: admin, socket: filepath.Join(dir, "lb.sock"), logs: filepath.Join(dir, "log.json")}
	// a TCP socket may reset connections when a reload replaces it
	b.client = &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		MaxIdleConnsPerHost: 100,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", b.socket)
		},
	}}
	b.reload(options)
	t.Cleanup(b.stop)
	return b
}

// reload replaces the config, as `caddy reload` does. The client is connected
// to the new one then: until the one before is gone, it may take a connection,
// and close it.
func (b *balancer) reload(options string) {
	b.t.Helper()
	b.reloads++
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(fmt.Appendf(nil, `{
		admin %s
		log {
			level DEBUG
			output file %s {
				roll_disabled
			}
		}
	}
	http://lb {
		bind unix/%s
		handle /reloads {
			respond "config %d"
		}
		handle {
			openai_lb {
				%s
			}
		}
	}`, b.admin, b.logs, b.socket, b.reloads, options), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		b.t.Fatal(err)
	}
	if err := caddy.Load(adapted, true); err != nil {
		b.t.Fatal(err)
	}
	for began := time.Now(); b.answers() != fmt.Sprint("config ", b.reloads); {
		b.client.CloseIdleConnections() // they stay with the config before
		if time.Since(began) > time.Minute {
			b.t.Fatal("the new config does not answer")
		}
	}
}

// answers is what the config says that answers the client, if any does.
func (b *balancer) answers() string {
	res, err := b.client.Get("http://lb/reloads")
	if err != nil {
		return ""
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return ""
	}
	return string(text)
}

func (b *balancer) stop() {
	b.client.CloseIdleConnections()
	if err := caddy.Stop(); err != nil {
		b.t.Error(err)
	}
	without(b.t, "the log", b.log())
}

func (b *balancer) log() string {
	b.t.Helper()
	return string(lbtest.ReadFile(b.t, b.logs))
}

// logged returns the entries with a message.
func (b *balancer) logged(message string) []map[string]any {
	var entries []map[string]any
	for line := range strings.Lines(b.log()) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil && entry["msg"] == message {
			entries = append(entries, entry)
		}
	}
	return entries
}

func (b *balancer) post() (status int, backend string) { return b.postBody(`{"model":"gpt-4o"}`) }

func (b *balancer) postBody(text string) (status int, backend string) {
	res, err := b.client.Post("http://lb/v1/chat/completions", "application/json", strings.NewReader(text))
	if err != nil {
		b.t.Error(err)
		return 0, ""
	}
	defer res.Body.Close()
	body, _ := io.ReadAll(res.Body)
	without(b.t, "the reply", string(body)+fmt.Sprint(res.Header))
	return res.StatusCode, res.Header.Get("X-Backend")
}

// wantServed sends some requests at once, and wants them served by one of
// these.
func (b *balancer) wantServed(n int, by ...*backend) {
	b.t.Helper()
	var clients sync.WaitGroup
	for range n {
		clients.Go(func() {
			status, backend := b.post()
			for _, one := range by {
				if status == 200 && backend == one.name {
					return
				}
			}
			b.t.Errorf("a client got %d from %q", status, backend)
		})
	}
	clients.Wait()
}

// backend serves those that bring the token it wants.
type backend struct {
	*httptest.Server

	name  string
	want  atomic.Value // string
	calls atomic.Int64
}

func newBackend(t *testing.T, name, token string) *backend {
	b := &backend{name: name}
	b.want.Store(token)
	b.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.calls.Add(1)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Backend", b.name)
		if r.Header.Get("Authorization") != "Bearer "+b.want.Load().(string) {
			w.WriteHeader(http.StatusUnauthorized)
			io.WriteString(w, `{"error":{"code":"401","message":"Access denied"}}`)
			return
		}
		io.WriteString(w, `{"id":"chatcmpl-1"}`)
	}))
	t.Cleanup(b.Close)
	return b
}

func (b *backend) auth(options string) string {
	return fmt.Sprintf("backend %s {\nname %s\nauth azure_identity {\n%s\n}\n}\n", b.URL, b.name, options)
}

func (b *backend) key() string {
	return fmt.Sprintf("backend %s {\nname %s\npriority 2\napi_key %s\n}\n", b.URL, b.name, b.want.Load())
}

// theSource is the only source there is.
func theSource(t *testing.T) *Credentials {
	t.Helper()
	var found []*shared
	sources.Range(func(_, value any) bool {
		found = append(found, value.(*shared))
		return true
	})
	if len(found) != 1 {
		t.Fatalf("there are %d sources, want 1", len(found))
	}
	return &Credentials{shared: found[0]}
}

func TestAllRequestsShareOneTokenAcrossReloads(t *testing.T) {
	e := appService(t)
	one, two := newBackend(t, "one", tokenNumber(1)), newBackend(t, "two", tokenNumber(1))
	options := one.auth("credential managed_identity") + two.auth("credential managed_identity")
	b := start(t, options)
	e.wantRequests(t, 0)
	b.wantServed(50, one, two)
	e.wantRequests(t, 1)
	for _, more := range []string{"lb_retries 1", "lb_retries 2", "lb_retries 3"} {
		b.reload(options + more)
		b.wantServed(10, one, two)
	}
	e.wantRequests(t, 1)
	if n := one.calls.Load() + two.calls.Load(); n != 80 {
		t.Errorf("the backends got %d requests, want 80", n)
	}
}

func TestNoRequestWaitsForARefresh(t *testing.T) {
	e := appService(t)
	a := newBackend(t, "a", tokenNumber(1))
	b := start(t, a.auth("credential managed_identity"))
	b.wantServed(1, a)
	hold := make(chan struct{})
	e.set(func() { e.hold = hold })
	theSource(t).expire()
	b.wantServed(50, a) // while the endpoint keeps its answer back
	waitFor(t, func() bool { return len(e.received()) == 2 })
	b.wantServed(50, a)
	e.wantRequests(t, 2)

	close(hold)
	waitFor(t, func() bool { return theSource(t).shared.current.Load().Token == tokenNumber(2) })
	a.want.Store(tokenNumber(2))
	b.wantServed(50, a)
	e.wantRequests(t, 2)
	if n := a.calls.Load(); n != 151 {
		t.Errorf("the backend got %d requests, want 151", n)
	}
}

func TestADeadTokenEndpointCoolsOnlyItsBackendDown(t *testing.T) {
	for name, kill := range map[string]func(*endpoint){
		"refused": func(e *endpoint) { e.Close() },
		"hanging": func(e *endpoint) { e.hold = make(chan struct{}) },
		"500s":    func(e *endpoint) { e.fail = errorReply(500, `{"message":"broken"}`) },
	} {
		t.Run(name, func(t *testing.T) {
			e := appService(t)
			kill(e)
			a, other := newBackend(t, "a", "none"), newBackend(t, "b", "key-of-b")
			b := start(t, a.auth("credential managed_identity")+other.key())
			b.wantServed(20, other)
			b.wantServed(20, other)
			if n := a.calls.Load(); n != 0 {
				t.Errorf("a was called %d times without a token", n)
			}
			cooldowns := b.logged("cooldown started")
			if len(cooldowns) != 1 || cooldowns[0]["backend"] != "a" || cooldowns[0]["class"] != "no_credential" {
				t.Errorf("logged %v, want a cooldown of a", cooldowns)
			}
			if name != "hanging" {
				failures := b.logged("could not get a token")
				if len(failures) != 1 || failures[0]["level"] != "error" || failures[0]["credential"] != kindManagedIdentity || failures[0]["logger"] != "http.openai_lb.credentials.azure_identity" {
					t.Errorf("logged %v, want an error", failures)
				}
			}
		})
	}
}

func TestARefusedTokenIsRenewedOnceAndTriedAtTheSameBackend(t *testing.T) {
	e := entra(t)
	t.Setenv("THE_SECRET", clientSecret)
	options := fmt.Sprintf(`credential client_secret
		tenant_id the-tenant
		client_id the-client
		client_secret {env.THE_SECRET}
		authority_host %s`, e.URL)
	a := newBackend(t, "a", tokenNumber(1))
	admin := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	b := startWithAdmin(t, admin, a.auth(options))
	b.wantServed(1, a)
	for n := range 3 { // the backend takes the tokens before no more
		theSource(t).age()
		a.want.Store(tokenNumber(n + 2))
		b.wantServed([]int{1, 50, 50}[n], a)
		e.wantRequests(t, n+2)
	}
	if cooldowns := b.logged("cooldown started"); len(cooldowns) != 0 {
		t.Errorf("logged %v, want no cooldown", cooldowns)
	}

	// the admin API shows what was written
	config := lbtest.Get(http.DefaultClient, "http://"+admin+"/config/").Body
	without(t, "the config", config)
	if !strings.Contains(config, `"client_secret":"{env.THE_SECRET}"`) {
		t.Errorf("the config is %s", config)
	}
}

func TestARefusedTokenStartsNoCooldownIfThereIsANewOne(t *testing.T) {
	e := appService(t)
	a, other := newBackend(t, "a", tokenNumber(1)), newBackend(t, "b", "key-of-b")
	b := start(t, "request_buffers 1KiB\n"+a.auth("credential managed_identity")+other.key())
	b.wantServed(1, a)
	theSource(t).age()
	a.want.Store(tokenNumber(2))
	if status, _ := b.postBody(`{"model":"gpt-4o","user":"` + strings.Repeat("x", 4<<10) + `"}`); status != http.StatusServiceUnavailable {
		t.Errorf("the upload, which cannot be sent again, got %d, want 503", status)
	}
	b.wantServed(20, a)
	e.wantRequests(t, 2)
	if cooldowns := b.logged("cooldown started"); len(cooldowns) != 0 {
		t.Errorf("logged %v, want no cooldown", cooldowns)
	}
}

func TestABackendThatRefusesAllTokensDoesNotHammerTheEndpoint(t *testing.T) {
	e := appService(t)
	a := newBackend(t, "a", "none")
	b := start(t, a.auth("credential managed_identity"))
	for range 5 {
		for range 10 {
			if status, _ := b.post(); status == 200 {
				t.Error("it was served")
			}
		}
	}
	e.wantRequests(t, 1)
	theSource(t).age()
	var clients sync.WaitGroup
	for range 50 {
		clients.Go(func() { b.post() })
	}
	clients.Wait()
	e.wantRequests(t, 2)
	for range 50 {
		b.post()
	}
	e.wantRequests(t, 2)
}

func TestNothingIsLeftAfterShutdown(t *testing.T) {
	e := appService(t)
	e.hold = make(chan struct{})
	a, other := newBackend(t, "a", "none"), newBackend(t, "b", "key-of-b")
	before := runtime.NumGoroutine()
	b := start(t, a.auth("credential managed_identity")+other.key())
	b.wantServed(2, other) // the endpoint has not answered yet
	e.wantRequests(t, 1)
	b.stop()
	sources.Range(func(key, _ any) bool {
		t.Errorf("source %v is left", key)
		return true
	})
	a.CloseClientConnections()
	other.CloseClientConnections()
	e.CloseClientConnections()
	deadline := time.Now().Add(2 * time.Minute)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("goroutines are left:\n%s", stacks[:runtime.Stack(stacks, true)])
		}
		time.Sleep(10 * time.Millisecond)
	}
}
