package lbtest

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
)

// Listen serves a backend on a real socket.
func Listen(t *testing.T, name string) (*Backend, *httptest.Server) {
	t.Helper()
	b := &Backend{Name: name}
	s := httptest.NewServer(b)
	t.Cleanup(s.Close)
	return b, s
}

// ServerCertificate returns the tls line of a site at example.com, and an HTTP/2
// client that trusts it.
func ServerCertificate(t *testing.T) (line string, client *http.Client) {
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

// ListenTLS serves a backend by TLS, and returns the options that make a
// balancer trust it.
func ListenTLS(t *testing.T, name string, http2 bool) (b *Backend, server *httptest.Server, options string) {
	t.Helper()
	b = &Backend{Name: name}
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

// ListenBy serves a backend by plain HTTP/1.1, or by HTTP/2 and TLS, and
// returns its URL and the options that it takes.
func ListenBy(t *testing.T, major int, name string) (b *Backend, url, options string) {
	t.Helper()
	if major == 1 {
		b, server := Listen(t, name)
		return b, server.URL, ""
	}
	b, server, options := ListenTLS(t, name, true)
	return b, server.URL, options
}

// Wires are the versions of HTTP on both sides of a balancer.
var Wires = []struct{ Client, Backend int }{{1, 1}, {1, 2}, {2, 1}, {2, 2}}
