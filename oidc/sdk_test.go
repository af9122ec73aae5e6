package oidc

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// TestTheSDKForPythonSendsTokensOfItsProvider installs the version that the
// tests in e2e/ have.
func TestTheSDKForPythonSendsTokensOfItsProvider(t *testing.T) {
	python := install(t)
	f := newFakeIssuer(t, firstKey())
	backend := httptest.NewServer(lbtest.Simulate(t, simulator.Handler{Name: "one", APIKey: []string{"right"}}))
	t.Cleanup(backend.Close)
	address := lbtest.ServeAt(t, fmt.Sprintf("openai_lb {\npool sdk\nbackend %s {\nauth api_key\napi_key right\n}\n%s\ncaller slow {\nrequests 1/minute\n}\n}", backend.URL, oidcOf(f, "")))

	tokens := []string{
		f.token(t, firstKey(), nil),
		f.token(t, firstKey(), with{"azp": "slow"}), // streams
		f.token(t, firstKey(), with{"exp": time.Now().Add(-time.Hour).Unix()}),
		f.token(t, firstKey(), with{"aud": "https://cognitiveservices.azure.com"}),
		f.token(t, firstKey(), with{"azp": "slow"}),
	}
	order, _ := json.Marshal(map[string]any{"url": "http://" + address, "tokens": tokens})
	cmd := exec.CommandContext(t.Context(), python, "testdata/azure_sdk.py")
	cmd.Env = append(os.Environ(), "NO_PROXY=127.0.0.1")
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(order), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	var got []struct {
		Text, Error, Code string
		Status            int
	}
	if err := json.Unmarshal(stdout.Bytes(), &got); err != nil || len(got) != len(tokens) {
		t.Fatalf("%v: %s", err, &stdout)
	}
	for i, want := range []string{"", "", "AuthenticationError 401 invalid_api_key", "AuthenticationError 401 invalid_api_key", "RateLimitError 429 rate_limit_exceeded"} {
		text := ""
		if got[i].Error != "" {
			text = fmt.Sprint(got[i].Error, " ", got[i].Status, " ", got[i].Code)
		}
		if text != want || (got[i].Text != "") != (want == "") {
			t.Errorf("request %d: got %+v, want %s", i+1, got[i], want)
		}
	}
}

// install returns a Python that has the SDK.
func install(t *testing.T) (python string) {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip("skipped without python3: ", err)
	}
	folder := filepath.Join(t.TempDir(), "venv")
	python = filepath.Join(folder, "bin/python")
	for _, command := range [][]string{
		{"python3", "-m", "venv", folder},
		{python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps", "-r", "../e2e/python/requirements.txt"},
	} {
		if output, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", command, err, output)
		}
	}
	return python
}
