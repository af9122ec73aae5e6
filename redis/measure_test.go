package redis

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// startSimulator runs a deployment with a quota, and one without, in a process.
func startSimulator(t testing.TB, requestsPerMinute int) *replica {
	t.Helper()
	return startCaddy(t, fmt.Sprintf(`handle_path /quota/* {
	openai_simulator {
		name quota
		requests_per_minute %d
	}
}
handle_path /spare/* {
	openai_simulator {
		name spare
	}
}`, requestsPerMinute), "go_goroutines")
}

// status is that of the deployment with the quota.
func status(t testing.TB, r *replica) (s simulator.Status) {
	t.Helper()
	if err := json.Unmarshal([]byte(lbtest.Get(r.client, r.address+"/quota/_simulator/status").Body), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestHowSoonNeighboursStop prints how long after the first 429 the last one
// came, and how many there were, with Redis and without.
func TestHowSoonNeighboursStop(t *testing.T) {
	if !*measure {
		t.Skip("it takes minutes: go test -run TestHowSoonNeighboursStop -measure -v")
	}
	const rounds = 300
	s := startServer(t)
	for _, tt := range []struct{ name, option string }{{"with Redis", s.option()}, {"without", ""}} {
		a := newAccount(t)
		var replicas []*replica
		for i := range 3 {
			replicas = append(replicas, startReplica(t, a.backends(rounds, fmt.Sprintf("header X-Replica %d", i))+tt.option))
		}
		if tt.option != "" {
			inTouch(t, replicas)
		}
		var stopped, toldAfter []time.Duration
		early, ours := make(map[int]int), 0
		for round := range rounds {
			name := fmt.Sprintf("r%d", round)
			load := startLoad(replicas, pace, func() string { return name })
			time.Sleep(100 * time.Millisecond)
			a.throttle(name, true)
			time.Sleep(300 * time.Millisecond)
			load.stop()
			if load.failed() > 0 {
				t.Errorf("%d requests failed", load.failed())
			}
			refusals := a.refusals(name)
			if len(refusals) == 0 {
				t.Fatal("nobody called the backend")
			}
			first := refusals[0].at
			stopped = append(stopped, refusals[len(refusals)-1].at.Sub(first))
			early[len(refusals)-1]++
			for i, r := range replicas {
				for _, known := range r.logged("cooldown started", name) {
					if tt.option != "" && refusals[0].by != fmt.Sprint(i) {
						toldAfter = append(toldAfter, known.at.Sub(first))
					}
					for _, refusal := range refusals {
						if refusal.by == fmt.Sprint(i) && refusal.at.After(known.at) {
							ours++
						}
					}
				}
			}
		}
		slices.Sort(stopped)
		slices.Sort(toldAfter)
		t.Logf("%s: neighbours stopped after %v (median), %v (p99); rounds by how many calls came early: %v; calls by who knew of the cooldown: %d",
			tt.name, stopped[rounds/2], stopped[rounds*99/100], early, ours)
		if n := len(toldAfter); n > 0 {
			t.Logf("from the refusal at the backend to the cooldown at a neighbour: %v (median), %v (p99)", toldAfter[n/2], toldAfter[n*99/100])
		}
	}
}

// TestAQuotaIsSharedByManyReplicas prints how many calls came early at a
// deployment that gets twice of what it serves: next door, and as far away as
// one in another building. How long a 429 takes to the balancer is how long
// early calls come, with one replica as well.
func TestAQuotaIsSharedByManyReplicas(t *testing.T) {
	if !*measure {
		t.Skip("it takes minutes: go test -run TestAQuotaIsSharedByManyReplicas -measure -v")
	}
	for name, mode := range map[string]int32{"next door": passes, fmt.Sprintf("%v away", distance): isFar} {
		t.Run(name, func(t *testing.T) { testQuota(t, mode) })
	}
}

func testQuota(t *testing.T, mode int32) {
	// The windows of the quota last a second.
	const perSecond, clients, rounds, length = 100, 90, 6, 20 * time.Second
	s := startServer(t)
	settings := []*quotaSetting{{name: "one replica", n: 1}, {name: "nine with Redis", n: 9, option: s.option()}, {name: "nine without", n: 9}}
	for _, set := range settings {
		set.sim = startSimulator(t, perSecond*60)
		near := newProxy(t, strings.TrimPrefix(set.sim.address, "http://"))
		near.mode.Store(mode)
		set.replicas = startReplicas(t, set.n, fmt.Sprintf(`backend http://%s/quota/v1 {
			name quota
		}
		backend http://%[1]s/spare/v1 {
			name spare
			priority 2
		}
		%s`, near.Addr(), set.option))
		if set.option != "" {
			inTouch(t, set.replicas)
		}
	}
	for range rounds { // in turn, so that all meet the same machine
		for _, set := range settings {
			load := startLoad(slices.Repeat(set.replicas, clients/set.n), clients*time.Second/(2*perSecond), func() string { return "gpt-4o" })
			time.Sleep(length)
			load.stop()
			set.requests += len(load.latencies)
			if n := load.failed(); n > 0 {
				t.Errorf("%s: %d requests failed", set.name, n)
			}
		}
	}
	for _, set := range settings {
		got, won := status(t, set.sim), 0.0
		for _, r := range set.replicas {
			won += max(0, r.metric(`caddy_openai_lb_state_claims_total{outcome="won"}`))
		}
		t.Logf("%s: %d requests; served %.3f of the quota; refused: %d, of them early: %d; claims of probes that were won: %v",
			set.name, set.requests, float64(got.Admitted)/(perSecond*rounds*length.Seconds()), got.Throttled.Requests, got.Early, won)
	}
}

// quotaSetting is some replicas and the deployment that they share.
type quotaSetting struct {
	name     string
	n        int
	option   string
	sim      *replica
	replicas []*replica
	requests int
}

// TestRequestsCostTheSameWithRedis prints how much of a processor a request
// takes, with Redis and without.
func TestRequestsCostTheSameWithRedis(t *testing.T) {
	if !*measure {
		t.Skip("it takes minutes: go test -run TestRequestsCostTheSameWithRedis -measure -v")
	}
	const perSecond, clients, rounds, length = 2000, 50, 9, 10 * time.Second
	s := startServer(t)
	sim := startSimulator(t, 1_000_000)
	costs, requests := make([][]float64, 2), 0
	var replicas []*replica
	for _, option := range []string{"", s.option()} {
		replicas = append(replicas, startReplica(t, fmt.Sprintf("backend %s/spare/v1\n%s", sim.address, option)))
	}
	for round := range rounds {
		for n := range replicas {
			i := (round + n) % len(replicas) // each begins in turn
			r := replicas[i]
			before := cpu(t, r)
			load := startLoad(slices.Repeat([]*replica{r}, clients), clients*time.Second/perSecond, func() string { return "gpt-4o" })
			time.Sleep(length)
			load.stop()
			requests += len(load.latencies)
			costs[i] = append(costs[i], (cpu(t, r)-before)/float64(len(load.latencies))*1e6)
		}
	}
	for i := range costs {
		slices.Sort(costs[i])
	}
	t.Logf("µs of CPU per request at %.0f a second: %.1f without, %.1f with Redis (medians of %.1f, %.1f)",
		float64(requests)/(2*rounds*length.Seconds()), costs[0][rounds/2], costs[1][rounds/2], costs[0], costs[1])
}

// cpu is how many seconds of a processor the process has used.
func cpu(t testing.TB, r *replica) float64 {
	t.Helper()
	return cpuOf(r.process.Process.Pid)
}

// cpuOf is how many seconds of a processor a process has used.
func cpuOf(pid int) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text[strings.LastIndex(string(text), ")")+1:]))
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / 100
}

