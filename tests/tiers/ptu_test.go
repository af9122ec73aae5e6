package tiers

import (
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

const (
	// perRequest are the input tokens that a request weighs: 1,200 of its
	// prompt, and 200 of its output, of which each weighs four. 1,000 units
	// work off 20.8 such requests a second.
	perRequest   = 2000
	promptTokens = 1200
	outputTokens = 200
	drain        = 1000 * 2500. / 60
	// warmUp is before anything is measured, for load.
	warmUp, load = 10 * time.Second, 30 * time.Second
)

// shares are the results of a load: the part of each caller's requests that the
// PTU served, and the part of the PTU that was used.
type shares struct {
	byPTU map[string]float64
	used  float64
}

// onPTU sends requests of the callers at random times, at these multiples of
// what 1,000 PTU with a bucket of 2 s can serve, with a pay-as-you-go
// deployment behind.
func onPTU(t *testing.T, options string, rates map[string]float64) (got shares) {
	t.Helper()
	inBubble(t, options+"\n"+twoBackends, func(t *testing.T, w *world) {
		w.Serve("ptu:80", lbtest.Simulate(t, simulator.Handler{
			Name: "ptu", PTU: 1000, BucketSeconds: 2, OutputTokens: outputTokens,
			FirstTokenLatency: caddy.Duration(300 * time.Millisecond),
		}))
		w.Serve("payg:80", lbtest.Simulate(t, simulator.Handler{Name: "payg", OutputTokens: outputTokens}))
		body := `{"model":"gpt-4o","max_tokens":200,"messages":[{"role":"user","content":"` + strings.Repeat("x", 4*promptTokens) + `"}]}`
		var mu sync.Mutex
		sent, served := make(map[string]float64), make(map[string]float64)
		var wg sync.WaitGroup
		begin := time.Now().Add(warmUp)
		for caller, rate := range rates {
			random := rand.New(rand.NewPCG(uint64(len(caller)), 7))
			wg.Go(func() {
				for {
					time.Sleep(time.Duration(random.ExpFloat64() / (rate * drain / perRequest) * float64(time.Second)))
					now := time.Now()
					if now.Sub(begin) > load {
						return
					}
					wg.Go(func() {
						got := w.post(caller, "/v1/chat/completions", body)
						mu.Lock()
						defer mu.Unlock()
						if now.Before(begin) {
							return
						}
						sent[caller]++
						if got.Status != http.StatusOK {
							t.Errorf("%s got %d: %s", caller, got.Status, got.Body)
						}
						if got.Header.Get("X-Simulator") == "ptu" {
							served[caller]++
							got := perRequest / (drain * load.Seconds())
							served[""] += got
						}
					})
				}
			})
		}
		wg.Wait()
		got = shares{make(map[string]float64), served[""]}
		for caller, n := range sent {
			got.byPTU[caller] = served[caller] / n
		}
	})
	t.Logf("the PTU serves %v, and %.3f of it is used", got.byPTU, got.used)
	return got
}

func TestAPTUServesTheBetterTierAndIsFull(t *testing.T) {
	got := onPTU(t, "", map[string]float64{"web": .5, "batch": 2})
	if got.byPTU["web"] < .94 || got.used < .98 {
		t.Errorf("the PTU serves %.3f of the better tier, want .94, and %.3f of it is used, want .98", got.byPTU["web"], got.used)
	}
}

func TestAPTUIsFullWithoutABetterTier(t *testing.T) {
	if got := onPTU(t, "", map[string]float64{"batch": 2}); got.used < .99 {
		t.Errorf("%.3f of the PTU is used, want .99", got.used)
	}
}
