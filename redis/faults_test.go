package redis

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// fault is something that goes wrong, until end.
type fault struct {
	// option is how the replicas reach Redis. It is called before they start.
	option     func(*faulty) string
	begin, end func(*faulty)
	// unseen tells that replicas stay in touch.
	unseen bool
}

// faulty is what a fault happens to.
type faulty struct {
	t       *testing.T
	server  *server
	replica *server // of the server, not of the balancer
	proxy   *proxy
}

var nothing = func(*faulty) {}

var faults = map[string]fault{
	"none": {begin: nothing, end: nothing, unseen: true},
	"kill -9": {
		begin: func(f *faulty) { f.server.kill() },
		end:   func(f *faulty) { f.server.start() },
	},
	"SIGSTOP": {
		begin: func(f *faulty) { f.server.signal(syscall.SIGSTOP) },
		end:   func(f *faulty) { f.server.signal(syscall.SIGCONT) },
	},
	"FLUSHALL": {
		begin: func(f *faulty) { f.server.do("flushall") }, end: nothing, unseen: true,
	},
	"maxmemory": {
		begin: func(f *faulty) {
			f.server.do("config", "set", "maxmemory-policy", "noeviction")
			f.server.do("config", "set", "maxmemory", "1")
		},
		end: func(f *faulty) { f.server.do("config", "set", "maxmemory", "0") },
	},
	"a read-only replica": {
		begin: func(f *faulty) { f.server.do("replicaof", "127.0.0.1", "1") },
		end:   func(f *faulty) { f.server.do("replicaof", "no", "one") },
	},
	"failover by Sentinel": {
		option: func(f *faulty) string {
			host, port, _ := net.SplitHostPort(f.server.address)
			f.replica = startServer(f.t, "--replicaof", host+" "+port)
			lbtest.WaitFor(f.t, func() bool {
				return strings.Contains(fmt.Sprint(f.replica.do("info", "replication")), "master_link_status:up")
			})
			sentinel := startSentinel(f.t, f.server)
			lbtest.WaitFor(f.t, func() bool {
				return strings.Contains(fmt.Sprint(sentinel.do("info", "sentinel")), "slaves=1")
			})
			return fmt.Sprintf("state redis {\naddress %s\nsentinel mymaster\n}\n", sentinel.address)
		},
		begin: func(f *faulty) { f.server.kill() },
		end: func(f *faulty) {
			lbtest.WaitFor(f.t, func() bool {
				return strings.Contains(fmt.Sprint(f.replica.do("info", "replication")), "role:master")
			})
		},
	},
	"a delay of 2 s":  byProxy(delays),
	"dropped bytes":   byProxy(drops),
	"half of a reply": byProxy(cuts),
	"nonsense":        byProxy(babbles),
	"a wrong password": {
		option: func(f *faulty) string {
			f.server.do("acl", "setuser", "lb", "on", ">another", "~*", "&*", "+@all")
			return fmt.Sprintf("state redis {\naddress %s\nusername lb\npassword s3cret\n}\n", f.server.address)
		},
		begin: nothing,
		end:   func(f *faulty) { f.server.do("acl", "setuser", "lb", ">s3cret") },
	},
	"a start without Redis": {
		option: func(f *faulty) string {
			f.server.kill()
			return f.server.option()
		},
		begin: nothing,
		end:   func(f *faulty) { f.server.start() },
	},
}

func byProxy(mode int32) fault {
	return fault{
		option: func(f *faulty) string {
			f.proxy = newProxy(f.t, f.server.address)
			return fmt.Sprintf("state redis {\naddress %s\n}\n", f.proxy.Addr())
		},
		begin: func(f *faulty) { f.proxy.mode.Store(mode) },
		end:   func(f *faulty) { f.proxy.mode.Store(passes) },
	}
}

// TestNoFaultOfRedisReachesARequest has three replicas under load while
// something is wrong with Redis, and then lets one learn of a throttle.
func TestNoFaultOfRedisReachesARequest(t *testing.T) {
	for name, f := range faults {
		t.Run(name, func(t *testing.T) { testFault(t, f) })
	}
}

func testFault(t *testing.T, f fault) {
	s := startServer(t)
	it := &faulty{t: t, server: s}
	option := s.option()
	if f.option != nil {
		option = f.option(it)
	}
	a := newAccount(t)
	replicas := startReplicas(t, 3, a.backends(40)+option)
	length := 2 * time.Second
	if *measure {
		length = 10 * time.Second
	}
	var at atomic.Int64 // of the backends, this one throttles now
	load := startLoad(replicas, pace/5, func() string { return fmt.Sprintf("r%d", at.Load()) })
	memory := replicas[0].memory()
	f.begin(it)
	for began := time.Now(); time.Since(began) < length; {
		a.throttle(fmt.Sprintf("r%d", at.Add(1)), true)
		time.Sleep(length / 20)
	}
	during := fmt.Sprintf("p99 %v", load.p99())
	f.end(it)
	over := time.Now()
	// one replica learns of a throttle, when the fault is hardly over
	a.throttle("r30", true)
	replicas[0].post("r30")
	for _, r := range replicas {
		lbtest.WaitFor(t, func() bool { return len(r.logged("backend benched", "r30")) > 0 })
	}
	agreed := time.Since(over)
	load.stop()
	if n := load.failed(); n > 0 {
		t.Errorf("%d requests failed", n)
	}
	inTouch(t, replicas)
	for i, r := range replicas {
		lost := r.logged("out of touch with other replicas", "")
		if f.unseen && len(lost) > 0 || !f.unseen && len(lost) != 1 {
			t.Errorf("replica %d logged %v", i, lost)
		}
		if n := r.metric("caddy_openai_lb_state_queue_length"); n > 1024 {
			t.Errorf("%v messages wait", n)
		}
	}
	t.Logf("during the fault: %s of %d requests; the replicas agreed %v after it; memory grew by %d KiB", during, len(load.latencies), agreed, replicas[0].memory()-memory)
	if lost := replicas[0].logged("out of touch with other replicas", ""); len(lost) > 0 {
		t.Log(lost[0].Error)
	}
}

// proxy passes bytes on to Redis, or does worse.
type proxy struct {
	net.Listener
	mode atomic.Int32
}

const (
	passes int32 = iota
	delays
	drops
	cuts
	babbles
)

func newProxy(t testing.TB, to string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l}
	var tasks sync.WaitGroup
	var mu sync.Mutex
	open := make(map[net.Conn]bool)
	track := func(c net.Conn) net.Conn {
		mu.Lock()
		defer mu.Unlock()
		open[c] = true
		return c
	}
	tasks.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				client.Close()
				continue
			}
			track(client)
			track(server)
			tasks.Go(func() { p.pass(server, client, false) })
			tasks.Go(func() { p.pass(client, server, true) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		tasks.Wait()
	})
	return p
}

// pass passes bytes on. reply tells that they come from Redis.
func (p *proxy) pass(to, from net.Conn, reply bool) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		b := buf[:n]
		switch mode := p.mode.Load(); {
		case mode == delays:
			time.Sleep(2 * time.Second)
		case mode == drops && reply:
			continue // in one direction only
		case mode == cuts && reply:
			to.Write(b[:n/2])
			return
		case mode == babbles && reply:
			io.WriteString(to, "HTTP/1.1 400 Bad Request\r\n\r\n*99999999\r\n$-5\r\n")
			continue
		}
		if _, err := to.Write(b); err != nil {
			return
		}
	}
}