// TestWhatMadeUpModelsCostRedis prints how much of a processor Redis takes
// before and after clients have named 2,000 models that nobody has, and then
// how soon all replicas know of a throttle.
func TestWhatMadeUpModelsCostRedis(t *testing.T) {
	if !*measure {
		t.Skip("it takes a minute: go test -run TestWhatMadeUpModelsCostRedis -measure -v")
	}
	const backends, models = 6, 2000
	const length = 15 * time.Second
	s := startServer(t)
	var options strings.Builder
	for i := range backends {
		b := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			w.Header().Set("Content-Type", "application/json")
			if !bytes.Contains(body, []byte("real")) || bytes.Contains(body, []byte("throttled")) {
				w.Header().Set("Retry-After", "240")
				w.WriteHeader(http.StatusTooManyRequests)
			}
			io.WriteString(w, `{}`)
		}))
		t.Cleanup(b.Close)
		fmt.Fprintf(&options, "backend %s/v1 {\nname b%d\nmodel real\nmodel throttled-real\n}\nbackend %[1]s/v1 {\nname any%[2]d\npriority 2\napi_key any\n}\n", b.URL, i)
	}
	replicas := startReplicas(t, 3, options.String()+s.option())
	inTouch(t, replicas)
	took := func() time.Duration {
		before := s.cpu()
		time.Sleep(length)
		return time.Duration(float64(s.cpu()-before) / length.Seconds()) // of each second
	}
	calm := took()
	for i := range models {
		replicas[i%3].post(fmt.Sprint("made up ", i))
	}
	t.Logf("Redis takes %v of a second, and %v after %d made-up models", calm, took(), models)
	began := time.Now()
	replicas[0].post("throttled-real")
	var known time.Duration
	for _, r := range replicas {
		lbtest.WaitFor(t, func() bool { return len(r.logged("cooldown started", "b0")) > 0 })
		known = max(known, r.logged("cooldown started", "b0")[0].at.Sub(began))
	}
	t.Logf("a throttle is known to all replicas after %v", known)
}

// cpu is how long the server has used a processor.
func (s *server) cpu() (total time.Duration) {
	s.t.Helper()
	return time.Duration((s.info("cpu", "used_cpu_sys") + s.info("cpu", "used_cpu_user")) * float64(time.Second))
}

// info returns a figure of a section of the server's INFO.
func (s *server) info(section, name string) float64 {
	s.t.Helper()
	for _, line := range strings.Fields(fmt.Sprint(s.do("info", section))) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			figure, _ := strconv.ParseFloat(value, 64)
			return figure
		}
	}
	s.t.Errorf("INFO %s has no %s", section, name)
	return 0
}
