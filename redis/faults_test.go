package redis

import (
	"fmt"
	"net"
	"slices"
	"strings"
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
	var with, without []time.Duration
	for name, f := range faults {
		t.Run(name, func(t *testing.T) {
			during, calm := testFault(t, f)
			with, without = append(with, during...), append(without, calm...)
		})
	}
	if *measure {
		t.Log("with all faults: " + compareP99(with, without))
	}
}

// names is how many backends may throttle. The last one does so after the
// fault.
const names = 22

// testFault returns how long requests took during the fault. If it measures,
// other replicas get as many requests at the same time, whose Redis is well.
func testFault(t *testing.T, f fault) (during, calm []time.Duration) {
	s := startServer(t)
	it := &faulty{t: t, server: s}
	option := s.option()
	if f.option != nil {
		option = f.option(it)
	}
	a := newAccount(t)
	replicas := startReplicas(t, 3, a.backends(names)+option)
	// a replica that has nothing to tell notices after two seconds and some
	// more: it compares once a second, and waits a second
	length, clients := 3*time.Second, replicas
	var others []*replica
	if *measure {
		others = startReplicas(t, 3, a.backends(names)+startServer(t).option())
		inTouch(t, others)
		length, clients, others = 20*time.Second, slices.Repeat(replicas, 3), slices.Repeat(others, 3)
	}
	var at atomic.Int64 // of the backends, this one throttles now
	model := func() string { return fmt.Sprintf("r%d", at.Load()) }
	load, calmLoad := startLoad(clients, pace/5, model), startLoad(others, pace/5, model)
	memory := replicas[0].memory()
	// A busy machine may have lost the connection by itself before the fault.
	earlier := make([]int, len(replicas))
	for i, r := range replicas {
		if r.metric("caddy_openai_lb_state_in_touch") == 1 {
			earlier[i] = len(r.logged("not connected to other replicas", ""))
		}
	}
	f.begin(it)
	for began := time.Now(); time.Since(began) < length; {
		a.throttle(fmt.Sprintf("r%d", at.Load()+1), true)
		at.Add(1)
		time.Sleep(length / 20)
	}
	calmLoad.stop()
	during, calm = load.taken(), calmLoad.taken()
	f.end(it)
	over := time.Now()
	// one replica learns of a throttle, when the fault is hardly over
	last := fmt.Sprintf("r%d", names-1)
	a.throttle(last, true)
	replicas[0].post(last)
	for _, r := range replicas {
		lbtest.WaitFor(t, func() bool { return len(r.logged("cooldown started", last)) > 0 })
	}
	agreed := time.Since(over)
	load.stop()
	if n := load.failed() + calmLoad.failed(); n > 0 {
		t.Errorf("%d requests failed", n)
	}
	inTouch(t, replicas)
	for i, r := range replicas {
		lost := r.logged("not connected to other replicas", "")[earlier[i]:]
		if f.unseen && len(lost) > 0 || !f.unseen && len(lost) != 1 {
			t.Errorf("replica %d logged %v", i, lost)
		}
		if n := r.metric("caddy_openai_lb_state_queue_length"); n > 1024 {
			t.Errorf("%v messages wait", n)
		}
	}
	t.Logf("the replicas agreed %v after the fault; memory grew by %d KiB", agreed, replicas[0].memory()-memory)
	if *measure {
		t.Log(compareP99(during, calm))
	}
	if lost := replicas[0].logged("not connected to other replicas", ""); len(lost) > 0 {
		t.Log(lost[0].Error)
	}
	return during, calm
}

// compareP99 says what 99 of 100 requests took at most.
func compareP99(with, without []time.Duration) string {
	a, b := p99(with), p99(without)
	return fmt.Sprintf("p99 of %d requests: %v; of %d without a fault: %v; ratio %.2f", len(with), a, len(without), b, float64(a)/float64(b))
}

func p99(latencies []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(latencies))
	return sorted[len(sorted)*99/100]
}
