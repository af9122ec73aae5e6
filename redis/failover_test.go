package redis

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	client "github.com/redis/go-redis/v9"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// masters are servers of which each master has a successor.
type masters interface {
	// option is how replicas of the balancer reach them.
	option() string
	// kill ends a master, another one each round.
	kill(round int)
	// succeeded reports whether another server is the master in place of the
	// one that was killed last, and all servers know it.
	succeeded() bool
	// rejoin starts the one that was killed last, so that it can succeed its
	// successor.
	rejoin()
}

func TestNoRequestFailsAndReplicasAreSoonInTouchWhenAMasterDies(t *testing.T) {
	t.Run("in a cluster", func(t *testing.T) { testFailover(t, newShards(t)) })
	t.Run("with Sentinel", func(t *testing.T) { testFailover(t, newWatched(t)) })
}

// testFailover kills three masters while three replicas of the balancer get
// requests, and lets one of these learn of a throttle each time.
func testFailover(t *testing.T, m masters) {
	a := newAccount(t)
	replicas := startReplicas(t, 3, a.backends(4)+m.option())
	inTouch(t, replicas)
	load := startLoad(replicas, pace, func() string { return "r3" })
	for round := range 3 {
		killed := time.Now()
		m.kill(round)
		lbtest.WaitFor(t, m.succeeded)
		succeeded := time.Now()
		var took []time.Duration
		for _, r := range replicas {
			lbtest.WaitFor(t, func() bool {
				lost, back := r.last("not connected to other replicas"), r.last("connected to other replicas")
				return lost.After(killed) && back.After(lost)
			})
			took = append(took, max(0, r.last("connected to other replicas").Sub(succeeded)))
		}
		t.Logf("the master was succeeded after %v; the replicas were in touch %v after that", succeeded.Sub(killed), took)
		if *measure && slices.Max(took) > 2*time.Second {
			t.Error("that is more than two seconds")
		}
		name := fmt.Sprintf("r%d", round)
		a.throttle(name, true)
		replicas[round].post(name)
		for _, r := range replicas {
			lbtest.WaitFor(t, func() bool { return len(r.logged("cooldown started", name)) == 1 })
		}
		m.rejoin()
	}
	load.stop()
	t.Logf("%d of %d requests failed", load.failed(), len(load.taken()))
	if load.failed() > 0 {
		t.Error("none should")
	}
}

// last is when a replica last logged a message.
func (r *replica) last(message string) (at time.Time) {
	for _, e := range r.logged(message, "") {
		at = e.at
	}
	return at
}

// shards are a cluster of three masters, with a successor each.
type shards struct {
	t      *testing.T
	nodes  []*server
	killed *server
}

func newShards(t *testing.T) *shards {
	s := &shards{t: t, nodes: startCluster(t)}
	for i := range 3 {
		node := startNode(t)
		node.meet(s.nodes[0])
		master := s.nodes[i].do("cluster", "myid")
		lbtest.WaitFor(t, func() bool { _, err := node.try("cluster", "replicate", master); return err == nil })
		s.nodes = append(s.nodes, node)
	}
	for _, node := range s.nodes {
		node.do("config", "set", "cluster-node-timeout", 2000)
	}
	lbtest.WaitFor(t, s.whole)
	return s
}

// whole reports whether all nodes are there, and can take the place of each
// other.
func (s *shards) whole() bool {
	return !slices.ContainsFunc(s.nodes, func(node *server) bool {
		known := fmt.Sprint(node.do("cluster", "nodes"))
		return strings.Contains(known, "fail") || strings.Count(known, " connected") != len(s.nodes) || strings.Count(known, "slave") != 3 || !node.follows()
	})
}

// follows reports whether the server is a master, or has what its master has.
func (s *server) follows() bool {
	info := fmt.Sprint(s.do("info", "replication"))
	return strings.Contains(info, "role:master") || strings.Contains(info, "master_link_status:up")
}

func (s *shards) option() string {
	return fmt.Sprintf("state redis {\naddress %s %s\ncluster\n}\n", s.nodes[0].address, s.nodes[1].address)
}

// kill kills the master of the messages, of the replicas, and of the messages
// again.
func (s *shards) kill(round int) {
	s.killed = s.master([]string{"openai_lb:messages", "openai_lb:group:replicas"}[round%2])
	s.killed.kill()
}

// master is the node that has a key.
func (s *shards) master(key string) *server {
	c := client.NewClusterClient(&client.ClusterOptions{Addrs: []string{s.nodes[0].address}})
	defer c.Close()
	master, err := c.MasterForKey(context.Background(), key)
	if err != nil {
		s.t.Fatal(err)
	}
	return s.nodes[slices.IndexFunc(s.nodes, func(n *server) bool { return n.address == master.Options().Addr })]
}

func (s *shards) succeeded() bool {
	return !slices.ContainsFunc(s.nodes, func(node *server) bool {
		if node == s.killed {
			return false
		}
		_, known, _ := strings.Cut(fmt.Sprint(node.do("cluster", "nodes")), " "+s.killed.address+"@")
		known, _, _ = strings.Cut(known, "\n")
		return !strings.Contains(known, "fail ") || !node.clusterIsUp()
	})
}

func (s *shards) rejoin() {
	s.killed.start()
	lbtest.WaitFor(s.t, s.whole)
}

// watched are a master and its successor, which a sentinel watches.
type watched struct {
	t                           *testing.T
	sentinel, master, successor *server
}

func newWatched(t *testing.T) *watched {
	w := &watched{t: t, master: startServer(t), successor: startServer(t)}
	w.follow()
	w.sentinel = startSentinel(t, w.master, "sentinel failover-timeout mymaster 1000")
	lbtest.WaitFor(t, w.whole)
	return w
}

// follow makes one server the replica of the other.
func (w *watched) follow() {
	host, port, _ := net.SplitHostPort(w.master.address)
	w.successor.do("replicaof", host, port)
	lbtest.WaitFor(w.t, w.successor.follows)
}

// whole reports whether the sentinel knows who can take the place of the
// master.
func (w *watched) whole() bool {
	known := fmt.Sprint(w.sentinel.do("sentinel", "replicas", "mymaster"))
	return strings.Contains(known, w.successor.address) && strings.Contains(known, " flags slave ")
}

func (w *watched) option() string {
	return fmt.Sprintf("state redis {\naddress %s\nsentinel mymaster\n}\n", w.sentinel.address)
}

func (w *watched) kill(int) { w.master.kill() }

func (w *watched) succeeded() bool {
	_, port, _ := net.SplitHostPort(w.successor.address)
	return strings.Contains(fmt.Sprint(w.sentinel.do("sentinel", "get-master-addr-by-name", "mymaster")), port)
}

func (w *watched) rejoin() {
	w.master, w.successor = w.successor, w.master
	w.successor.start()
	w.follow()
	lbtest.WaitFor(w.t, w.whole)
}
