package openailb_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// TestTheExampleOfCallersLetsInWhomItSays sends requests to each of its sites.
func TestTheExampleOfCallersLetsInWhomItSays(t *testing.T) {
	t.Setenv("EAST_KEY", "key-of-east")
	t.Setenv("TEAM_KEY", "client-key-of-team")
	_, backend := lbtest.Listen(t, "east")
	checks := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/check" || r.Header.Get("Cookie") != "session=1" {
			w.WriteHeader(http.StatusForbidden)
		}
	}))
	t.Cleanup(checks.Close)
	text := lbtest.ReadFile(t, "examples/callers.Caddyfile")
	repository, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	hash := regexp.MustCompile(`\$2a\$\S+`).FindString(string(text))
	port := lbtest.FreePort(t)
	config := strings.NewReplacer(
		"https://contoso-east.openai.azure.com {", backend.URL+" {\nauth api_key",
		"auth.example.com:8080", checks.Listener.Addr().String(),
		// a hash of the same password that takes less time than it should
		"/etc/caddy/limits", filepath.Join(repository, "examples/limits"),
		hash, "$2a$04$cLCzNCpXUHahevsgWxHSE.TnIxl5qWXp35J4UcibrLM26p1kg55N2",
		".example.com {", fmt.Sprintf(".localhost:%d {", port),
	).Replace(string(text))
	storage := t.TempDir()
	lbtest.Run(t, "{\nadmin off\ndefault_bind 127.0.0.1\nskip_install_trust\nauto_https disable_redirects\nstorage file_system "+storage+"\n}\n"+config)

	certificate := clientCertificate(t, filepath.Join(storage, "pki/authorities/local"))
	dial := func(site string, certificates ...tls.Certificate) (net.Conn, error) {
		return tls.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port), &tls.Config{
			ServerName: site + ".localhost", InsecureSkipVerify: true, Certificates: certificates,
		})
	}
	for _, site := range []string{"keys", "internal", "mtls", "password", "sso"} {
		lbtest.WaitFor(t, func() bool {
			conn, err := dial(site, certificate)
			if err == nil {
				conn.Close()
			}
			return err == nil
		})
	}
	ask := func(site, path string, header http.Header, certificates ...tls.Certificate) int {
		transport := &http.Transport{DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return dial(site, certificates...) }}
		defer transport.CloseIdleConnections()
		r := lbtest.NewRequest(t, http.MethodPost, fmt.Sprintf("https://%s.localhost:%d%s", site, port, path), strings.NewReader(`{}`))
		if header != nil {
			r.Header = header
		}
		res, err := (&http.Client{Transport: transport, Timeout: time.Minute}).Do(r)
		if err != nil {
			return 0 // no connection
		}
		res.Body.Close()
		return res.StatusCode
	}
	password := func(word string) http.Header {
		r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
		r.SetBasicAuth("alice", word)
		return r.Header
	}
	for _, c := range []struct {
		name, site, path string
		header           http.Header
		certificates     []tls.Certificate
		want             int
	}{
		{"a client key", "keys", "/v1/x", http.Header{"Api-Key": {"client-key-of-team"}}, nil, 200},
		{"another key", "keys", "/v1/x", http.Header{"Api-Key": {"key-of-east"}}, nil, 401},
		{"one of our networks", "internal", "/v1/x", nil, nil, 200},
		{"a path that is not ours", "internal", "/admin", nil, nil, 403},
		{"a client certificate", "mtls", "/v1/x", nil, []tls.Certificate{certificate}, 200},
		{"no client certificate", "mtls", "/v1/x", nil, nil, 0},
		{"a password", "password", "/v1/x", password("hunter2"), nil, 200},
		{"a wrong password", "password", "/v1/x", password("hunter3"), nil, 401},
		{"a session", "sso", "/v1/x", http.Header{"Cookie": {"session=1"}}, nil, 200},
		{"no session", "sso", "/v1/x", nil, nil, 403},
	} {
		if got := ask(c.site, c.path, c.header, c.certificates...); got != c.want {
			t.Errorf("%s gets %d of %s, want %d", c.name, got, c.site, c.want)
		}
	}
}

// TestTheLimitsOfTheExamplesLetFilesThrough has a limit of 1 KB in the place of
// each example's.
func TestTheLimitsOfTheExamplesLetFilesThrough(t *testing.T) {
	limit := regexp.MustCompile(`(?ms)^\t(@limited [^\n]*\n\t)?request_body .*?^\t}\n`)
	errors := regexp.MustCompile(`(?ms)^\thandle_errors .*?^\t}\n`)
	for _, file := range []string{"examples/edge.Caddyfile", "examples/kubernetes/Caddyfile", "examples/container-apps/Caddyfile"} {
		t.Run(file, func(t *testing.T) {
			text := lbtest.ReadFile(t, file)
			_, server := lbtest.Listen(t, "a")
			address := lbtest.ServeAt(t, strings.ReplaceAll(limit.FindString(string(text)), "32MiB", "1KB")+
				"openai_lb {\nbackend "+server.URL+"\n}\n"+errors.FindString(string(text)))
			for path, want := range map[string]int{
				"/v1/files": 200, "/openai/files": 200, "/openai/v1/files": 200, "/v1/uploads/upload_1/parts": 200,
				"/v1/chat/completions": 413, "/v1/files/x": 413,
			} {
				res, err := lbtest.NewClient(t).Post("http://"+address+path, "application/json", strings.NewReader(strings.Repeat(" ", 4000)))
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(res.Body)
				res.Body.Close()
				switch reply := (lbtest.Reply{Status: res.StatusCode, Header: res.Header, Body: string(body), Err: err}); {
				case res.StatusCode != want:
					t.Errorf("%s gets %d, want %d", path, res.StatusCode, want)
				case want == 413:
					reply.WantError(t, 413, "request_too_large")
				}
			}
		})
	}
}

