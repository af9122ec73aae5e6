package openailb

import (
	"context"
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
	caddyfile, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	caddy.TrapSignals()
	reload(t, string(caddyfile))
	// Caddy accepts connections before it has started, and then has a data race
	// between a TLS handshake and its own start
	writeFile(t, file+startedSuffix, "")
	select {}
}

// startProcess starts Caddy as a process of its own: what cuts the connections
// that are open after the grace period is the end of the process.
func startProcess(t *testing.T, caddyfile string) *exec.Cmd {
	t.Helper()
	file := filepath.Join(t.TempDir(), "Caddyfile")
	if err := os.WriteFile(file, []byte(caddyfile), 0o600); err != nil {
		t.Fatal(err)
	}
	process := exec.Command(os.Args[0], "-test.run=^TestCaddyAsAProcess$", "-test.timeout=60s")
	process.Env = append(os.Environ(), caddyfileVariable+"="+file)
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { process.Process.Kill(); process.Wait() })
	waitFor(t, func() bool {
		_, err := os.Stat(file + startedSuffix)
		return err == nil
	})
	return process
}

// accepts reports whether Caddy takes new connections.
func (s *sites) accepts() bool {
	conn, err := net.Dial("tcp", s.address)
	if err == nil {
		conn.Close()
	}
	return err == nil
}

// halfway is a site for each pair of HTTP versions, and a stream of each that is
// open until finish is closed. felt waits until no backend streams any more.
type halfway struct {
	*sites
	urls    []string
	streams []*http.Response
	finish  chan struct{}
	felt    sync.WaitGroup
}

func newHalfway(t *testing.T) *halfway {
	t.Helper()
	h := &halfway{sites: newSites(t, "https"), finish: make(chan struct{})}
	for _, wire := range wires {
		a, backend, options := listenBy(t, wire.backend, "a")
		a.replies(func(w http.ResponseWriter, r *http.Request) {
			defer h.felt.Done()
			streams(streamContent)(w, r)
			select {
			case <-h.finish:
				io.WriteString(w, streamContent+streamEnd)
			case <-r.Context().Done():
			}
		})
		h.urls = append(h.urls, h.add(fmt.Sprintf("openai_lb {\nbackend %s {\nname a%d\n}\n%s\n}", backend, len(h.urls), options)))
	}
	return h
}

func (h *halfway) open(t *testing.T) {
	t.Helper()
	h.felt.Add(len(wires))
	for n, wire := range wires {
		res := beginStream(t, h.newClient(t, wire.client), h.urls[n])
		if res.ProtoMajor != wire.client {
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
			t.Errorf("HTTP/%d to HTTP/%d: the stream ends with %q, %v", wires[n].client, wires[n].backend, rest, err)
		}
	}
	felt := make(chan struct{})
	go func() {
		h.felt.Wait()
		close(felt)
	}()
	within(t, "no backend streams any more", felt)
}

func TestAStopLetsOpenStreamsFinishAndCutsThemAfterTheGracePeriod(t *testing.T) {
	t.Run("within it", func(t *testing.T) {
		h := newHalfway(t)
		process := startProcess(t, h.caddyfile(t, "grace_period 30s"))
		h.open(t)
		process.Process.Signal(syscall.SIGTERM)
		waitFor(t, func() bool { return !h.accepts() })
		close(h.finish)
		h.wantRest(t, streamContent+streamEnd, true)
		if err := process.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("after it", func(t *testing.T) {
		h := newHalfway(t)
		process := startProcess(t, h.caddyfile(t, "grace_period 300ms"))
		h.open(t)
		process.Process.Signal(syscall.SIGTERM)
		h.wantRest(t, "", false)
		if err := process.Wait(); err != nil {
			t.Error(err)
		}
	})
}

func TestAReloadLosesNoOpenStream(t *testing.T) {
	for name, grace := range map[string]string{"without a grace period": "", "even after it": "grace_period 10ms"} {
		t.Run(name, func(t *testing.T) {
			h := newHalfway(t)
			config := h.caddyfile(t, grace)
			run(t, config)
			h.open(t)
			reload(t, strings.Replace(config, "X-Config 1", "X-Config 2", 1))
			if grace != "" {
				waitFor(t, func() bool {
					for _, entry := range h.logged(t) {
						if entry.Msg == "server shutdown" {
							return true
						}
					}
					return false
				})
			}
			waitFor(t, func() bool {
				res, err := h.newClient(t, 2).Get(strings.Replace(h.urls[0], "row-0", "nobody", 1))
				if err != nil {
					return false // Linux resets what waits at the socket of the old config
				}
				res.Body.Close()
				return res.Header.Get("X-Config") == "2"
			})
			close(h.finish)
			h.wantRest(t, streamContent+streamEnd, true)
			for n := range wires {
				if _, benched := h.loggedOf(t, fmt.Sprintf("a%d", n)); benched != nil {
					t.Errorf("benched %+v", benched)
				}
			}
		})
	}
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
	// what was accepted in the moment of a reload stays with the old config
	answers := func(config string) clientReply {
		var reply clientReply
		waitFor(t, func() bool {
			client.CloseIdleConnections()
			reply = ask(client, url)
			sent.Add(1)
			return reply.header.Get("X-Config") == config
		})
		return reply
	}
	answers("10").wantServed(t, "b")
	if n := len(a.received()); n != 1 {
		t.Errorf("a was called %d times, want once: its bench must outlive the reloads", n)
	}
	if got := int64(len(b.received())); got != sent.Load()+1 {
		t.Errorf("b served %d requests, want %d: one for each reply, and none besides", got, sent.Load()+1)
	}

	// another key is another backend: what is known of the old one is not held against it
	a.recovers()
	reload(t, strings.Replace(config(11), "key-of-a", "new-key-of-a", 1))
	answers("11").wantServed(t, "a")
}
