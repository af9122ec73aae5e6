package e2e

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestSlowClientsKeepNobodyFromBeingServed has slowhttptest open connections
// that send a header, send a body, or read a reply as slowly as they can, in
// one Caddy. Its own probe, and a client of ours, must be served meanwhile.
func TestSlowClientsKeepNobodyFromBeingServed(t *testing.T) {
	t.Parallel()
	program, err := exec.LookPath("slowhttptest")
	if err != nil {
		t.Skip(err)
	}
	answer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"chatcmpl-1","choices":[{"message":{"content":"`+strings.Repeat("word ", 1<<16)+`"}}]}`)
	}))
	t.Cleanup(answer.Close)
	addresses, err := freeAddresses(1)
	if err != nil {
		t.Fatal(err)
	}
	listenAt(t, addresses[0], "http://"+addresses[0]+" {\nopenai_lb {\nbackend "+answer.URL+"\n}\n}")
	url := "http://" + addresses[0] + "/v1/chat/completions"
	common := []string{"-c", "200", "-r", "100", "-i", "1", "-l", "6", "-p", "5", "-u", url}
	for name, mode := range map[string][]string{
		"a header":                 {"-H"},
		"a body":                   {"-B", "-s", "8192", "-f", "application/json"},
		"what reads a reply":       {"-X", "-w", "1", "-y", "2", "-n", "1", "-z", "8", "-k", "3"},
		"a body of a wrong length": {"-B", "-s", "200000000", "-f", "application/json"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			ended := make(chan struct{})
			var output []byte
			var err error
			go func() {
				defer close(ended)
				output, err = exec.CommandContext(ctx, program, append(mode, common...)...).CombinedOutput()
			}()
			client := &http.Client{Timeout: 20 * time.Second}
			served := 0
			for going := true; going; served++ {
				select {
				case <-ended:
					going = false
				case <-time.After(100 * time.Millisecond):
				}
				res, err := client.Post(url, "application/json", strings.NewReader(`{"model":"m"}`))
				if err != nil {
					t.Fatal(err)
				}
				text, err := io.ReadAll(res.Body)
				res.Body.Close()
				if err != nil || res.StatusCode != http.StatusOK || len(text) < 5<<16 {
					t.Fatalf("got %s, %d bytes, %v", res.Status, len(text), err)
				}
			}
			if err != nil || !strings.Contains(string(output), "YES") || strings.Contains(string(output), "NO\x1b") || served < 10 {
				t.Errorf("%v, %d were served\n%s", err, served, output)
			}
		})
	}
}
