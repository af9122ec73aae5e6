package redis

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// TestTiersGetTheirSharesAtThreeReplicas has three tiers ask for four times of
// what a provisioned deployment serves: each at a replica of its own, where no
// other tier asks, and when Redis is gone all of them at all replicas.
func TestTiersGetTheirSharesAtThreeReplicas(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes a minute")
	}
	const perSecond, bucketSeconds = 15, 2 // requests of 120 and 20 tokens, of which the latter count four times
	deployment := httptest.NewServer(lbtest.Simulate(t, simulator.Handler{Name: "ptu", PTU: 200 * perSecond * 60 / 2500, BucketSeconds: bucketSeconds}))
	t.Cleanup(deployment.Close)
	store := startServer(t)
	options := fmt.Sprintf("backend %s/v1 {\nname ptu\nmodel gpt-4o\napi_key of-the-backend\n}\n%s", deployment.URL, store.option())
	names, shares := []string{"gold", "silver", "bronze"}, []float64{.5, .3, .2}
	for i, name := range names {
		options += fmt.Sprintf("client_key %s 0123456789abcdef-%[1]s\ncaller %[1]s {\ntier %[1]s\n}\ntier %[1]s {\nreserve %d%%\n}\n", name, int(100*shares[i]))
	}
	all := startReplicas(t, 3, options)
	inTouch(t, all)
	body := `{"model":"gpt-4o","max_tokens":20,"messages":[{"role":"user","content":"` + strings.Repeat("x", 4*120) + `"}]}`
	measure := func(what string, warmUp time.Duration, to func(tier int) *replica) {
		t.Helper()
		const long = 10 * time.Second
		begin := time.Now().Add(warmUp)
		served := make([]atomic.Int64, len(names))
		var clients sync.WaitGroup
		for tier, name := range names {
			clients.Go(func() {
				for time.Since(begin) < long {
					time.Sleep(time.Duration(rand.ExpFloat64() * 3 / (4 * perSecond) * float64(time.Second)))
					clients.Go(func() {
						r := to(tier)
						req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.address+"/v1/chat/completions", strings.NewReader(body))
						if err != nil {
							t.Error(err)
							return
						}
						req.Header.Set("Authorization", "Bearer 0123456789abcdef-"+name)
						res, err := r.client.Do(req)
						if err != nil {
							t.Error(err)
							return
						}
						res.Body.Close()
						if res.StatusCode != 200 && res.StatusCode != 429 {
							t.Errorf("%s got %d", name, res.StatusCode)
						}
						if res.StatusCode == 200 && time.Now().After(begin) {
							served[tier].Add(1)
						}
					})
				}
			})
		}
		clients.Wait()
		sum := 0.
		for tier := range names {
			sum += float64(served[tier].Load())
		}
		for tier, name := range names {
			part := float64(served[tier].Load()) / sum
			t.Logf("%s: %s gets %.3f of %.0f", what, name, part, sum)
			if math.Abs(part-shares[tier]) > .08 {
				t.Errorf("%s: %s gets %.3f, want %.2f", what, name, part, shares[tier])
			}
		}
	}
	measure("in touch", 8*time.Second, func(tier int) *replica { return all[tier] })
	store.kill()
	// each replica forgets in 30 s what only it has served
	measure("without Redis", 30*time.Second, func(int) *replica { return all[rand.IntN(len(all))] })
}
