package redis

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	client "github.com/redis/go-redis/v9"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// server is a Redis, or what else has its protocol, on the loopback.
type server struct {
	t       testing.TB
	name    string // of the program
	args    []string
	address string
	process *exec.Cmd
}

// serverVariable names the server to test with, in place of those installed.
const serverVariable = "OPENAI_LB_TEST_SERVER"

// programs are the servers that are installed. Without any the test is skipped.
func programs(t testing.TB) (paths []string) {
	t.Helper()
	names := []string{"redis-server", "valkey-server"}
	if own := os.Getenv(serverVariable); own != "" {
		names = []string{own}
	}
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			paths = append(paths, path)
		}
	}
	if len(paths) == 0 {
		t.Skipf("not tested: %s is not installed (Debian: apt-get install redis-server)", strings.Join(names, " or "))
	}
	return paths
}

// startServer runs a server with these options until the end of the test.
func startServer(t testing.TB, args ...string) *server {
	t.Helper()
	return startProgram(t, programs(t)[0], args...)
}

func startProgram(t testing.TB, name string, args ...string) *server {
	t.Helper()
	port := fmt.Sprint(lbtest.FreePort(t))
	s := &server{t: t, name: name, address: "127.0.0.1:" + port}
	s.args = append([]string{"--bind", "127.0.0.1", "--port", port, "--dir", t.TempDir(), "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"}, args...)
	s.start()
	t.Cleanup(s.kill)
	return s
}

// start begins, and returns when the server answers.
func (s *server) start() {
	s.t.Helper()
	s.process = exec.Command(s.name, s.args...)
	if err := s.process.Start(); err != nil {
		s.t.Fatal(err)
	}
	deadline := time.Now().Add(2 * time.Minute)
	for {
		c, err := net.DialTimeout("tcp", s.address, time.Second)
		if err == nil {
			c.Close()
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("%s does not listen: %v", s.name, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// kill ends the server as a crash does.
func (s *server) kill() {
	if s.process != nil {
		s.process.Process.Kill()
		s.process.Wait()
		s.process = nil
	}
}

func (s *server) signal(signal syscall.Signal) {
	s.t.Helper()
	if err := s.process.Process.Signal(signal); err != nil {
		s.t.Fatal(err)
	}
}

// do sends a command.
func (s *server) do(args ...any) any {
	s.t.Helper()
	value, err := s.try(args...)
	if err != nil {
		s.t.Fatal(args, err)
	}
	return value
}

func (s *server) try(args ...any) (any, error) {
	c := client.NewClient(&client.Options{Addr: s.address, Protocol: 2, DisableIdentity: true})
	defer c.Close()
	return c.Do(context.Background(), args...).Result()
}

// connected is how many connections there are besides that of who asks.
func (s *server) connected() int {
	s.t.Helper()
	return strings.Count(fmt.Sprint(s.do("client", "list")), "\n") - 1
}

// engine is one for this server.
func (s *server) engine() *Engine { return &Engine{Address: []string{s.address}} }

// open returns a store of the engine, until the end of the test.
func open(t testing.TB, e *Engine) state.Store {
	t.Helper()
	if err := e.Provision(caddyContext(t)); err != nil {
		t.Fatal(err)
	}
	s, err := e.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// startNode runs a node of a cluster that knows no other.
func startNode(t *testing.T) *server {
	t.Helper()
	return startServer(t, "--cluster-enabled", "yes", "--cluster-config-file", filepath.Join(t.TempDir(), "nodes.conf"),
		"--cluster-port", fmt.Sprint(lbtest.FreePort(t)))
}

// meet has a node know those that another one knows.
func (s *server) meet(other *server) {
	s.t.Helper()
	host, port, _ := net.SplitHostPort(other.address)
	s.do("cluster", "meet", host, port, other.args[len(other.args)-1])
}

// clusterIsUp reports whether all slots have a master, as far as the node
// knows.
func (s *server) clusterIsUp() bool {
	s.t.Helper()
	return strings.Contains(fmt.Sprint(s.do("cluster", "info")), "cluster_state:ok")
}

// startCluster runs a cluster of three.
func startCluster(t *testing.T) []*server {
	t.Helper()
	var nodes []*server
	slots := [][2]int{{0, 5460}, {5461, 10922}, {10923, 16383}}
	for i := range slots {
		nodes = append(nodes, startNode(t))
		nodes[i].do("cluster", "addslotsrange", slots[i][0], slots[i][1])
		if i > 0 {
			nodes[i].meet(nodes[0])
		}
	}
	for _, n := range nodes {
		lbtest.WaitFor(t, func() bool {
			return n.clusterIsUp() && strings.Count(fmt.Sprint(n.do("cluster", "nodes")), " connected") == 3
		})
	}
	return nodes
}

// startSentinel runs a sentinel that watches a master called mymaster.
func startSentinel(t testing.TB, master *server, options ...string) *server {
	t.Helper()
	host, port, _ := net.SplitHostPort(master.address)
	own := fmt.Sprint(lbtest.FreePort(t))
	config := filepath.Join(t.TempDir(), "sentinel.conf")
	lbtest.WriteFile(t, config, fmt.Sprintf(`bind 127.0.0.1
port %s
sentinel monitor mymaster %s %s 1
sentinel down-after-milliseconds mymaster 1000
sentinel failover-timeout mymaster 5000
%s`, own, host, port, strings.Join(options, "\n")))
	s := &server{t: t, name: programs(t)[0], args: []string{config, "--sentinel"}, address: "127.0.0.1:" + own}
	s.start()
	t.Cleanup(s.kill)
	return s
}
