package streams

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const (
	caddyfileVariable = "OPENAI_LB_TEST_CADDYFILE"
	startedSuffix     = ".started"
)

// TestCaddyAsAProcess is no test but what startProcess runs: Caddy, until a
// signal stops it.
func TestCaddyAsAProcess(t *testing.T) {
	file := os.Getenv(caddyfileVariable)
	if file == "" {
		return
	}
	caddyfile := lbtest.ReadFile(t, file)
	caddy.TrapSignals()
	lbtest.Reload(t, string(caddyfile))
	// Caddy accepts connections before it has started, and then has a data race
	// between a TLS handshake and its own start
	lbtest.WriteFile(t, file+startedSuffix, "")
	select {}
}

// startProcess starts Caddy as a process of its own: what cuts the connections
// that are open after the grace period is the end of the process.
func startProcess(t *testing.T, caddyfile string) *exec.Cmd {
	t.Helper()
	file := filepath.Join(t.TempDir(), "Caddyfile")
	lbtest.WriteFile(t, file, caddyfile)
	process := exec.Command(os.Args[0], "-test.run=^TestCaddyAsAProcess$", "-test.timeout=60s")
	process.Env = append(os.Environ(), caddyfileVariable+"="+file)
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { process.Process.Kill(); process.Wait() })
	lbtest.WaitFor(t, func() bool {
		_, err := os.Stat(file + startedSuffix)
		return err == nil
	})
	return process
}

// accepts reports whether Caddy takes new connections.
func accepts(s *lbtest.Sites) bool {
	conn, err := net.Dial("tcp", s.Address)
	if err == nil {
		conn.Close()
	}
	return err == nil
}

// halfway is a site for each pair of HTTP versions, and a stream of each that
// is open until finish is closed. felt waits until no backend streams any more.
type halfway struct {
	*lbtest.Sites
	urls    []string
	streams []*http.Response
	finish  chan struct{}
	felt    sync.WaitGroup
}

func newHalfway(t *testing.T) *halfway {
	t.Helper()
	h := &halfway{Sites: lbtest.NewSites(t, "https"), finish: make(chan struct{})}
	for _, wire := range lbtest.Wires {
		a, backend, options := listenBy(t, wire.Backend, "a")
		a.Replies(func(w http.ResponseWriter, r *http.Request) {
			defer h.felt.Done()
			lbtest.Streams(lbtest.StreamContent)(w, r)
			select {
			case <-h.finish:
				io.WriteString(w, lbtest.StreamContent+lbtest.StreamEnd)
			case <-r.Context().Done():
			}
		})
		h.urls = append(h.urls, h.Add(fmt.Sprintf("openai_lb {\nbackend %s {\nname a%d\n}\n%s\n}", backend, len(h.urls), options)))
	}
	return h
}

func (h *halfway) open(t *testing.T) {
	t.Helper()
	h.felt.Add(len(lbtest.Wires))
	for n, wire := range lbtest.Wires {
		res := lbtest.BeginStream(t, h.NewClient(t, wire.Client), h.urls[n])
		if res.ProtoMajor != wire.Client {
			t.Fatalf("a stream goes by %s", res.Proto)
		}
		h.streams = append(h.streams, res)
	}
}

// wantRest checks how the streams end.
func (h *halfway) wantRest(t *testing.T, want string, clean bool) {
	t.Helper()
	for n, res := range h.streams {
		if rest, err := io.ReadAll(res.Body); string(rest) != want || (err == nil) != clean {
			t.Errorf("HTTP/%d to HTTP/%d: the stream ends with %q, %v", lbtest.Wires[n].Client, lbtest.Wires[n].Backend, rest, err)
		}
	}
	felt := make(chan struct{})
	go func() {
		h.felt.Wait()
		close(felt)
	}()
	lbtest.Within(t, "no backend streams any more", felt)
}

