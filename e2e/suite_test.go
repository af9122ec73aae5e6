package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// installSuite fetches the source package of the Python SDK, in which its tests
// are, and the mock server.
var installSuite = sync.OnceValue(func() error {
	return install("suite", "requirements.txt", ".venv", "npm ci --no-audit --no-fund && "+
		"python3 -m venv --clear .venv && .venv/bin/pip install --disable-pip-version-check --no-deps -r requirements.txt && "+
		".venv/bin/pip download --disable-pip-version-check --no-deps --no-binary openai -d .venv/source \"$(grep ^openai== requirements.txt)\" && "+
		"tar xzf .venv/source/openai-*.tar.gz -C .venv/source --strip-components=1")
})

// TestTheTestsOfOpenAIsSDKPass runs the tests of the Python SDK's methods
// through the balancer. Each calls one method, with the least and with the most
// that it takes, at a server that checks the request by OpenAI's specification,
// and answers by it. So nothing of a request or a reply may get lost on the
// way, of any operation.
//
// With failover, two backends come first that refuse everything. The first page
// of a list stays at its account, so it fails then.
func TestTheTestsOfOpenAIsSDKPass(t *testing.T) {
	lookPath(t, "node")
	lookPath(t, "python3")
	if err := installSuite(); err != nil {
		t.Fatal(err)
	}
	mock := startMock(t)
	throttles := func(text string) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Retry-After-Ms", "1")
			w.WriteHeader(http.StatusTooManyRequests)
			fmt.Fprintf(w, `{"error":{"message":%q,"code":"rate_limit_exceeded"}}`, text)
		}))
		t.Cleanup(server.Close)
		return server.URL
	}
	backend := func(url, options string) string {
		return "backend " + url + "/v1 {\n auth none\n " + options + "\n}\n"
	}
	serves := backend(mock, "priority 2")
	refuse := backend(throttles("Slow down."), "account other") +
		backend(throttles("Request too large for model on tokens per min (TPM): Limit 1, Requested 9"), "account third")
	t.Run("one backend", func(t *testing.T) {
		t.Parallel()
		for _, failed := range runSuite(t, serves) {
			t.Error(failed)
		}
	})
	t.Run("failover", func(t *testing.T) {
		t.Parallel()
		for _, failed := range runSuite(t, refuse+serves) {
			if !strings.Contains(failed, "_list") {
				t.Error(failed)
			}
		}
	})
}

// startMock runs the mock server, and returns its URL.
func startMock(t *testing.T) string {
	t.Helper()
	packed, err := os.Open("suite/openapi.yml.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	unpacked, err := gzip.NewReader(packed)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(unpacked)
	if err != nil {
		t.Fatal(err)
	}
	specification := filepath.Join(t.TempDir(), "openapi.yml")
	if err := os.WriteFile(specification, text, 0o600); err != nil {
		t.Fatal(err)
	}
	programs, err := filepath.Glob("suite/node_modules/@stdy/cli-*/bin/steady") // its script would not end with it
	if err != nil || len(programs) != 1 {
		t.Fatalf("found the mock server at %v: %v", programs, err)
	}
	program, err := filepath.Abs(programs[0])
	if err != nil {
		t.Fatal(err)
	}
	addresses, err := freeAddresses(1)
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(addresses[0])
	args := []string{"--host", "127.0.0.1", "-p", port, "-q"}
	for _, kind := range []string{"query-array", "form-array", "query-object", "form-object"} {
		args = append(args, "--validator-"+kind+"-format=brackets")
	}
	options := filepath.Join(t.TempDir(), "options") // a test that fails shows them, and not the specification
	if err := os.WriteFile(options, []byte(strings.Join(args, " ")), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := begin(t, exec.Command(program, append(args, specification)...), options)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.await(func() error {
		conn, err := net.Dial("tcp", addresses[0])
		if err == nil {
			err = conn.Close()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return "http://" + addresses[0]
}

// runSuite runs the tests through a balancer with these backends, and returns
// the names of those that fail.
func runSuite(t *testing.T, backends string) (failed []string) {
	t.Helper()
	addresses, err := freeAddresses(1)
	if err != nil {
		t.Fatal(err)
	}
	listenAt(t, addresses[0], "http://"+addresses[0]+" {\n openai_lb {\n"+backends+"}\n}\n")
	python, err := filepath.Abs("suite/.venv/bin/python")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	// the synchronous client, and the asynchronous one with the other library
	// for HTTP
	cmd := exec.CommandContext(ctx, python, "-m", "pytest", "tests/api_resources", "-k", "(strict and not Async) or aiohttp",
		"-n", "2", "-q", "--tb=line", "-p", "no:cacheprovider")
	cmd.Dir = "suite/.venv/source"
	cmd.Env = append(os.Environ(), "TEST_API_BASE_URL=http://"+addresses[0]+"/v1")
	cmd.WaitDelay = time.Second
	output, _ := cmd.CombinedOutput() // its status is that of the tests
	if !regexp.MustCompile(`\b[12]\d{3} passed`).Match(output) {
		t.Fatalf("fewer than a thousand tests have passed:\n%s", output[max(0, len(output)-4000):])
	}
	for line := range bytes.Lines(output) {
		if name, found := bytes.CutPrefix(line, []byte("FAILED ")); found {
			failed = append(failed, string(bytes.TrimSpace(name)))
		}
	}
	return failed
}
