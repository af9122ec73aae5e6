package verdict

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// TestAnErrorSaysWhyACertificateIsNotAccepted meets real errors, as the
// transport reports them.
func TestAnErrorSaysWhyACertificateIsNotAccepted(t *testing.T) {
	now := time.Now().UTC().Truncate(time.Second)
	for want, c := range map[string]struct {
		from, until time.Time
		host        string
		untrusted   bool
	}{
		"it expired at " + now.Add(-time.Hour).Format(time.RFC3339):                      {from: now.Add(-2 * time.Hour), until: now.Add(-time.Hour), host: "backend.test"},
		"it is not valid yet: that begins at " + now.Add(time.Hour).Format(time.RFC3339): {from: now.Add(time.Hour), until: now.Add(2 * time.Hour), host: "backend.test"},
		"it is for another host":    {from: now.Add(-time.Hour), until: now.Add(time.Hour), host: "another.test"},
		"its issuer is not trusted": {from: now.Add(-time.Hour), until: now.Add(time.Hour), host: "backend.test", untrusted: true},
	} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{
			SerialNumber: big.NewInt(1), DNSNames: []string{c.host}, NotBefore: c.from, NotAfter: c.until, IsCA: true, BasicConstraintsValid: true,
		}
		der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		server := httptest.NewUnstartedServer(http.NotFoundHandler())
		server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
		server.StartTLS()
		roots := x509.NewCertPool()
		if its, err := x509.ParseCertificate(der); err == nil && !c.untrusted {
			roots.AddCert(its)
		}
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "backend.test"}}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		res, err := transport.RoundTrip(req)
		server.Close()
		if err == nil {
			res.Body.Close()
			t.Fatal("the certificate is accepted")
		}
		for _, text := range []string{err.Error(), OwnWords(err).Error()} {
			if got := DetailOf(CauseOf(err), text); got != want {
				t.Errorf("%q is %q, want %q", text, got, want)
			}
		}
	}
}

func TestDetailsOfErrors(t *testing.T) {
	for _, tt := range []struct{ cause, text, want string }{
		{"dns", (&net.DNSError{Err: "no such host", Name: "east.test", IsNotFound: true}).Error(), "there is no such name"},
		{"dns", "lookup east.test on 127.0.0.53:53: read udp 127.0.0.1:1->127.0.0.53:53: i/o timeout", "the resolver does not answer"},
		{"dns", "lookup east.test on 127.0.0.53:53: server misbehaving", "the resolver has failed"},
		{"tls", "http: server gave HTTP response to HTTPS client", "it answers without TLS"},
		{"tls", "remote error: tls: certificate required", "it requires a client certificate"},
		{"refused", "dial tcp 127.0.0.1:443: connect: connection refused", ""},
		{"certificate", "x509: certificate has expired or is not yet valid: current time is after <b>sk-1234</b>", "it expired"},
		{"certificate", "", ""},
	} {
		if got := DetailOf(tt.cause, tt.text); got != tt.want {
			t.Errorf("%s, %q: got %q, want %q", tt.cause, tt.text, got, tt.want)
		}
	}
}