func TestAStopLetsOpenStreamsFinishAndCutsThemAfterTheGracePeriod(t *testing.T) {
	t.Run("within it", func(t *testing.T) {
		h := newHalfway(t)
		process := startProcess(t, h.Caddyfile(t, "grace_period 30s"))
		h.open(t)
		process.Process.Signal(syscall.SIGTERM)
		lbtest.WaitFor(t, func() bool { return !accepts(h.Sites) })
		close(h.finish)
		h.wantRest(t, lbtest.StreamContent+lbtest.StreamEnd, true)
		if err := process.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("after it", func(t *testing.T) {
		h := newHalfway(t)
		process := startProcess(t, h.Caddyfile(t, "grace_period 300ms"))
		h.open(t)
		process.Process.Signal(syscall.SIGTERM)
		h.wantRest(t, "", false)
		if err := process.Wait(); err != nil {
			t.Error(err)
		}
	})
}

// What ends the connections after the grace period is the system, which ends
// them cleanly if it is not told otherwise.
func TestAStopResetsAClientOfHTTP10AfterTheGracePeriod(t *testing.T) {
	s := lbtest.NewSites(t, "http")
	a, server := lbtest.Listen(t, "a")
	a.Replies(func(w http.ResponseWriter, r *http.Request) {
		lbtest.Streams(lbtest.StreamContent)(w, r)
		<-r.Context().Done()
	})
	s.Add("openai_lb {\nbackend " + server.URL + "\n}")
	process := startProcess(t, s.Caddyfile(t, "grace_period 300ms"))
	conn := lbtest.Dial(t, s.Address)
	io.WriteString(conn, "POST /v1/chat/completions HTTP/1.0\r\nHost: row-0.example.com\r\nContent-Length: 15\r\n\r\n"+`{"stream":true}`)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	process.Process.Signal(syscall.SIGTERM)
	if text, err := io.ReadAll(res.Body); string(text) != lbtest.StreamContent || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the stream ends with %q, %v", text, err)
	}
}

func TestAReloadLosesNoOpenStream(t *testing.T) {
	for name, grace := range map[string]string{"without a grace period": "", "even after it": "grace_period 10ms"} {
		t.Run(name, func(t *testing.T) {
			h := newHalfway(t)
			config := h.Caddyfile(t, grace)
			lbtest.Run(t, config)
			h.open(t)
			lbtest.Reload(t, strings.Replace(config, "X-Config 1", "X-Config 2", 1))
			if grace != "" {
				lbtest.WaitFor(t, func() bool {
					for _, entry := range h.Logged(t) {
						if entry.Msg == "server shutdown" {
							return true
						}
					}
					return false
				})
			}
			lbtest.WaitFor(t, func() bool {
				res, err := h.NewClient(t, 2).Get(strings.Replace(h.urls[0], "row-0", "nobody", 1))
				if err != nil {
					return false // Linux resets what waits at the socket of the old config
				}
				res.Body.Close()
				return res.Header.Get("X-Config") == "2"
			})
			close(h.finish)
			h.wantRest(t, lbtest.StreamContent+lbtest.StreamEnd, true)
			for n := range lbtest.Wires {
				if _, cooldown := h.LoggedOf(t, fmt.Sprintf("a%d", n)); cooldown != nil {
					t.Errorf("got the cooldown %+v", cooldown)
				}
			}
		})
	}
}

// TestACooldownSurvivesReloadsUnderLoad uses HTTP/2 over a Unix socket. Over
// HTTP/1.1, net/http's server closes a connection whose request it has read
// just when it shuts down, with any handler, where an HTTP/2 client is told in
// time. And Linux resets what waits in the accept queue of a TCP socket that
// Caddy closes for another on the same port.
func TestACooldownSurvivesReloadsUnderLoad(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	a.Replies(lbtest.Throttled("120"))
	certificate, client := lbtest.ServerCertificate(t)
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
	lbtest.Run(t, config(0))
	const url = "https://example.com/v1/chat/completions"
	lbtest.Ask(client, url).WantServed(t, "b")

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
				reply := lbtest.Ask(client, url)
				if reply.Err != nil || reply.Status != 200 || reply.Backend != "b" {
					t.Errorf("under load a client got %d from %q: %v", reply.Status, reply.Backend, reply.Err)
					return
				}
				sent.Add(1)
			}
		})
	}
	for n := range 10 {
		before := sent.Load()
		lbtest.Reload(t, config(n+1))
		for sent.Load() < before+50 && !t.Failed() {
			runtime.Gosched()
		}
	}
	close(stop)
	load.Wait()
	// what was accepted in the moment of a reload stays with the old config
	answers := func(config string) lbtest.Reply {
		var reply lbtest.Reply
		lbtest.WaitFor(t, func() bool {
			client.CloseIdleConnections()
			reply = lbtest.Ask(client, url)
			sent.Add(1)
			return reply.Header.Get("X-Config") == config
		})
		return reply
	}
	answers("10").WantServed(t, "b")
	if n := len(a.Received()); n != 1 {
		t.Errorf("a was called %d times, want once: its cooldown must outlive the reloads", n)
	}
	if got := int64(len(b.Received())); got != sent.Load()+1 {
		t.Errorf("b served %d requests, want %d: one for each reply, and none besides", got, sent.Load()+1)
	}

	// another key is another backend: what is known of the old one is not held
	// against it
	a.Recovers()
	lbtest.Reload(t, strings.Replace(config(11), "key-of-a", "new-key-of-a", 1))
	answers("11").WantServed(t, "a")
}
