package redis

import (
	"flag"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

var regionsLong = flag.Duration("regions", 0, "how long TestALimitHoldsInTwoRegions measures in each state; 0: it is skipped")

// away is how long an answer of a server in the other region takes.
const away = 80 * time.Millisecond

// world is two regions with a replica in each, and with a server in each or in
// the first one only. Between the regions there is toxiproxy, which delays what
// is sent, and can cut the link.
type world struct {
	t         *testing.T
	toxiproxy toxiproxy
	servers   []*server
	// far has the names of the proxies, each before a server for the other
	// region.
	far      []string
	options  string
	state    [2]string
	storages [2]string
	replicas []*replica
	// asked is how many requests alice has sent.
	asked int
}

var regionNames = []string{"east", "west"}

func startRegions(t *testing.T, servers int, options string) *world {
	t.Helper()
	w := &world{t: t, toxiproxy: startToxiproxy(t), options: options}
	var near, far []string
	for i := range servers {
		s := startServer(t, "--appendonly", "yes")
		w.servers, w.far = append(w.servers, s), append(w.far, regionNames[i])
		near, far = append(near, s.address), append(far, w.toxiproxy.before(regionNames[i], s.address))
	}
	w.toxics("latency", map[string]int{"latency": int(away.Milliseconds() / 2)})
	engine := func(address string) string { return fmt.Sprintf("redis {\naddress %s\n}\n", address) }
	if servers == 1 {
		w.state = [2]string{"state " + engine(near[0]), "state " + engine(far[0])}
	} else {
		w.state = [2]string{"state regions {\n" + engine(near[0]) + engine(far[1]) + "}\n", "state regions {\n" + engine(far[0]) + engine(near[1]) + "}\n"}
	}
	for i := range w.state {
		w.storages[i] = t.TempDir()
		w.replicas = append(w.replicas, w.start(i))
	}
	inTouch(t, w.replicas)
	return w
}

// start starts the replica of a region, with what an earlier one has stored.
func (w *world) start(region int) *replica {
	w.t.Helper()
	return startCaddyWith(w.t, w.storages[region], "handle {\nopenai_lb {\n"+w.options+w.state[region]+"}\n}", "caddy_openai_lb_state_queue_length")
}

// toxics are done to both directions of the link.
func (w *world) toxics(name string, attributes map[string]int) {
	for _, proxy := range w.far {
		for _, stream := range []string{"upstream", "downstream"} {
			w.toxiproxy.call(http.MethodPost, "/proxies/"+proxy+"/toxics",
				map[string]any{"name": name + stream, "type": name, "stream": stream, "attributes": attributes})
		}
	}
}

// cut lets nothing pass any more, and closes no connection.
func (w *world) cut() { w.toxics("timeout", map[string]int{"timeout": 0}) }

func (w *world) heal() {
	for _, proxy := range w.far {
		for _, stream := range []string{"upstream", "downstream"} {
			w.toxiproxy.call(http.MethodDelete, "/proxies/"+proxy+"/toxics/timeout"+stream, nil)
		}
	}
}

// lose ends the replica of a region and its server, as a power cut does.
func (w *world) lose(region int) {
	_ = w.replicas[region].process.Process.Kill()
	if region < len(w.servers) {
		w.servers[region].kill()
	}
}

// restore starts them again.
func (w *world) restore(region int) {
	w.t.Helper()
	if region < len(w.servers) {
		w.servers[region].start()
	}
	w.replicas[region] = w.start(region)
	inTouch(w.t, w.replicas)
}

// make makes objects in a region, until the servers there have their owners.
func (w *world) make(region, n int) (ids []string) {
	w.t.Helper()
	r := w.replicas[region]
	before := max(0, r.metric(sent))
	for range n {
		ids = append(ids, r.respond("alice", ""))
	}
	w.asked += n
	lbtest.WaitFor(w.t, func() bool { return r.metric(sent) >= before+float64(n) })
	return ids
}

// wantObjects checks that a region knows all of them, in strict mode.
func (w *world) wantObjects(what string, region int, ids []string) {
	w.t.Helper()
	w.asked += len(ids)
	missing := make(map[int]int)
	for _, id := range ids {
		if status, _, _ := w.replicas[region].call("alice", http.MethodGet, "/v1/responses/"+id, ""); status != http.StatusOK {
			missing[status]++
		}
	}
	if len(missing) > 0 {
		w.t.Errorf("%s: %s does not know objects, of %d by status: %v", what, regionNames[region], len(ids), missing)
	}
}

// TestEachRegionKnowsTheObjectsOfTheOther in strict mode, with one server and
// with two.
func TestEachRegionKnowsTheObjectsOfTheOther(t *testing.T) {
	for _, servers := range []int{1, 2} {
		t.Run(fmt.Sprint(servers), func(t *testing.T) {
			w := startRegions(t, servers, startAccounts(t).options()+"affinity {\ncallers strict\n}\n")
			w.wantObjects("of the east", 1, w.make(0, 20))
			w.wantObjects("of the west", 0, w.make(1, 20))
		})
	}
}

// TestARegionIsLostAndComesBack with all its traffic at the other one
// meanwhile: no object, drain or row of the bill is lost, whichever region it
// is.
func TestARegionIsLostAndComesBack(t *testing.T) {
	for lost := range 2 {
		t.Run(regionNames[lost], func(t *testing.T) {
			w := startRegions(t, 2, startAccounts(t).options()+"affinity {\ncallers strict\n}\n")
			other := 1 - lost
			ids := append(w.make(lost, 10), w.make(other, 10)...)
			if text, err := w.replicas[lost].order("drain b --wait"); err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			wantBill := func() {
				t.Helper()
				w.replicas[other].wantCommand("usage --by caller --format csv", fmt.Sprintf("\nalice,%d,", w.asked))
			}
			wantBill()
			w.lose(lost)
			w.wantObjects("after it was lost", other, ids)
			ids = append(ids, w.make(other, 10)...)
			w.replicas[other].wantCommand("status", "b 1 1 drained")
			if _, err := w.replicas[other].order("drain c"); err == nil || !strings.Contains(err.Error(), "not at every replica") {
				t.Errorf("a drain misses nobody: %v", err)
			}
			w.restore(lost)
			w.wantObjects("after it came back", lost, ids)
			for _, r := range w.replicas {
				r.wantCommand("status", "b 1 1 drained", "c 1 1 drained")
			}
			wantBill()
		})
	}
}

// TestACutLinkLosesNothing that happens on either side of it.
func TestACutLinkLosesNothing(t *testing.T) {
	w := startRegions(t, 2, startAccounts(t).options()+"affinity {\ncallers strict\n}\n")
	before := append(w.make(0, 5), w.make(1, 5)...)
	time.Sleep(time.Second) // the servers of both regions have them
	w.cut()
	for _, r := range w.replicas {
		lbtest.WaitFor(t, func() bool { return r.metric("caddy_openai_lb_state_in_touch") == 0 })
	}
	w.wantObjects("while the link is cut", 0, before)
	w.wantObjects("while the link is cut", 1, before)
	during := [][]string{w.make(0, 10), w.make(1, 10)}
	for i := range during {
		w.wantObjects("its own while the link is cut", i, during[i])
	}
	if status, text, _ := w.replicas[1].call("alice", http.MethodGet, "/v1/responses/"+during[0][0], ""); status != http.StatusServiceUnavailable {
		t.Errorf("an object that cannot be known yet gets %d: %s", status, text)
	}
	if _, err := w.replicas[0].order("drain b --wait"); err == nil || !strings.Contains(err.Error(), "not at every replica") {
		t.Errorf("a drain misses nobody: %v", err)
	}
	w.heal()
	inTouch(t, w.replicas)
	w.wantObjects("after the link is back", 1, during[0])
	w.wantObjects("after the link is back", 0, during[1])
	w.replicas[1].wantCommand("status", "b 1 1 drained")
}

// TestALimitHoldsInTwoRegions measures 120 requests a minute, asked for four
// times a second in each region: with one server and with two, before a cut, in
// its minute, after it, and when the regions are connected again.
//
//	go test -run InTwoRegions -regions 3m -timeout 60m -v .
func TestALimitHoldsInTwoRegions(t *testing.T) {
	if *regionsLong == 0 {
		t.Skip("it takes minutes: go test -run InTwoRegions -regions 3m -timeout 60m -v .")
	}
	const limit = 120
	for _, servers := range []int{1, 2} {
		t.Run(fmt.Sprint(servers), func(t *testing.T) {
			t.Parallel()
			w := startRegions(t, servers, newAccount(t).backends(1)+"client_key alice client-key-of-alice\ncaller alice {\nrequests 120/minute\n}\n")
			var mu sync.Mutex
			var passed [2][]time.Time
			var slowest time.Duration
			stop := make(chan struct{})
			var asking sync.WaitGroup
			for i, r := range w.replicas {
				asking.Go(func() {
					for ticks := time.Tick(time.Second / 4); ; {
						select {
						case <-stop:
							return
						case <-ticks:
						}
						began := time.Now()
						status, _, _ := r.call("alice", http.MethodPost, "/v1/chat/completions", `{"model":"r0"}`)
						mu.Lock()
						if slowest = max(slowest, time.Since(began)); status == http.StatusOK {
							passed[i] = append(passed[i], time.Now())
						}
						mu.Unlock()
					}
				})
			}
			// most returns the most that passed in any minute that ends then,
			// and in each region in the last minute.
			most := func(from, to time.Time) (both int, each [2]int) {
				mu.Lock()
				defer mu.Unlock()
				for end := from; end.Before(to); end = end.Add(100 * time.Millisecond) {
					n := 0
					for i := range passed {
						at := 0
						for _, p := range passed[i] {
							if p.Before(end) && end.Sub(p) <= time.Minute {
								at++
							}
						}
						n, each[i] = n+at, at
					}
					both = max(both, n)
				}
				return both, each
			}
			at := time.Now()
			phase := func(what string, long time.Duration, bound int) {
				t.Helper()
				time.Sleep(long)
				both, each := most(at, time.Now())
				at = time.Now()
				t.Logf("%d servers, %s: at most %d%% in a minute; in the last one east %d, west %d", servers, what, both*100/limit, each[0], each[1])
				if both*100 > limit*bound {
					t.Errorf("%s: it is more than %d%%", what, bound)
				}
			}
			phase("connected", *regionsLong, 110)
			w.cut()
			phase("in the minute of the cut", time.Minute, 130)
			phase("cut", *regionsLong, 156) // 25/24 of one and a half
			w.heal()
			phase("in the minute after it", time.Minute, 156)
			phase("connected again", *regionsLong, 110)
			close(stop)
			asking.Wait()
			t.Logf("%d servers: the slowest answer took %s", servers, slowest)
		})
	}
}
