package e2e

import (
	"context"
	"crypto/tls"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// TestHTTP2FailsTheSameCasesAsInAPlainReverseProxy has h2spec test both in one
// Caddy. Some of its cases depend on timing, so a difference counts only if it
// is found each time.
func TestHTTP2FailsTheSameCasesAsInAPlainReverseProxy(t *testing.T) {
	t.Parallel()
	h2spec := buildH2spec(t)
	answer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"chatcmpl-1","choices":[]}`)
	}))
	defer answer.Close()
	balanced, plain := startSites(t, "openai_lb {\nbackend "+answer.URL+"\n}", "reverse_proxy "+answer.URL)
	var failed [2][]string
	for range 4 {
		var errs [2]error
		var both sync.WaitGroup
		for i, port := range []string{balanced, plain} {
			report := filepath.Join(t.TempDir(), "report.xml")
			both.Go(func() { failed[i], errs[i] = failedCases(t.Context(), h2spec, port, report) })
		}
		both.Wait()
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatal(err)
		}
		if slices.Equal(failed[0], failed[1]) {
			return
		}
	}
	t.Errorf("openai_lb fails\n%s\nand reverse_proxy\n%s", strings.Join(failed[0], "\n"), strings.Join(failed[1], "\n"))
}

// buildH2spec builds the version that tools.mod names.
func buildH2spec(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "h2spec")
	build := exec.CommandContext(t.Context(), "go", "build", "-modfile=tools.mod", "-o", path, "github.com/summerwind/h2spec/cmd/h2spec")
	build.Dir = ".."
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building h2spec: %v\n%s", err, output)
	}
	return path
}

// startSites runs Caddy with a site for each of two handlers, over TLS, and
// returns their ports.
func startSites(t *testing.T, first, second string) (ofFirst, ofSecond string) {
	t.Helper()
	var err error
	for range 3 { // a port that was free may be taken by the time Caddy starts
		if ofFirst, ofSecond, err = tryStartSites(t, first, second); err == nil {
			return ofFirst, ofSecond
		}
	}
	t.Fatal(err)
	return "", ""
}

func tryStartSites(t *testing.T, first, second string) (ofFirst, ofSecond string, err error) {
	dir := t.TempDir()
	addresses, err := freeAddresses(2)
	if err != nil {
		return "", "", err
	}
	config := "{\nadmin off\nskip_install_trust\nlocal_certs\nauto_https disable_redirects\ndefault_bind 127.0.0.1\n}\n"
	ports := make([]string, 2)
	for i, handler := range []string{first, second} {
		_, ports[i], _ = net.SplitHostPort(addresses[i])
		config += fmt.Sprintf("https://localhost:%s {\n%s\n}\n", ports[i], handler)
	}
	file := filepath.Join(dir, "Caddyfile")
	writeFile(t, file, config)
	p, err := launch(t, file, "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	if err != nil {
		return "", "", err
	}
	for _, address := range addresses {
		if err := p.await(func() error { // until there is a certificate
			conn, err := tls.Dial("tcp", address, &tls.Config{ServerName: "localhost", InsecureSkipVerify: true})
			if err == nil {
				conn.Close()
			}
			return err
		}); err != nil {
			return "", "", err
		}
	}
	return ports[0], ports[1], nil
}

// failedCases returns the cases that fail at a port.
func failedCases(ctx context.Context, h2spec, port, file string) (failed []string, err error) {
	run := exec.CommandContext(ctx, h2spec, "--tls", "--insecure", "--host", "localhost", "--port", port,
		"--path", "/v1/chat/completions", "--junit-report", file)
	output, err := run.CombinedOutput()
	if err != nil && !errors.As(err, new(*exec.ExitError)) { // it fails if a case does
		return nil, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, output)
	}
	var report struct {
		Suites []struct {
			Cases []struct {
				Package string    `xml:"package,attr"`
				Name    string    `xml:"classname,attr"`
				Failure *struct{} `xml:"failure"`
				Error   *struct{} `xml:"error"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(text, &report); err != nil {
		return nil, err
	}
	cases := 0
	for _, suite := range report.Suites {
		for _, c := range suite.Cases {
			if cases++; c.Failure != nil || c.Error != nil {
				failed = append(failed, c.Package+" "+c.Name)
			}
		}
	}
	if cases < 100 || len(failed) > cases/4 {
		return nil, fmt.Errorf("h2spec has run %d cases, and %d failed:\n%s", cases, len(failed), output)
	}
	slices.Sort(failed)
	return failed, nil
}
