package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

var installBrowser = sync.OnceValue(func() error {
	return install("browser", "package-lock.json", "node_modules", "npm ci --no-audit --no-fund")
})

// startQuickstart runs examples/quickstart on free ports, and returns the
// balancer's URL.
func startQuickstart(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../examples/quickstart/Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	addresses, err := freeAddresses(5)
	if err != nil {
		t.Fatal(err)
	}
	config := string(text)
	for i, port := range []string{"2019", "8080", "9001", "9002", "9003"} {
		_, free, _ := net.SplitHostPort(addresses[i])
		config = strings.ReplaceAll(config, ":"+port, ":"+free)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := launch(t, file, "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	if err != nil {
		t.Fatal(err)
	}
	url := strings.Replace(addresses[1], "127.0.0.1", "http://localhost", 1)
	if err := p.await(func() error {
		res, err := http.Get(url + "/status")
		if err == nil {
			res.Body.Close()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return url
}

// keepAsking does what the README's loop does, until the test ends.
func keepAsking(t *testing.T, url string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		for ; ctx.Err() == nil; time.Sleep(200 * time.Millisecond) {
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions",
				strings.NewReader(`{"model":"gpt-4o","messages":[{"role":"user","content":"Hello"}]}`))
			if err != nil {
				t.Error(err)
				return
			}
			r.Header.Set("Content-Type", "application/json")
			res, err := http.DefaultClient.Do(r)
			if err != nil {
				continue // the test is over
			}
			if _, err := io.Copy(io.Discard, res.Body); err == nil && res.StatusCode != http.StatusOK {
				t.Errorf("a request got %s", res.Status)
			}
			res.Body.Close()
		}
	}()
	t.Cleanup(func() {
		stop()
		<-over
	})
}

// watched is what a browser saw of the page.
type watched struct {
	Name string
	Seen []struct{ Badge, Left string }
	// Live is what the page says of itself.
	Live string
	// Errors are those of scripts, Elsewhere what was asked for besides the page,
	// and Problems what axe-core found.
	Errors, Elsewhere, Problems []string
	// Sideways is how far one can scroll to the side.
	Sideways int
}

// left is what the page says of a bench that is in force.
var left = regexp.MustCompile(`^(\d+) s left$|^due now$`)

// TestTheStatusPageShowsABenchAndItsEnd watches the quickstart in a browser. With
// E2E_SCREENSHOTS=<folder> it leaves what it saw there.
func TestTheStatusPageShowsABenchAndItsEnd(t *testing.T) {
	node, chromium := lookPath(t, "node"), lookPath(t, "chromium")
	if err := installBrowser(); err != nil {
		t.Fatal(err)
	}
	folder := os.Getenv("E2E_SCREENSHOTS")
	if folder == "" {
		folder = t.TempDir()
	}
	url := startQuickstart(t)
	keepAsking(t, url)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, node, "browser/status.mjs", chromium, url+"/status", "ptu", folder)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	var got struct {
		Watched []watched
		Plain   []string
	}
	if err := json.Unmarshal(stdout.Bytes(), &got); err != nil {
		t.Fatalf("%v: %s", err, &stdout)
	}
	if len(got.Watched) != 4 || strings.Join(got.Plain, ", ") != "ptuweight 1, paygo-eastweight 3, paygo-westweight 1" {
		t.Errorf("got %s", &stdout)
	}
	for _, w := range got.Watched {
		w.check(t)
	}
}

func (w watched) check(t *testing.T) {
	t.Helper()
	if w.Live != "Live" || len(w.Errors)+len(w.Elsewhere)+len(w.Problems) > 0 || w.Sideways > 0 {
		t.Errorf("%s: %+v", w.Name, w)
	}
	benched, back := false, false
	for _, s := range w.Seen {
		switch s.Badge {
		case "Benched":
			seconds := left.FindStringSubmatch(s.Left)
			if seconds == nil {
				t.Errorf("%s: a bench without a countdown: %q", w.Name, s.Left)
				continue
			}
			n, _ := strconv.Atoi(seconds[1])
			benched = benched || n >= 1
		case "Available":
			back = back || benched
		}
	}
	if !benched || !back {
		t.Errorf("%s: expected a bench with a countdown and its end, saw %+v", w.Name, w.Seen)
	}
}
