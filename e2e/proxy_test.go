package e2e

import (
	"encoding/pem"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

// connectProxy is a forward proxy that knows the way to some hosts.
type connectProxy struct {
	hosts map[string]string // addresses, by host and port

	mu    sync.Mutex
	asked map[string]bool
}

func (p *connectProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.asked[r.Method+" "+r.Host] = true
	address, known := p.hosts[r.Host]
	p.mu.Unlock()
	if r.Method != http.MethodConnect || !known {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	backend, err := net.Dial("tcp", address)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer backend.Close()
	w.WriteHeader(http.StatusOK)
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer client.Close()
	go func() {
		_, _ = io.Copy(backend, buffered)
		_ = backend.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(client, backend)
}

// TestBackendsAreReachedThroughTheProxyOfTheEnvironment has two backends whose
// names only a proxy knows.
func TestBackendsAreReachedThroughTheProxyOfTheEnvironment(t *testing.T) {
	for _, c := range []struct {
		name    string
		noProxy string
		want    []string
	}{
		{"all", "NO_PROXY=localhost", []string{"CONNECT example.com:443", "CONNECT unknown.invalid:443"}},
		{"all but NO_PROXY", "NO_PROXY=localhost,.invalid", []string{"CONNECT example.com:443"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var received atomic.Pointer[http.Request]
			backend := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				received.Store(r)
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, `{"object":"chat.completion"}`)
			}))
			backend.EnableHTTP2 = true
			backend.StartTLS() // its certificate is for example.com
			defer backend.Close()
			root := filepath.Join(t.TempDir(), "root.pem")
			text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: backend.Certificate().Raw})
			if err := os.WriteFile(root, text, 0o600); err != nil {
				t.Fatal(err)
			}
			handler := &connectProxy{
				hosts: map[string]string{"example.com:443": backend.Listener.Addr().String()},
				asked: make(map[string]bool),
			}
			proxy := httptest.NewServer(handler)
			defer proxy.Close()

			env := append(variables(1, "https://unknown.invalid", "APIKEY=one"), variables(2, "https://example.com", "APIKEY=two")...)
			url := startContainer(t, append(env, "HTTPS_PROXY="+proxy.URL, c.noProxy, "SSL_CERT_FILE="+root)...)
			s := &site{client: &http.Client{Timeout: patience}}
			for range 2 {
				if res, body := s.post(t, url); res.StatusCode != http.StatusOK || body != `{"object":"chat.completion"}` {
					t.Fatalf("a client gets %d %s", res.StatusCode, body)
				}
			}
			got := received.Load()
			if got.Host != "example.com" || got.Header.Get("Api-Key") != "two" || got.ProtoMajor != 2 {
				t.Errorf("the backend is reached by %s as %q, with %v", got.Proto, got.Host, got.Header)
			}
			handler.mu.Lock()
			defer handler.mu.Unlock()
			if asked := slices.Sorted(maps.Keys(handler.asked)); !slices.Equal(asked, c.want) {
				t.Errorf("the proxy is asked for %q, want %q", asked, c.want)
			}
		})
	}
}
