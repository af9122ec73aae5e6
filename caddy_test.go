package openailb

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	_ "github.com/caddyserver/caddy/v2/modules/logging"
	_ "github.com/caddyserver/caddy/v2/modules/metrics"
)

// run starts Caddy itself with a Caddyfile, as `caddy run` does.
func run(t *testing.T, caddyfile string) {
	t.Helper()
	reload(t, caddyfile)
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// reload replaces the config of the Caddy that runs, as `caddy reload` does.
func reload(t *testing.T, caddyfile string) {
	t.Helper()
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	config, err := adapt(caddyfile)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load([]byte(config), true); err != nil {
		t.Fatal(err)
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// listen serves a backend on a real socket.
func listen(t *testing.T, name string) (*fakeBackend, *httptest.Server) {
	t.Helper()
	b := &fakeBackend{name: name}
	s := httptest.NewServer(b)
	t.Cleanup(s.Close)
	return b, s
}

// newClient is a client with connections of its own.
func newClient(t *testing.T) *http.Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 300}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: time.Minute}
}

// ask sends a request to a balancer on a real socket.
func ask(client *http.Client, url string, headers ...string) clientReply {
	return post(client, url, `{"model":"gpt-4o"}`, headers...)
}

// post sends a body to a balancer on a real socket.
func post(client *http.Client, url, body string, headers ...string) clientReply {
	r, err := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return clientReply{err: err}
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	res, err := client.Do(r)
	if err != nil {
		return clientReply{err: err}
	}
	defer res.Body.Close()
	reply, err := io.ReadAll(res.Body)
	return clientReply{res.StatusCode, res.Header, string(reply), res.Header.Get("X-Backend"), err}
}

// TestABenchSurvivesReloadsUnderLoad uses HTTP/2 over a Unix socket. Over
// HTTP/1.1, net/http's server closes a connection whose request it has read
// just when it shuts down, with any handler, where an HTTP/2 client is told in
// time. And Linux resets what waits in the accept queue of a TCP socket that
// Caddy closes for another on the same port.
func TestABenchSurvivesReloadsUnderLoad(t *testing.T) {
	a, serverA := listen(t, "a")
	b, serverB := listen(t, "b")
	a.replies(throttled("120"))
	certificate, client := serverCertificate(t)
	socket := filepath.Join(t.TempDir(), "lb.sock")
	client.Transport.(*http.Transport).DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	config := func(n int) string {
		return fmt.Sprintf(`{
			admin off
			auto_https off
			grace_period 10s
		}
		https://example.com {
			bind unix/%s
			%s
			header X-Config %d
			openai_lb {
				backend %s {
					name a
					api_key key-of-a
				}
				backend %s {
					name b
					priority 2
					api_key key-of-b
				}
			}
		}`, socket, certificate, n, serverA.URL, serverB.URL)
	}
	run(t, config(0))
	const url = "https://example.com/v1/chat/completions"
	ask(client, url).wantServed(t, "b")

	stop := make(chan struct{})
	var sent atomic.Int64
	var load sync.WaitGroup
	for range 8 {
		load.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				reply := ask(client, url)
				if reply.err != nil || reply.status != 200 || reply.backend != "b" {
					t.Errorf("under load a client got %d from %q: %v", reply.status, reply.backend, reply.err)
					return
				}
				sent.Add(1)
			}
		})
	}
	for n := range 10 {
		before := sent.Load()
		reload(t, config(n+1))
		for sent.Load() < before+50 && !t.Failed() {
			runtime.Gosched()
		}
	}
	close(stop)
	load.Wait()
	// a connection that was accepted in the moment of a reload stays with the
	// old config
	client.CloseIdleConnections()
	if reply := ask(client, url); reply.header.Get("X-Config") != "10" {
		t.Errorf("config %q answers, want 10", reply.header.Get("X-Config"))
	}
	if n := len(a.received()); n != 1 {
		t.Errorf("a was called %d times, want once: its bench must outlive the reloads", n)
	}
	if got := int64(len(b.received())); got != sent.Load()+2 {
		t.Errorf("b served %d requests, want %d: one for each reply, and none besides", got, sent.Load()+2)
	}

	// another key is another backend: what is known of the old one is not held against it
	a.recovers()
	reload(t, strings.Replace(config(11), "key-of-a", "new-key-of-a", 1))
	client.CloseIdleConnections()
	ask(client, url).wantServed(t, "a")
}

