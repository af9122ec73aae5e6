package lbtest

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

// Sites are many balancers in one Caddy, each at a host of its own, so that the
// rows of a table can run side by side.
type Sites struct {
	scheme string // what clients reach them by
	logs   string // the file that Caddy logs to

	Address string
	trusts  *tls.Config // a client's, for https sites
	blocks  []string

	mu      sync.Mutex
	read    int64 // how much of the logs
	entries []LogEntry
}

// NewSites prepares them. When the test is over, Caddy stops, and everything
// that the test or its backends started since must be gone.
func NewSites(t *testing.T, scheme string) *Sites {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() { WaitFor(t, func() bool { return runtime.NumGoroutine() <= before }) })
	return &Sites{scheme: scheme, logs: filepath.Join(t.TempDir(), "log.json")}
}

// Add makes a site of these directives, and returns its URL.
func (s *Sites) Add(directives string) (url string) {
	host := fmt.Sprintf("row-%d.example.com", len(s.blocks))
	s.blocks = append(s.blocks, fmt.Sprintf("@%[1]s host %[1]s\nhandle @%[1]s {\n%[2]s\n}", host, directives))
	return s.scheme + "://" + host + "/v1/chat/completions"
}

// Serve starts Caddy with all of them.
func (s *Sites) Serve(t *testing.T) {
	t.Helper()
	Run(t, s.Caddyfile(t))
}

// Caddyfile is the config of all of them, with these global options.
func (s *Sites) Caddyfile(t *testing.T, options ...string) string {
	t.Helper()
	// not before all backends listen, so that none of them takes the port
	port := FreePort(t)
	s.Address = fmt.Sprintf("127.0.0.1:%d", port)
	certificate := ""
	if s.scheme == "https" {
		line, client := ServerCertificate(t)
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

// NewClient is a client of the sites, by HTTP/1.1 or HTTP/2, with connections
// of its own.
func (s *Sites) NewClient(t *testing.T, major int) *http.Client {
	t.Helper()
	client := NewClient(t)
	transport := client.Transport.(*http.Transport)
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", s.Address)
	}
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetHTTP1(major == 1)
	transport.Protocols.SetHTTP2(major == 2)
	transport.TLSClientConfig = s.trusts.Clone()
	return client
}

// BeginStream opens a stream, and reads its first content.
func BeginStream(t *testing.T, client *http.Client, url string) *http.Response {
	t.Helper()
	res := Do(t, client, NewRequest(t, http.MethodPost, url, strings.NewReader(`{"stream":true}`)))
	first := make([]byte, len(StreamContent))
	if _, err := io.ReadFull(res.Body, first); err != nil || string(first) != StreamContent {
		t.Fatalf("a stream begins with %q, %v", first, err)
	}
	return res
}

// LogEntry has the parts of a log line that tests look at.
type LogEntry struct {
	Level, Msg, Backend, Class, Deployment, Error string
	Seconds                                       float64
	Request                                       struct{ Host string }
}

// looked are the messages that tests look at.
var looked = regexp.MustCompile(`"msg":"(attempt|cooldown started|handled request|server shutdown)"`)

// Logged returns Caddy's log lines about the sites until now.
func (s *Sites) Logged(t *testing.T) []LogEntry {
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
		var entry LogEntry
		if looked.Match(line) && json.Unmarshal(line, &entry) == nil {
			s.entries = append(s.entries, entry)
		}
	}
	return slices.Clone(s.entries)
}

// Log returns all that Caddy has logged until now.
func (s *Sites) Log(t *testing.T) string {
	t.Helper()
	return string(ReadFile(t, s.logs))
}

// Handled counts the requests to a site that Caddy is done with.
func (s *Sites) Handled(t *testing.T, url string) (n int) {
	t.Helper()
	for _, entry := range s.Logged(t) {
		if entry.Msg == "handled request" && strings.HasPrefix(url, s.scheme+"://"+entry.Request.Host+"/") {
			n++
		}
	}
	return n
}

// LoggedOf returns the last attempt at a backend, and the start of its last
// cooldown, or nil.
func (s *Sites) LoggedOf(t *testing.T, backend string) (attempt LogEntry, cooldown *LogEntry) {
	t.Helper()
	for _, entry := range s.Logged(t) {
		if entry.Backend != backend {
			continue
		}
		switch entry.Msg {
		case "attempt":
			attempt = entry
		case "cooldown started":
			cooldown = &entry
		}
	}
	return attempt, cooldown
}

// Row is a row of a table.
type Row struct {
	Name string
	Test func(*testing.T)
	// Waits reports whether the row waits for time to pass, and does little
	// else
	Waits bool
}

// SideBySide runs those rows that wait all at once, and beside them some of the
// others at a time.
func SideBySide(t *testing.T, rows []Row) {
	t.Helper()
	var running sync.WaitGroup
	for _, row := range rows {
		if row.Waits {
			running.Go(func() { t.Run(row.Name, row.Test) })
		}
	}
	places := make(chan struct{}, 8)
	for _, row := range rows {
		if row.Waits {
			continue
		}
		places <- struct{}{}
		running.Go(func() {
			defer func() { <-places }()
			t.Run(row.Name, row.Test)
		})
	}
	running.Wait()
}
