package openailb

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	_ "github.com/caddyserver/caddy/v2/modules/logging"
	_ "github.com/caddyserver/caddy/v2/modules/metrics"
)

// foldersVariable names the folder that Caddy has instead of the user's.
const foldersVariable = "OPENAI_LB_TEST_FOLDER"

// TestMain gives Caddy folders of its own, so that tests write nothing to the
// user's, and a file to log to, which showLog reads. A process that a test
// starts has the folder of that test.
func TestMain(m *testing.M) {
	flag.Parse() // while errors of usage are still seen
	folder, given := os.LookupEnv(foldersVariable)
	if !given {
		var err error
		if folder, err = os.MkdirTemp("", "openai-lb-test-"); err != nil {
			log.Fatal(err)
		}
	}
	for _, name := range []string{foldersVariable, "HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"} {
		os.Setenv(name, folder)
	}
	// Caddy set these when the program started
	caddy.ConfigAutosavePath = filepath.Join(caddy.AppConfigDir(), "autosave.json")
	caddy.DefaultStorage.Path = caddy.AppDataDir()

	stderr := os.Stderr
	file, err := os.CreateTemp(folder, "log-")
	if err != nil {
		log.Fatal(err)
	}
	os.Stderr = file    // what Caddy logs to, unless its config says otherwise,
	caddy.BufferedLog() // and what it would log before it has a config
	if err := caddy.Load([]byte(`{"admin":{"disabled":true}}`), true); err != nil {
		log.Fatal(err)
	}
	if err := caddy.Stop(); err != nil {
		log.Fatal(err)
	}
	debug.SetGCPercent(400) // the tests make much garbage, and little else
	code := m.Run()
	os.Stderr = stderr
	if !given {
		os.RemoveAll(folder)
	}
	os.Exit(code)
}

// showLog shows what Caddy logs until the end of the test, if it fails.
func showLog(t testing.TB) {
	t.Helper()
	begin, err := os.Stderr.Stat()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		text, err := os.ReadFile(os.Stderr.Name())
		if err != nil {
			t.Error(err)
			return
		}
		t.Logf("Caddy logged:\n%s", text[begin.Size():])
	})
}

// run starts Caddy itself with a Caddyfile, as `caddy run` does.
func run(t testing.TB, caddyfile string) {
	t.Helper()
	showLog(t)
	reload(t, caddyfile)
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// reload replaces the config of the Caddy that runs, as `caddy reload` does.
func reload(t testing.TB, caddyfile string) {
	t.Helper()
	config, err := adapt(caddyfile)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load([]byte(config), true); err != nil {
		t.Fatal(err)
	}
}

// serveAt runs a site with these directives, and returns its address.
func serveAt(t testing.TB, directives string, globalOptions ...string) (address string) {
	t.Helper()
	port := freePort(t)
	run(t, fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n%s\n}\nhttp://:%d {\n%s\n}",
		strings.Join(globalOptions, "\n"), port, directives))
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// freePort returns a port of 127.0.0.1 that nobody else has until the test is
// over. It is none of those that systems choose for who asks for any (32768 and
// above), and tests that run at the same time take it for taken: we hold it at
// another loopback address, if the system has one.
func freePort(t testing.TB) int {
	t.Helper()
	for range 1000 {
		port := 10_000 + rand.IntN(20_000)
		held, err := net.Listen("tcp", fmt.Sprintf("127.0.0.2:%d", port))
		if err == nil {
			t.Cleanup(func() { held.Close() })
		} else if !errors.Is(err, syscall.EADDRNOTAVAIL) {
			continue
		}
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
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
	return exchangeOnce(client, http.MethodPost, url, strings.NewReader(body), headers...)
}

// get asks a balancer on a real socket for what is at a URL.
func get(client *http.Client, url string, headers ...string) clientReply {
	return exchangeOnce(client, http.MethodGet, url, http.NoBody, headers...)
}

func exchangeOnce(client *http.Client, method, url string, body io.Reader, headers ...string) clientReply {
	r, err := http.NewRequest(method, url, body)
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

// listenTLS serves a backend by TLS, and returns the options that make a
// balancer trust it.
func listenTLS(t *testing.T, name string, http2 bool) (b *fakeBackend, server *httptest.Server, options string) {
	t.Helper()
	b = &fakeBackend{name: name}
	server = httptest.NewUnstartedServer(b)
	server.EnableHTTP2 = http2
	server.StartTLS()
	t.Cleanup(server.Close)
	root := filepath.Join(t.TempDir(), "root.pem")
	if err := os.WriteFile(root, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	return b, server, "reverse_proxy {\ntransport http {\ntls_trust_pool file " + root + "\n}\n}"
}

// listenBy serves a backend by plain HTTP/1.1, or by HTTP/2 and TLS, and
// returns its URL and the options that it takes.
func listenBy(t *testing.T, major int, name string) (b *fakeBackend, url, options string) {
	t.Helper()
	if major == 1 {
		b, server := listen(t, name)
		return b, server.URL, ""
	}
	b, server, options := listenTLS(t, name, true)
	return b, server.URL, options
}

// wires are the versions of HTTP on both sides of a balancer.
var wires = []struct{ client, backend int }{{1, 1}, {1, 2}, {2, 1}, {2, 2}}

// within waits, for a bounded time, until something happened.
func within(t *testing.T, what string, happened <-chan struct{}) {
	t.Helper()
	select {
	case <-happened:
	case <-time.After(20 * time.Second):
		t.Fatalf("it did not happen in time: %s", what)
	}
}
