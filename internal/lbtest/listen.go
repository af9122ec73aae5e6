package lbtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Listen serves a backend on a real socket.
func Listen(t *testing.T, name string) (*Backend, *httptest.Server) {
	t.Helper()
	b := &Backend{Name: name}
	s := httptest.NewServer(b)
	t.Cleanup(s.Close)
	return b, s
}

// Dial connects to a real socket until the end of the test. The connection has
// a deadline.
func Dial(t testing.TB, address string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	return conn
}

// NewCertificate makes a certificate that signs itself. Its key is of ECDSA:
// RSA takes seconds under the race detector.
func NewCertificate(until time.Time, hosts ...string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: until, IsCA: true, BasicConstraintsValid: true}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

var ownCertificate = sync.OnceValues(func() (tls.Certificate, error) {
	return NewCertificate(time.Now().Add(24*time.Hour), "127.0.0.1", "example.com", "*.example.com")
})

// certificate returns the certificate of all servers of a process.
func certificate(t testing.TB) tls.Certificate {
	t.Helper()
	shown, err := ownCertificate()
	if err != nil {
		t.Fatal(err)
	}
	return shown
}

// StartTLS starts a server by TLS. All servers show the same certificate.
func StartTLS(t testing.TB, server *httptest.Server) {
	t.Helper()
	server.TLS = &tls.Config{Certificates: []tls.Certificate{certificate(t)}}
	server.StartTLS()
	t.Cleanup(server.Close)
}

// WriteCertificate writes the certificate of all servers into a file, and its
// key into another.
func WriteCertificate(t testing.TB) (file, keyFile string) {
	t.Helper()
	shown := certificate(t)
	key, err := x509.MarshalPKCS8PrivateKey(shown.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	WritePEM(t, file, "CERTIFICATE", shown.Certificate[0])
	WritePEM(t, keyFile, "PRIVATE KEY", key)
	return file, keyFile
}

// WritePEM writes a file with one block.
func WritePEM(t testing.TB, path, kind string, der []byte) {
	t.Helper()
	WriteFile(t, path, string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
}

// ServerCertificate returns the tls line of a site at example.com, and an
// HTTP/2 client that trusts it.
func ServerCertificate(t *testing.T) (line string, client *http.Client) {
	t.Helper()
	file, keyFile := WriteCertificate(t)
	server := httptest.NewUnstartedServer(nil)
	server.EnableHTTP2 = true
	StartTLS(t, server)
	client = server.Client()
	t.Cleanup(client.CloseIdleConnections)
	return "tls " + file + " " + keyFile, client
}

// ListenTLS serves a backend by TLS, and returns the options that make a
// balancer trust it.
func ListenTLS(t *testing.T, name string, http2 bool) (b *Backend, server *httptest.Server, options string) {
	t.Helper()
	b = &Backend{Name: name}
	server = httptest.NewUnstartedServer(b)
	server.EnableHTTP2 = http2
	StartTLS(t, server)
	root, _ := WriteCertificate(t)
	return b, server, "transport http {\ntls_trust_pool file " + root + "\n}"
}

// Wires are the versions of HTTP on both sides of a balancer.
var Wires = []struct{ Client, Backend int }{{1, 1}, {1, 2}, {2, 1}, {2, 2}}
