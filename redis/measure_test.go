package redis

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

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
	res, err := r.client.Get(r.address + "/quota/_simulator/status")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(&s); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestAQuotaIsSharedByManyReplicas prints how many calls came early at a
// deployment that gets twice of what it serves.
func TestAQuotaIsSharedByManyReplicas(t *testing.T) {
	if !*measure {
		t.Skip("it takes minutes: go test -run TestAQuotaIsSharedByManyReplicas -measure -v")
	}
	const perSecond, clients = 100, 9
	s := startServer(t)
	for _, tt := range []struct {
		name     string
		replicas int
		option   string
	}{{"one replica", 1, ""}, {"nine with Redis", 9, s.option()}, {"nine without", 9, ""}} {
		t.Run(tt.name, func(t *testing.T) {
			sim := startSimulator(t, perSecond*60)
			replicas := startReplicas(t, tt.replicas, fmt.Sprintf(`backend %s/quota/v1 {
				name quota
			}
			backend %s/spare/v1 {
				name spare
				priority 2
			}
			%s`, sim.address, sim.address, tt.option))
			if tt.option != "" {
				inTouch(t, replicas)
			}
			targets := replicas
			for len(targets) < clients {
				targets = append(targets, replicas[0])
			}
			load := startLoad(targets, clients*time.Second/(2*perSecond), func() string { return "gpt-4o" })
			time.Sleep(time.Minute)
			load.stop()
			got := status(t, sim)
			t.Logf("%d requests, %d failed; served within the quota: %d; refused: %d, of them early: %d",
				len(load.latencies), load.failed(), got.Admitted, got.Throttled.Requests, got.Early)
			if load.failed() > 0 {
				t.Error("requests failed")
			}
		})
	}
}

// TestRequestsCostTheSameWithRedis prints how much of a processor a request
// takes, with Redis and without.
func TestRequestsCostTheSameWithRedis(t *testing.T) {
	if !*measure {
		t.Skip("it takes minutes: go test -run TestRequestsCostTheSameWithRedis -measure -v")
	}
	const perSecond, clients, rounds = 2000, 50, 5
	s := startServer(t)
	sim := startSimulator(t, 1_000_000)
	costs := make([][]float64, 2)
	var replicas []*replica
	for _, option := range []string{"", s.option()} {
		replicas = append(replicas, startReplica(t, fmt.Sprintf("backend %s/spare/v1\n%s", sim.address, option)))
	}
	for range rounds {
		for i, r := range replicas {
			before := cpu(t, r)
			load := startLoad(slices.Repeat([]*replica{r}, clients), clients*time.Second/perSecond, func() string { return "gpt-4o" })
			time.Sleep(10 * time.Second)
			load.stop()
			costs[i] = append(costs[i], (cpu(t, r)-before)/float64(len(load.latencies))*1e6)
		}
	}
	for i := range costs {
		slices.Sort(costs[i])
	}
	t.Logf("µs of CPU per request: %.1f without, %.1f with Redis (medians of %v, %v)", costs[0][rounds/2], costs[1][rounds/2], costs[0], costs[1])
}

// cpu is how many seconds of a processor the process has used.
func cpu(t testing.TB, r *replica) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.process.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text[strings.LastIndex(string(text), ")")+1:]))
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / 100
}
