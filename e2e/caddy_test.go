package e2e

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds every wait for something that takes much less.
const patience = 2 * time.Minute

// backend is a simulated deployment and what the balancer knows of it.
type backend struct {
	// simulator has the options of openai_simulator.
	simulator string
	// options are those of the balancer's backend. Default: azureBackend.
	options string
	// base is the path at which its API begins. Default: none.
	base string
	// down means that nothing listens there.
	down bool
	// sees is what it answers to the requests it gets: statuses, 0 for a
	// connection it broke.
	sees []int
	// paths are those of the requests it gets. Default: not checked.
	paths []string
	// models are the names by which they ask for a model. Default: not checked.
	models []string
}

// root is the path below which the simulator is.
func (b backend) root() string {
	return strings.TrimSuffix(b.base, "/v1")
}

const (
	azureBackend  = "auth api_key\n api_key right"
	openAIBackend = "api_key right"
)

// names are those of the backends, in their order and that of their priority.
var names = []string{"first", "second", "third", "fourth", "fifth", "sixth"}

// site is a running balancer with its backends behind it.
type site struct {
	url        string
	root       string // the file of the CA that clients have to trust
	client     *http.Client
	simulators []string // the URLs of the backends
}

// start runs Caddy until the test ends.
func start(t *testing.T, backends []backend, options ...string) *site {
	t.Helper()
	var err error
	for range 3 { // a port that was free may be taken by the time Caddy starts
		var s *site
		if s, err = tryStart(t, backends, options); err == nil {
			return s
		}
	}
	t.Fatal(err)
	return nil
}

func tryStart(t *testing.T, backends []backend, options []string) (*site, error) {
	dir := t.TempDir()
	addresses, err := freeAddresses(len(backends) + 1)
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(addresses[0])
	s := &site{url: "https://localhost:" + port, root: filepath.Join(dir, "caddy/pki/authorities/local/root.crt")}
	for i, b := range backends {
		url := "http://" + addresses[i+1]
		if b.down {
			url = fmt.Sprintf("http://127.0.0.1:%d", i+1)
		}
		s.simulators = append(s.simulators, url+b.root())
	}
	if err := os.WriteFile(filepath.Join(dir, "Caddyfile"), []byte(s.caddyfile(backends, options)), 0o600); err != nil {
		return nil, err
	}

	p, err := launch(t, filepath.Join(dir, "Caddyfile"), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	if err != nil {
		return nil, err
	}
	return s, p.await(s.connect)
}

// process runs until the test ends.
type process struct {
	command *exec.Cmd
	exited  chan struct{}
	log     bytes.Buffer // to be read after that
}

// launch runs Caddy with a Caddyfile and these variables.
func launch(t *testing.T, config string, env ...string) (*process, error) {
	t.Helper()
	cmd := exec.Command(caddy, "run", "--adapter", "caddyfile", "--config", config)
	cmd.Env = append(os.Environ(), env...)
	return begin(t, cmd, config)
}

// begin runs a program with a file that says what it is to do.
func begin(t *testing.T, cmd *exec.Cmd, config string) (*process, error) {
	t.Helper()
	p := &process{command: cmd, exited: make(chan struct{})}
	cmd.Dir = t.TempDir()
	if cmd.Stdout == nil {
		cmd.Stdout, cmd.Stderr = &p.log, &p.log
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = cmd.Wait()
		close(p.exited)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-p.exited
		if t.Failed() {
			text, _ := os.ReadFile(config)
			t.Logf("%s\n%s", text, &p.log)
		}
	})
	return p, nil
}

// stop tells it to stop, as Kubernetes and Docker do.
func (p *process) stop(t *testing.T) {
	t.Helper()
	if err := p.command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
}

// await waits until it can be connected to.
func (p *process) await(connect func() error) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		err := connect()
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return fmt.Errorf("%s exited:\n%s", p.command.Path, &p.log)
		default:
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s is not ready: %w", p.command.Path, err)
		}
	}
}

// given are the ports that freeAddresses has returned.
var (
	givenMu sync.Mutex
	given   = make(map[int]bool)
)

// freeAddresses returns n loopback addresses on which nobody listens, and that
// it never returns again. Their ports are none of those that systems choose for
// who asks for any (32768 and above), which somebody may have before Caddy
// does.
func freeAddresses(n int) (addresses []string, err error) {
	givenMu.Lock()
	defer givenMu.Unlock()
	for range 1000 {
		if len(addresses) == n {
			return addresses, nil
		}
		port := 10_000 + rand.IntN(20_000)
		if given[port] {
			continue
		}
		var listener net.Listener
		if listener, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			addresses = append(addresses, listener.Addr().String())
			listener.Close()
			given[port] = true
		}
	}
	return nil, err
}

func (s *site) caddyfile(backends []backend, callers []string) string {
	var lb, simulators strings.Builder
	for _, line := range callers {
		fmt.Fprintln(&lb, line)
	}
	for i, b := range backends {
		options := b.options
		if options == "" {
			options = azureBackend
		}
		address := strings.TrimSuffix(s.simulators[i], b.root())
		fmt.Fprintf(&lb, "backend %s {\n name %s\n priority %d\n %s\n}\n", address+b.base, names[i], i+1, options)
		if !b.down {
			fmt.Fprintf(&simulators, "%s {\n handle_path %s/* {\n openai_simulator {\n name %s\n api_key right\n output_tokens 5\n %s\n }\n }\n}\n",
				address, b.root(), names[i], b.simulator)
		}
	}
	return fmt.Sprintf(`{
	admin off
	auto_https disable_redirects
	default_bind 127.0.0.1
	persist_config off
	skip_install_trust
	servers {
		protocols h1 h2
	}
}
%s {
	tls internal
	openai_lb {
%s
	}
}
%s`, s.url, &lb, &simulators)
}

// connect succeeds once the balancer has its certificate, which Caddy sees to
// when everything listens.
func (s *site) connect() error {
	root, err := os.ReadFile(s.root)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(root) {
		return errors.New("the CA's root is no certificate")
	}
	config := &tls.Config{RootCAs: roots}
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: patience}, "tcp", strings.TrimPrefix(s.url, "https://"), config)
	if err != nil {
		return err
	}
	s.client = &http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}}
	return conn.Close()
}

// status is what a simulator tells of itself.
type status struct {
	InFlight int       `json:"in_flight"`
	Early    int       `json:"early"` // requests before the time that a 429 named
	Last     []request `json:"last"`
}

type request struct {
	Time       time.Time `json:"time"`
	Status     int       `json:"status"`
	Path       string    `json:"path"`
	Deployment string    `json:"deployment"`
}

// status returns that of a backend whose requests are all over.
func (s *site) status(t *testing.T, i int) status {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		res, err := s.client.Get(s.simulators[i] + "/_simulator/status")
		if err != nil {
			t.Fatal(err)
		}
		var got status
		err = json.NewDecoder(res.Body).Decode(&got)
		res.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		if got.InFlight == 0 {
			// they are in the order of their ends
			slices.SortStableFunc(got.Last, func(a, b request) int { return a.Time.Compare(b.Time) })
			return got
		}
		if time.Now().After(deadline) {
			t.Fatalf("the %s backend still has %d requests in flight", names[i], got.InFlight)
		}
	}
}
