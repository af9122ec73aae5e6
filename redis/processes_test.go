package redis

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/standard"

	_ "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
)

// replicaVariable names the config of the Caddy that a process of this program
// is to be.
const replicaVariable = "OPENAI_LB_TEST_REPLICA"

// patientVariable is set for replicas whose lookups wait for longer than they
// take on a machine that is busy.
const patientVariable = "OPENAI_LB_TEST_PATIENT"

// runReplica runs Caddy until who started it lets go of its standard input.
func runReplica(config string) {
	text, err := os.ReadFile(config)
	if err != nil {
		log.Fatal(err)
	}
	caddy.ConfigAutosavePath = filepath.Join(filepath.Dir(config), "autosave.json")
	if os.Getenv(patientVariable) != "" {
		replicas.LeastPatience = time.Second
	}
	adapted, err := lbtest.Adapt(string(text))
	if err != nil {
		log.Fatal(err)
	}
	if err := caddy.Load([]byte(adapted), true); err != nil {
		log.Fatal(err)
	}
	io.Copy(io.Discard, os.Stdin)
	if err := caddy.Stop(); err != nil {
		log.Fatal(err)
	}
}

// replica is a Caddy in a process of its own.
type replica struct {
	t       testing.TB
	address string
	admin   string
	process *exec.Cmd
	stdin   io.WriteCloser
	client  *http.Client

	mu   sync.Mutex
	logs []logEntry
}

type logEntry struct {
	at time.Time
	// what it says
	Message, Backend, Class, Error string
}

// startReplicas runs n replicas with these options until the end of the test.
func startReplicas(t testing.TB, n int, options string) (replicas []*replica) {
	t.Helper()
	for range n {
		replicas = append(replicas, startReplica(t, options))
	}
	return replicas
}

func startReplica(t testing.TB, options string) *replica {
	t.Helper()
	ready := "go_goroutines"
	if strings.Contains(options, "state ") {
		ready = "caddy_openai_lb_state_queue_length"
	}
	return startCaddy(t, "handle {\nopenai_lb {\n"+options+"\n}\n}", ready)
}

// startCaddy runs a Caddy with these directives until the end of the test. It
// has started when it has the metric.
func startCaddy(t testing.TB, directives, ready string) *replica {
	t.Helper()
	return startCaddyWith(t, t.TempDir(), directives, ready)
}

// startCaddyWith is startCaddy with a storage that others may share.
func startCaddyWith(t testing.TB, storage, directives, ready string) *replica {
	t.Helper()
	port := lbtest.FreePort(t)
	dir := t.TempDir()
	config := filepath.Join(dir, "Caddyfile")
	admin := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	lbtest.WriteFile(t, config, fmt.Sprintf(`{
	admin %s
	auto_https off
	default_bind 127.0.0.1
	metrics
	storage file_system %s
}
http://:%d {
	handle /metrics {
		metrics
	}
	%s
}`, admin, storage, port, directives))
	r := &replica{t: t, admin: admin, address: fmt.Sprintf("http://127.0.0.1:%d", port), process: exec.Command(os.Args[0])}
	r.client = &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 100}}
	r.process.Env = append(os.Environ(), replicaVariable+"="+config, "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir,
		"GORACE=atexit_sleep_ms=0") // or else it takes a second to end
	stderr, err := r.process.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if r.stdin, err = r.process.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := r.process.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		r.readLogs(stderr)
	}()
	t.Cleanup(func() {
		r.client.CloseIdleConnections()
		r.stdin.Close()
		<-read
		r.process.Wait()
	})
	deadline := time.Now().Add(2 * time.Minute)
	for r.metric(ready) < 0 {
		if time.Now().After(deadline) {
			t.Fatal("a replica does not start")
		}
		time.Sleep(20 * time.Millisecond)
	}
	return r
}

func (r *replica) readLogs(stderr io.Reader) {
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		var e struct {
			TS                         float64
			Msg, Backend, Class, Error string
		}
		if json.Unmarshal(lines.Bytes(), &e) == nil {
			r.mu.Lock()
			r.logs = append(r.logs, logEntry{time.UnixMicro(int64(e.TS * 1e6)), e.Msg, e.Backend, e.Class, e.Error})
			r.mu.Unlock()
		}
		for _, bad := range []string{"s3cret", "WARNING: DATA RACE", "panic: "} {
			if strings.Contains(lines.Text(), bad) {
				r.t.Errorf("a replica wrote: %s", lines.Text())
			}
		}
	}
}

// logged returns the entries with a message, of a backend if that is not empty.
func (r *replica) logged(message, backend string) (entries []logEntry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.logs {
		if e.Message == message && (backend == "" || e.Backend == backend) {
			entries = append(entries, e)
		}
	}
	return entries
}

// post asks for a model, and returns the status.
func (r *replica) post(model string) int {
	res, err := r.client.Post(r.address+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"model":%q}`, model)))
	if err != nil {
		r.t.Error(err)
		return 0
	}
	defer res.Body.Close()
	io.Copy(io.Discard, res.Body)
	return res.StatusCode
}

// metric returns the value of a metric, or -1 if there is none.
func (r *replica) metric(name string) float64 {
	res, err := r.client.Get(r.address + "/metrics")
	if err != nil {
		return -1
	}
	defer res.Body.Close()
	text, _ := io.ReadAll(res.Body)
	if match := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\S+)$`).FindSubmatch(text); match != nil {
		value, err := strconv.ParseFloat(string(match[1]), 64)
		if err == nil {
			return value
		}
	}
	return -1
}

// metricLike returns the value of the first metric of a line with all of these
// texts, or -1.
func (r *replica) metricLike(texts ...string) float64 {
	res, err := r.client.Get(r.address + "/metrics")
	if err != nil {
		return -1
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		line := lines.Text()
		if slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
			continue
		}
		if value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64); err == nil {
			return value
		}
	}
	return -1
}

// inTouch waits until the replicas are in touch with each other.
func inTouch(t *testing.T, replicas []*replica) {
	t.Helper()
	for _, r := range replicas {
		lbtest.WaitFor(t, func() bool {
			return r.metric("caddy_openai_lb_state_in_touch") == 1 && r.metric("caddy_openai_lb_state_replicas") >= float64(len(replicas))
		})
	}
}

// memory is how much the process has in memory, in KiB.
func (r *replica) memory() int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.process.Process.Pid))
	if err != nil {
		return 0
	}
	match := regexp.MustCompile(`VmRSS:\s+(\d+)`).FindSubmatch(text)
	if match == nil {
		return 0
	}
	n, _ := strconv.Atoi(string(match[1]))
	return n
}