// serverCertificate returns the tls line of a site at example.com, and an HTTP/2
// client that trusts it.
func serverCertificate(t *testing.T) (line string, client *http.Client) {
	t.Helper()
	server := httptest.NewUnstartedServer(nil)
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	certificate := server.TLS.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(certificate.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, block := range map[string]*pem.Block{
		"cert.pem": {Type: "CERTIFICATE", Bytes: certificate.Certificate[0]},
		"key.pem":  {Type: "PRIVATE KEY", Bytes: key},
	} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	client = server.Client()
	t.Cleanup(client.CloseIdleConnections)
	return fmt.Sprintf("tls %s/cert.pem %s/key.pem", dir, dir), client
}

func TestAStormOfThrottlesLeavesNothingBehind(t *testing.T) {
	a, serverA := listen(t, "a")
	b, serverB := listen(t, "b")
	port := freePort(t)
	logs := filepath.Join(t.TempDir(), "log.json")
	before := runtime.NumGoroutine()
	func() {
		run := fmt.Sprintf(`{
			admin off
			log {
				output file %s
			}
		}
		http://127.0.0.1:%d {
			openai_lb {
				backend %s {
					name a
				}
				backend %s {
					name b
					priority 2
				}
			}
		}`, logs, port, serverA.URL, serverB.URL)
		reload(t, run)
		// all requests are at a before the first is refused
		var arrived sync.WaitGroup
		arrived.Add(200)
		a.replies(func(w http.ResponseWriter, r *http.Request) {
			arrived.Done()
			arrived.Wait()
			throttled("300")(w, r)
		})
		client := newClient(t)
		var clients sync.WaitGroup
		for range 200 {
			clients.Go(func() {
				if reply := ask(client, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)); reply.status != 200 || reply.backend != "b" {
					t.Errorf("client got %d from %q: %v", reply.status, reply.backend, reply.err)
				}
			})
		}
		clients.Wait()
		client.CloseIdleConnections()
	}()
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	if n, m := len(a.received()), len(b.received()); n != 200 || m != 200 {
		t.Errorf("a was called %d times and b %d, want 200 each", n, m)
	}
	text, err := os.ReadFile(logs)
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(text, []byte("backend benched")); n != 1 {
		t.Errorf("logged %d benches, want 1", n)
	}
	serverA.Close()
	serverB.Close()
	waitFor(t, func() bool { return runtime.NumGoroutine() <= before })
}

