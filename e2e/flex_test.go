package e2e

import (
	"cmp"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// startFlex runs examples/flex.Caddyfile with a simulator that refuses flex two
// of three times. It returns the balancer's base URL and the simulator's
// address.
func startFlex(t *testing.T) (url, simulator string) {
	t.Helper()
	addresses, err := freeAddresses(2)
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile("../examples/flex.Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	sites := strings.NewReplacer(":8080 {", "http://"+addresses[0]+" {", "https://api.openai.com", "http://"+addresses[1]).Replace(string(example)) +
		"http://" + addresses[1] + " {\n openai_simulator {\n flex_capacity 33\n first_token_latency 50ms\n }\n}\n"
	listenAt(t, addresses[0], sites, "OPENAI_KEY=sk-any")
	return "http://" + addresses[0] + "/v1", "http://" + addresses[1]
}

// TestFlexIsTriedFirstAndNothingFails has the official SDKs ask for flex, and
// without a service tier. E2E_FLEX is how often.
func TestFlexIsTriedFirstAndNothingFails(t *testing.T) {
	n, err := strconv.Atoi(cmp.Or(os.Getenv("E2E_FLEX"), "9"))
	if err != nil {
		t.Fatal(err)
	}
	for name, run := range map[string]struct {
		program string
		install func() error
		args    []string
	}{
		"Python": {"python3", installPython, []string{"python/.venv/bin/python", "python/flex.py"}},
		"Node":   {"node", installNode, []string{"node", "node/flex.mjs"}},
	} {
		t.Run(name, func(t *testing.T) {
			lookPath(t, run.program)
			if err := run.install(); err != nil {
				t.Fatal(err)
			}
			t.Parallel()
			url, simulator := startFlex(t)
			out, err := exec.Command(run.args[0], append(run.args[1:], url, strconv.Itoa(n))...).Output()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			var got struct {
				Flex, Default map[string]int
				Took          []float64
			}
			if err := json.Unmarshal(out, &got); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			res, err := http.Get(simulator + "/_simulator/status")
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			var status struct {
				Requests  int
				Throttled struct{ Flex int }
			}
			if err := json.NewDecoder(res.Body).Decode(&status); err != nil {
				t.Fatal(err)
			}
			slices.Sort(got.Took)
			t.Logf("flex was served as %v, and refused %d times; the others as %v, in %.3f s (median) to %.3f s; %d requests in all",
				got.Flex, status.Throttled.Flex, got.Default, got.Took[n/2], got.Took[n-1], status.Requests)
			refused := status.Throttled.Flex
			if refused == 0 || got.Flex["flex"] != n-refused || got.Flex["default"] != refused {
				t.Errorf("of %d flex requests, %d were refused, and they were served as %v", n, refused, got.Flex)
			}
			if got.Default["default"] != n || status.Requests != 2*n+refused {
				t.Errorf("the simulator got %d requests, and the %d without a service tier were served as %v", status.Requests, n, got.Default)
			}
		})
	}
}
