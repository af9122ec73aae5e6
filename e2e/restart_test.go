package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const systemdExample = "../examples/systemd"

// systemd does what the units of the example say, in place of the one that
// boots a machine. The program systemctl, which the example calls, is a link to
// this test.
type systemd struct {
	*testing.T
	dir  string
	unit map[string]string // the options of caddy@.service
	// caddyfile is used in place of /etc/caddy/Caddyfile.
	caddyfile string

	mu      sync.Mutex
	units   map[string]*process
	stopped []*process
	enabled []string
}

// systemctlSocket names the variable with the socket of a systemd.
const systemctlSocket = "E2E_SYSTEMCTL"

// reply is what systemctl prints, and the status with which it ends.
type reply struct {
	Text   string
	Status int
}

// systemctl is that program: it asks the test that started it.
func systemctl(args []string) int {
	conn, err := net.Dial("unix", os.Getenv(systemctlSocket))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer conn.Close()
	var r reply
	if err = json.NewEncoder(conn).Encode(args); err == nil {
		err = json.NewDecoder(conn).Decode(&r)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Print(r.Text)
	return r.Status
}

func newSystemd(t *testing.T, caddyfile string) *systemd {
	t.Helper()
	s := &systemd{T: t, dir: t.TempDir(), unit: make(map[string]string), caddyfile: caddyfile, units: make(map[string]*process)}
	for line := range strings.Lines(string(readFile(t, systemdExample+"/caddy@.service"))) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(name, "#") {
			s.unit[name] = value
		}
	}
	program, err := os.Executable()
	if err == nil {
		err = os.Symlink(program, filepath.Join(s.dir, "systemctl"))
	}
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", filepath.Join(s.dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			var args []string
			if json.NewDecoder(conn).Decode(&args) == nil {
				_ = json.NewEncoder(conn).Encode(s.order(args))
			}
			conn.Close()
		}
	}()
	return s
}

// order does what systemctl is asked for.
func (s *systemd) order(args []string) reply {
	s.mu.Lock()
	defer s.mu.Unlock()
	unit := args[len(args)-1]
	switch args[0] {
	case "list-units":
		var text strings.Builder
		for name := range s.units {
			fmt.Fprintf(&text, "%s loaded active running Caddy\n", name)
		}
		return reply{Text: text.String()}
	case "start":
		p, err := s.start(unit)
		if err != nil {
			return reply{Text: err.Error() + "\n", Status: 1}
		}
		s.units[unit] = p
	case "stop":
		p := s.units[unit]
		if p == nil || !slices.Contains(args, "--no-block") {
			return reply{Text: "not as expected: " + strings.Join(args, " "), Status: 1}
		}
		p.stop(s.T)
		s.stopped = append(s.stopped, p)
		delete(s.units, unit)
	case "enable":
		s.enabled = append(s.enabled, unit)
	case "disable":
		s.enabled = slices.DeleteFunc(s.enabled, func(name string) bool { return name == unit })
	default:
		return reply{Text: "not known: " + args[0], Status: 1}
	}
	return reply{}
}

// start starts a unit of Type=notify: it waits until the process says that it
// is ready.
func (s *systemd) start(unit string) (*process, error) {
	if s.unit["Type"] != "notify" {
		return nil, fmt.Errorf("the unit has Type=%s", s.unit["Type"])
	}
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(s.dir, fmt.Sprintf("notify-%d", time.Now().UnixNano())), Net: "unixgram"})
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	instance := strings.TrimSuffix(strings.TrimPrefix(unit, "caddy@"), ".service")
	if err := os.MkdirAll(filepath.Join(s.dir, strings.ReplaceAll(s.unit["RuntimeDirectory"], "%i", instance)), 0o700); err != nil {
		return nil, err
	}
	command := strings.Fields(strings.NewReplacer("/usr/bin/caddy", caddy, "/etc/caddy/Caddyfile", s.caddyfile).Replace(s.unit["ExecStart"]))
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "HOME="+s.dir, "XDG_DATA_HOME="+s.dir, "XDG_CONFIG_HOME="+s.dir, "NOTIFY_SOCKET="+socket.LocalAddr().String(),
		strings.NewReplacer("%i", instance, "/run/", s.dir+"/").Replace(s.unit["Environment"]), "ALICE_KEY=client-key-of-alice", "EAST_KEY=right", "WEST_KEY=right")
	p, err := begin(s.T, cmd, s.caddyfile)
	if err != nil {
		return nil, err
	}
	return p, p.await(func() error {
		message := make([]byte, 1024)
		if err := socket.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		n, err := socket.Read(message)
		if err == nil && !bytes.Contains(message[:n], []byte("READY=1")) {
			err = fmt.Errorf("it says %q", message[:n])
		}
		return err
	})
}

// restart runs the program of the example.
func (s *systemd) restart() {
	s.Helper()
	cmd := exec.Command(systemdExample + "/restart")
	cmd.Env = append(os.Environ(), systemctlSocket+"="+filepath.Join(s.dir, "socket"), "PATH="+s.dir+":"+os.Getenv("PATH"))
	if output, err := cmd.CombinedOutput(); err != nil {
		s.Fatalf("%v:\n%s", err, output)
	}
}

// running are the units that run and those that start when the machine does.
func (s *systemd) running() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var units []string
	for name := range s.units {
		units = append(units, name)
	}
	return fmt.Sprint(units, s.enabled)
}