// waitFor waits, for a bounded time, for what happens in the background.
func waitFor(t *testing.T, happened func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !happened() {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("it did not happen; goroutines:\n%s", stacks[:runtime.Stack(stacks, true)])
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestAPlainReverseProxyHonoursPriorityWeightAndRetryAfter(t *testing.T) {
	for _, retries := range []string{"", "lb_retries 5", "lb_try_duration 5s"} {
		t.Run(retries, func(t *testing.T) {
			a, serverA := listen(t, "a")
			b, serverB := listen(t, "b")
			c, serverC := listen(t, "c")
			dial := func(s *httptest.Server) string { return s.Listener.Addr().String() }
			port := freePort(t)
			run(t, fmt.Sprintf(`{
				admin off
			}
			http://127.0.0.1:%d {
				reverse_proxy %[2]s %[3]s %[4]s {
					lb_policy openai_lb {
						upstream %[3]s {
							priority 2
							weight 3
						}
						upstream %[4]s {
							priority 2
							weight 1
						}
					}
					%[5]s
					transport openai_lb
				}
			}`, port, dial(serverA), dial(serverB), dial(serverC), retries))
			client := newClient(t)
			url := fmt.Sprintf("http://127.0.0.1:%d/anything", port)
			for range 20 {
				ask(client, url).wantServed(t, "a")
			}
			a.replies(throttled("300"))
			for range 400 {
				ask(client, url).wantServed(t, "b", "c")
			}
			if n := len(a.received()); n != 21 {
				t.Errorf("a was called %d times, want 21", n)
			}
			if n := len(b.received()); n < 250 || n > 350 {
				t.Errorf("b served %d of 400, want about 300", n)
			}
			for _, call := range append(b.received(), c.received()...) {
				if call.bodyHash != sha([]byte(`{"model":"gpt-4o"}`)) {
					t.Fatal("a body was changed on its way")
				}
			}
			b.replies(throttled("40"))
			c.replies(throttled("50"))
			for range 2 {
				reply := ask(client, url)
				reply.wantError(t, 429, "rate_limit_exceeded")
				if got := reply.header.Get("Retry-After"); got != "40" && got != "39" {
					t.Errorf("Retry-After is %q, want 40", got)
				}
			}
			if n := len(b.received()) + len(c.received()); n != 402 {
				t.Errorf("b and c were called %d times, want 402", n)
			}
		})
	}
}

func TestThePolicyAloneBalancesByPriorityAndFailsOver(t *testing.T) {
	_, serverA := listen(t, "a")
	b, serverB := listen(t, "b")
	serverA.Close()
	port := freePort(t)
	run(t, fmt.Sprintf(`{
		admin off
	}
	http://127.0.0.1:%d {
		reverse_proxy %s %s {
			lb_policy openai_lb {
				upstream %[3]s {
					priority 2
				}
			}
			lb_retries 1
		}
	}`, port, serverA.Listener.Addr(), serverB.Listener.Addr()))
	for range 3 {
		ask(newClient(t), fmt.Sprintf("http://127.0.0.1:%d/", port)).wantServed(t, "b")
	}
	if n := len(b.received()); n != 3 {
		t.Errorf("b served %d, want 3", n)
	}
}

func TestBackendsAreReachedByTLSAndHTTP2(t *testing.T) {
	a, server, trust := listenTLS(t, "a", true)
	b, refusing := listen(t, "b")
	b.replies(throttled("60"))
	address := serveAt(t, fmt.Sprintf(`openai_lb {
		backend %s {
			name b
		}
		backend %s {
			name a
			priority 2
		}
		%s
	}`, refusing.URL, server.URL, trust))
	ask(newClient(t), "http://"+address+"/v1/chat/completions").wantServed(t, "a")
	got := a.received()[0].request
	if got.ProtoMajor != 2 || got.Host != server.Listener.Addr().String() {
		t.Errorf("a was reached by %s as %q", got.Proto, got.Host)
	}
}

func TestABodyOverALimitIsRefusedInOpenAIsWords(t *testing.T) {
	_, server := listen(t, "a")
	port := freePort(t)
	run(t, fmt.Sprintf(`{
		admin off
	}
	http://127.0.0.1:%d {
		request_body {
			max_size 1KB
		}
		openai_lb {
			backend %s
		}
	}`, port, server.URL))
	r, err := http.NewRequest(http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port), chunked(make([]byte, 4000)))
	if err != nil {
		t.Fatal(err)
	}
	res, err := newClient(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	clientReply{status: res.StatusCode, header: res.Header, body: string(body), err: err}.wantError(t, 413, "request_too_large")
}

func TestAClientThatLeavesAStreamIsFeltByTheBackend(t *testing.T) {
	a, server := listen(t, "a")
	left := make(chan struct{})
	a.replies(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {}\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(left)
	})
	port := freePort(t)
	run(t, fmt.Sprintf("{\nadmin off\n}\nhttp://127.0.0.1:%d {\nopenai_lb {\nbackend %s\n}\n}", port, server.URL))
	ctx, leave := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port), strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	res, err := newClient(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.ReadFull(res.Body, make([]byte, len("data: {}\n\n"))); err != nil {
		t.Fatal(err)
	}
	leave()
	select {
	case <-left:
	case <-time.After(20 * time.Second):
		t.Error("the backend still streams")
	}
}