// TestOperationsListsEachAlertAndEachRowOfTheDashboard so that an operator
// knows what there is to see.
func TestOperationsListsEachAlertAndEachRowOfTheDashboard(t *testing.T) {
	page := string(lbtest.ReadFile(t, "docs/operations.md"))
	var dashboard struct {
		Panels []struct{ Type, Title string }
	}
	if err := json.Unmarshal(lbtest.ReadFile(t, "examples/grafana/openai-lb.json"), &dashboard); err != nil {
		t.Fatal(err)
	}
	for _, panel := range dashboard.Panels {
		if panel.Type == "row" && !strings.Contains(page, "\n| "+panel.Title+" | ") {
			t.Errorf("no line for the row %s of the dashboard", panel.Title)
		}
	}
	for _, alert := range regexp.MustCompile(`(?m)^ +- alert: (\w+)$`).FindAllSubmatch(lbtest.ReadFile(t, "examples/prometheus/alerts.yml"), -1) {
		if !strings.Contains(page, "`"+string(alert[1])+"`") {
			t.Errorf("no line for the alert %s", alert[1])
		}
	}
}

// TestTheLogLinesOfTheREADMEAreThoseOfItsConfiguration runs its first
// configuration with backends of our own, and sends a request as it describes.
func TestTheLogLinesOfTheREADMEAreThoseOfItsConfiguration(t *testing.T) {
	text := lbtest.ReadFile(t, "README.md")
	var config string
	var quoted []string
	for _, block := range fencedBlocks("README.md", string(text)) {
		switch {
		case block.language == "caddyfile" && config == "":
			config = block.text
		case block.language == "json":
			quoted = strings.Split(strings.TrimSpace(block.text), "\n")
		}
	}
	before := pool.Random
	t.Cleanup(func() { pool.Random = before })
	pool.Random = func() float64 { return 0.99 } // the backend with most of the weight
	ptu, serverPTU := lbtest.Listen(t, "ptu")
	ptu.Replies(lbtest.Status(429, "retry-after-ms", "1098"))
	_, serverEast := lbtest.Listen(t, "eastus")
	for _, name := range []string{"PTU_KEY", "EASTUS_KEY", "WESTUS_KEY"} {
		t.Setenv(name, "key-of-a-backend")
	}
	t.Setenv("ALICE_KEY", "client-key-of-alice")
	log, port := filepath.Join(t.TempDir(), "log"), lbtest.FreePort(t)
	output := "output file " + log + "\n"
	lbtest.Run(t, strings.NewReplacer(
		"{\n\t#", "{\nadmin off\nauto_https off\ndefault_bind 127.0.0.1\nlog {\n"+output+"}\n#",
		"format openai_lb", output+"format openai_lb",
		"llm.example.com {", fmt.Sprintf("http://127.0.0.1:%d {", port),
		"https://contoso-ptu.openai.azure.com {", serverPTU.URL+" {\nauth api_key",
		".openai.azure.com {", ".openai.azure.com {\nauth api_key",
		"https://contoso-eastus.openai.azure.com {", serverEast.URL+" {\nauth api_key",
	).Replace(config))
	lbtest.Post(lbtest.NewClient(t), fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port), `{"model":"gpt-5.5"}`, "Api-Key", "client-key-of-alice").WantServed(t, "eastus")

	var lines []map[string]any
	lbtest.WaitFor(t, func() bool {
		lines = nil
		text, _ := os.ReadFile(log)
		for line := range strings.Lines(string(text)) {
			var fields map[string]any
			if json.Unmarshal([]byte(line), &fields) == nil {
				lines = append(lines, fields)
			}
		}
		return strings.Contains(string(text), "handled request")
	})
	for _, line := range quoted {
		var want map[string]any
		if err := json.Unmarshal([]byte(line), &want); err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(lines, func(line map[string]any) bool { return includes(line, want) }) {
			t.Errorf("it has %s, and the log\n%v", line, lines)
		}
	}
}

// includes reports whether an object has all fields of another one.
func includes(object, fields map[string]any) bool {
	for name, want := range fields {
		its, isObject := object[name].(map[string]any)
		if wanted, ok := want.(map[string]any); ok && isObject && includes(its, wanted) {
			continue
		}
		if isObject || object[name] != want {
			return false
		}
	}
	return true
}

// clientCertificate makes one that is signed by the authority which Caddy keeps
// in a folder.
func clientCertificate(t *testing.T, folder string) tls.Certificate {
	t.Helper()
	read := func(name string) []byte {
		text := lbtest.ReadFile(t, filepath.Join(folder, name))
		block, _ := pem.Decode(text)
		return block.Bytes
	}
	issuer, err := x509.ParseCertificate(read("intermediate.crt"))
	if err != nil {
		t.Fatal(err)
	}
	var signer crypto.PrivateKey
	if signer, err = x509.ParseECPrivateKey(read("intermediate.key")); err != nil {
		if signer, err = x509.ParsePKCS8PrivateKey(read("intermediate.key")); err != nil {
			t.Fatal(err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, issuer, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der, issuer.Raw}, PrivateKey: key}
}