// load sends requests at a steady rate until it is stopped.
type load struct {
	url     string
	clients []*http.Client
	stop    context.CancelFunc
	sent    sync.WaitGroup

	requests, streams atomic.Int64
	mu                sync.Mutex
	lost              []string
}

// rate is how many requests a second a load has. One in ten is a stream, and
// another one has a new connection.
const rate = 200

func startLoad(t *testing.T, url string) *load {
	t.Helper()
	l := &load{url: url}
	for _, transport := range []*http.Transport{
		{ForceAttemptHTTP2: true},
		{MaxIdleConnsPerHost: rate},
		{DisableKeepAlives: true},
	} {
		transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
		l.clients = append(l.clients, &http.Client{Transport: transport, Timeout: patience})
		t.Cleanup(transport.CloseIdleConnections)
	}
	var ctx context.Context
	ctx, l.stop = context.WithCancel(t.Context())
	t.Cleanup(l.stop)
	began := time.Now()
	l.sent.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Until(began.Add(time.Duration(n) * time.Second / rate))): // and not less often on a slow machine
				l.sent.Go(func() { l.send(n) })
			}
		}
	})
	return l
}

func (l *load) send(n int) {
	client, body, end := l.clients[n%2], aChat+"}", "}"
	switch n % 10 {
	case 4, 5:
		body, end = aChat+`,"stream":true}`, "data: [DONE]\n\n"
		if n%20 > 10 {
			break
		}
		fallthrough
	case 9:
		client = l.clients[2]
	}
	began := time.Now()
	err := l.ask(client, body, end)
	if l.requests.Add(1); end != "}" {
		l.streams.Add(1)
	}
	if err != nil {
		l.mu.Lock()
		l.lost = append(l.lost, fmt.Sprintf("request %d, after %s: %v", n, time.Since(began), err))
		l.mu.Unlock()
	}
}

func (l *load) ask(client *http.Client, body, end string) error {
	req, err := http.NewRequest(http.MethodPost, l.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer client-key-of-alice")
	req.Header.Set("Content-Type", "application/json")
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	got, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK || !bytes.HasSuffix(bytes.TrimRight(got, "\n"), bytes.TrimRight([]byte(end), "\n")) {
		return fmt.Errorf("%s, %d bytes that end in %q, %w", res.Status, len(got), got[max(0, len(got)-40):], err)
	}
	return nil
}

// TestARestartLosesNoRequestAndNoStream restarts Caddy as examples/systemd
// does, with a shutdown_delay that is longer than a stream, as it is there.
func TestARestartLosesNoRequestAndNoStream(t *testing.T) {
	const delay = 5 * time.Second
	simulated := start(t, []backend{{simulator: "token_latency 600ms"}})
	var addresses []string
	var err error
	if addresses, err = freeAddresses(1); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	writeCertificate(t, dir)
	config := filepath.Join(dir, "Caddyfile")
	writeFile(t, config, strings.NewReplacer(
		"{\n\t# The old process", "{\n\tdefault_bind 127.0.0.1\n\tauto_https off\n\t# The old process",
		"shutdown_delay 2m", "shutdown_delay "+delay.String(),
		"llm.example.com {", "https://"+portOf(addresses[0])+" {\n\ttls "+dir+"/tls.crt "+dir+"/tls.key",
		"https://contoso-east.openai.azure.com {", simulated.simulators[0]+" {\n\t\t\tauth api_key",
	).Replace(string(readFile(t, systemdExample+"/Caddyfile"))))

	s := newSystemd(t, config)
	s.restart()
	if got := s.running(); got != "[caddy@a.service] [caddy@a.service]" {
		t.Fatalf("at first, %s run", got)
	}
	l := startLoad(t, "https://"+addresses[0])
	time.Sleep(2 * time.Second)
	s.restart()
	if got := s.running(); got != "[caddy@b.service] [caddy@b.service]" {
		t.Errorf("after the restart, %s run", got)
	}
	select {
	case <-s.stopped[0].exited:
	case <-time.After(patience):
		t.Error("the old process does not end")
	}
	time.Sleep(2 * time.Second)
	l.stop()
	l.sent.Wait()
	t.Logf("%d requests, %d of them streams", l.requests.Load(), l.streams.Load())
	if state := s.stopped[0].command.ProcessState; state == nil || state.ExitCode() != 0 {
		t.Errorf("the old process ended with %v", state)
	}
	if len(l.lost) > 0 {
		t.Errorf("%d of %d were lost:\n%s", len(l.lost), l.requests.Load(), strings.Join(l.lost[:min(10, len(l.lost))], "\n"))
	}
}

func TestSystemdKillsNoProcessThatStillFinishesItsAnswers(t *testing.T) {
	unit, config := string(readFile(t, systemdExample+"/caddy@.service")), string(readFile(t, systemdExample+"/Caddyfile"))
	length := func(text, pattern string) time.Duration {
		t.Helper()
		match := regexp.MustCompile(`(?m)^\s*` + pattern + `(\d+m)(in)?$`).FindStringSubmatch(text)
		if match == nil {
			t.Fatalf("no %s", pattern)
		}
		d, err := time.ParseDuration(match[1])
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	kill, finish := length(unit, "TimeoutStopSec="), length(config, "shutdown_delay ")+length(config, "grace_period ")
	if kill <= finish {
		t.Errorf("it kills Caddy after %s, which may take %s", kill, finish)
	}
}
