package openailb

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
)

// sites are many balancers in one Caddy, each at a host of its own, so that the
// rows of a table can run side by side.
type sites struct {
	scheme string // what clients reach them by
	logs   string // the file that Caddy logs to

	address string
	trusts  *tls.Config // a client's, for https sites
	blocks  []string

	mu      sync.Mutex
	read    int64 // how much of the logs
	entries []logEntry
}

// newSites prepares them. When the test is over, Caddy stops, and everything
// that the test or its backends started since must be gone.
func newSites(t *testing.T, scheme string) *sites {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() { waitFor(t, func() bool { return runtime.NumGoroutine() <= before }) })
	return &sites{scheme: scheme, logs: filepath.Join(t.TempDir(), "log.json")}
}

// add makes a site of these directives, and returns its URL.
func (s *sites) add(directives string) (url string) {
	host := fmt.Sprintf("row-%d.example.com", len(s.blocks))
	s.blocks = append(s.blocks, fmt.Sprintf("@%[1]s host %[1]s\nhandle @%[1]s {\n%[2]s\n}", host, directives))
	return s.scheme + "://" + host + "/v1/chat/completions"
}

// serve starts Caddy with all of them.
func (s *sites) serve(t *testing.T) {
	t.Helper()
	run(t, s.caddyfile(t))
}

// caddyfile is the config of all of them, with these global options.
func (s *sites) caddyfile(t *testing.T, options ...string) string {
	t.Helper()
	// not before all backends listen, so that none of them takes the port
	port := freePort(t)
	s.address = fmt.Sprintf("127.0.0.1:%d", port)
	certificate := ""
	if s.scheme == "https" {
		line, client := serverCertificate(t)
		certificate, s.trusts = line, &tls.Config{RootCAs: client.Transport.(*http.Transport).TLSClientConfig.RootCAs}
	}
	return fmt.Sprintf(`{
		admin off
		auto_https off
		debug
		log {
			output file %s {
				roll_disabled
			}
		}
		%s
	}
	%s://*.example.com:%d {
		bind 127.0.0.1
		log
		header X-Config 1
		%s
		%s
	}`, s.logs, strings.Join(options, "\n"), s.scheme, port, certificate, strings.Join(s.blocks, "\n"))
}

// newClient is a client of the sites, by HTTP/1.1 or HTTP/2, with connections
// of its own.
func (s *sites) newClient(t *testing.T, major int) *http.Client {
	t.Helper()
	client := newClient(t)
	transport := client.Transport.(*http.Transport)
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", s.address)
	}
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetHTTP1(major == 1)
	transport.Protocols.SetHTTP2(major == 2)
	transport.TLSClientConfig = s.trusts.Clone()
	return client
}

// beginStream opens a stream, and reads its first content.
func beginStream(t *testing.T, client *http.Client, url string) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	res, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	first := make([]byte, len(streamContent))
	if _, err := io.ReadFull(res.Body, first); err != nil || string(first) != streamContent {
		t.Fatalf("a stream begins with %q, %v", first, err)
	}
	return res
}

type logEntry struct {
	Level, Msg, Backend, Class, Model, Error string
	Seconds                                  float64
	Request                                  struct{ Host string }
}

// looked are the messages that tests look at.
var looked = regexp.MustCompile(`"msg":"(attempt|backend benched|handled request|server shutdown)"`)

// logged returns what Caddy has logged of them until now.
func (s *sites) logged(t *testing.T) []logEntry {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	file, err := os.Open(s.logs)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	text, err := io.ReadAll(io.NewSectionReader(file, s.read, math.MaxInt64-s.read))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // the rest of it comes
		}
		s.read += int64(len(line))
		var entry logEntry
		if looked.Match(line) && json.Unmarshal(line, &entry) == nil {
			s.entries = append(s.entries, entry)
		}
	}
	return slices.Clone(s.entries)
}

// handled counts the requests to a site that Caddy is done with.
func (s *sites) handled(t *testing.T, url string) (n int) {
	t.Helper()
	for _, entry := range s.logged(t) {
		if entry.Msg == "handled request" && strings.HasPrefix(url, s.scheme+"://"+entry.Request.Host+"/") {
			n++
		}
	}
	return n
}

// loggedOf returns a backend's last attempt and its bench, if it was benched.
func (s *sites) loggedOf(t *testing.T, backend string) (attempt logEntry, benched *logEntry) {
	t.Helper()
	for _, entry := range s.logged(t) {
		if entry.Backend != backend {
			continue
		}
		switch entry.Msg {
		case "attempt":
			attempt = entry
		case "backend benched":
			benched = &entry
		}
	}
	return attempt, benched
}

// subtest is a row of a table.
type subtest struct {
	name string
	test func(*testing.T)
	// waits tells that the row waits for time to pass, and does little else
	waits bool
}

// sideBySide runs those rows that wait all at once, and beside them some of the
// others at a time.
func sideBySide(t *testing.T, rows []subtest) {
	t.Helper()
	var running sync.WaitGroup
	for _, row := range rows {
		if row.waits {
			running.Go(func() { t.Run(row.name, row.test) })
		}
	}
	places := make(chan struct{}, 8)
	for _, row := range rows {
		if row.waits {
			continue
		}
		places <- struct{}{}
		running.Go(func() {
			defer func() { <-places }()
			t.Run(row.name, row.test)
		})
	}
	running.Wait()
}
