package steering

import (
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// load sends requests for eight minutes, of which each counts for 300 tokens on
// average, and returns how many attempts were refused for each 1,000 that were
// served.
func load(t *testing.T, options string, part float64) (refusals, served float64) {
	t.Helper()
	inBubble(t, "a:1 b:1 c:1", options, func(t *testing.T, w *world) {
		for name, tokens := range map[string]int{"a": 30_000, "b": 30_000, "c": 60_000} {
			w.Serve(name+":80", lbtest.Simulate(t, simulator.Handler{Name: "azure", TokensPerMinute: tokens, OutputTokens: 100, FirstTokenLatency: caddy.Duration(300 * time.Millisecond)}))
		}
		body := `{"model":"gpt-4o","max_tokens":100,"messages":[{"role":"user","content":"` + strings.Repeat("abcd", 200) + `"}]}`
		random := rand.New(rand.NewPCG(1, 2))
		var all sync.WaitGroup
		for began := time.Now(); time.Since(began) < 8*time.Minute; time.Sleep(time.Duration(random.ExpFloat64() * 300 / (part * 120_000) * float64(time.Minute))) {
			all.Go(func() { w.Post(body) })
		}
		all.Wait()
		ok := lbtest.SumOf(t, "attempts_total", map[string]string{"pool": w.pool, "class": "served"})
		throttled := lbtest.SumOf(t, "attempts_total", map[string]string{"pool": w.pool, "class": "throttled"})
		requests := lbtest.SumOf(t, "requests_total", map[string]string{"pool": w.pool})
		refusals, served = 1000*throttled/ok, ok/requests
	})
	return refusals, served
}

func TestSteeringAvoidsRefusalsOfAzuresDeployments(t *testing.T) {
	off, servedOff := load(t, "quota_steering off", .8)
	on, servedOn := load(t, "", .8)
	t.Logf("%.2f refusals for 1000 served without steering, %.2f with it; served: %.4f and %.4f", off, on, servedOff, servedOn)
	if off <= 1 || on > 1 || servedOn < servedOff-.003 {
		t.Errorf("%.2f refusals for 1000 served without steering, %.2f with it; served: %.4f and %.4f", off, on, servedOff, servedOn)
	}
}
