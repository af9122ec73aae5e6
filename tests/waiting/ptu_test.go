package waiting

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

const (
	// perRequest are the input tokens that a request weighs: 1,200 of its
	// prompt, and 200 of its output, of which each weighs four.
	perRequest   = 2000
	promptTokens = 1200
	outputTokens = 200
	retries      = 2 // of OpenAI's SDKs
)

// outcome is what a load comes to.
type outcome struct {
	// errors is the part of the clients that see an error in the end, and calls
	// how many calls the PTU gets for each of them.
	errors, calls float64
	// waits are how long the requests took that were answered without a retry,
	// less what the PTU takes.
	p50, p99 time.Duration
}

func (o outcome) String() string {
	return fmt.Sprintf("%.1f %% errors, %.2f calls a client, waits of %s (p50) and %s (p99)", 100*o.errors, o.calls, o.p50, o.p99)
}

// onPTU sends requests at random times, as clients with OpenAI's SDK do, at
// this part of what so many PTU can serve.
func onPTU(t *testing.T, options string, ptu int, bucket, part float64, requests int) (got outcome) {
	t.Helper()
	drain := float64(ptu) * 2500 / 60
	inBubble(t, options, func(t *testing.T, w *world) {
		const firstToken = 300 * time.Millisecond
		var calls atomic.Int64
		deployment := lbtest.Simulate(t, simulator.Handler{
			Name: "a", PTU: ptu, BucketSeconds: bucket, OutputTokens: outputTokens,
			FirstTokenLatency: caddy.Duration(firstToken),
		})
		w.Serve("a:80", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			calls.Add(1)
			deployment.ServeHTTP(rw, r)
		}))
		body := `{"model":"gpt-4o","max_tokens":200,"messages":[{"role":"user","content":"` + strings.Repeat("x", 4*promptTokens) + `"}]}`
		random := rand.New(rand.NewPCG(7, 7))
		var mu sync.Mutex
		var waits []time.Duration
		failed := 0
		var wg sync.WaitGroup
		for range requests {
			time.Sleep(time.Duration(random.ExpFloat64() / (part * drain / perRequest) * float64(time.Second)))
			wg.Go(func() {
				for try := 0; ; try++ {
					begin := time.Now()
					got := w.Post(body)
					took := time.Since(begin)
					mu.Lock()
					if got.Status == http.StatusOK {
						took -= firstToken
					}
					waits = append(waits, took)
					if got.Status != http.StatusOK && try == retries {
						failed++
					}
					mu.Unlock()
					if got.Status == http.StatusOK || try == retries {
						return
					}
					after, err := strconv.Atoi(got.Header.Get("Retry-After-Ms"))
					if err != nil {
						t.Errorf("got %d %v", got.Status, got.Header)
					}
					time.Sleep(time.Duration(after) * time.Millisecond)
				}
			})
		}
		wg.Wait()
		slices.Sort(waits)
		got.errors, got.calls = float64(failed)/float64(requests), float64(calls.Load())/float64(requests)
		got.p50, got.p99 = waits[len(waits)/2], waits[len(waits)*99/100]
	})
	return got
}

func TestWaitingSparesASmallPTUErrors(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	without, with := onPTU(t, "", 50, 2, .95, 1500), onPTU(t, "wait 1s", 50, 2, .95, 1500)
	t.Logf("without: %s; with: %s", without, with)
	if with.errors > .7*without.errors {
		t.Errorf("with wait, %.3f of the clients see an error, and %.3f without", with.errors, without.errors)
	}
	if with.p50 > 100*time.Millisecond {
		t.Errorf("the median of the waits is %s", with.p50)
	}
	if with.p99 > time.Second+20*time.Millisecond {
		t.Errorf("the p99 of the waits is %s", with.p99)
	}
}
