package replicas

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// load is requests of about 300 tokens at random replicas. Each is a stream of
// five seconds, whose tokens count when it begins.
type load struct {
	*testing.T
	replicas []*limitedReplica
	random   *rand.Rand
	// model is the model that the requests name.
	model string

	mu sync.Mutex
	// spent are the tokens by tenths of a second.
	spent []int64
}

// spend adds tokens to the latest tenth of a second.
func (l *load) spend(tokens int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.spent[len(l.spent)-1] += tokens
}

// count makes so many tenths of a second be counted.
func (l *load) count(tenths int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.spent) < tenths {
		l.spent = append(l.spent, 0)
	}
}

// run sends requests for so long, of so many tokens a minute on average.
func (l *load) run(tokens int, long time.Duration) {
	const step = 100 * time.Millisecond
	for range int(long / step) {
		l.count(len(l.spent) + 1)
		requests := float64(tokens) / 300 / float64(time.Minute/step)
		n := int(requests)
		if l.random.Float64() < requests-float64(n) {
			n++
		}
		for range n {
			cost := ratelimit.Cost{Requests: 1, Prompt: 100 + l.random.Int64N(200), Output: l.random.Int64N(200), Counted: true, Model: l.model}
			l.replicas[l.random.IntN(len(l.replicas))].admit("alice", ratelimit.Estimate{Prompt: cost.Prompt, Output: ratelimit.Undeclared, Model: l.model}, func(r limiter.Reservation) {
				l.spend(cost.Prompt + cost.Output)
				time.AfterFunc(5*time.Second, func() { r.Settle(time.Now(), cost) })
			})
		}
		time.Sleep(step)
	}
}

// want checks how much of the limit of a minute was spent: at least and at most
// in any minute, and on average.
func (l *load) want(limit, most, average float64, from time.Duration) {
	l.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	spent := l.spent[from/(100*time.Millisecond):]
	var sum, largest, minute int64
	for i, tokens := range spent {
		if minute += tokens; i >= 600 {
			minute -= spent[i-600]
		}
		sum, largest = sum+tokens, max(largest, minute)
	}
	percent := func(tokens float64) float64 { return 100 * tokens / limit }
	mean := percent(float64(sum) / (float64(len(spent)) / 600))
	l.Logf("at most %.1f %% in a minute, %.1f %% on average", percent(float64(largest)), mean)
	if percent(float64(largest)) > most || mean < average {
		l.Errorf("at most %.1f %% in a minute, %.1f %% on average; want %.0f and %.0f", percent(float64(largest)), mean, most, average)
	}
}

// TestFourReplicasUseALimitAndNoMore in any minute, also from idle.
func TestFourReplicasUseALimitAndNoMore(t *testing.T) {
	for seed := range uint64(2) {
		limit(t, 4, []string{"120k/minute"}, func(w *world, all []*limitedReplica) {
			time.Sleep(time.Duration(seed) * 35 * time.Second) // a load that begins late in a minute
			l := load{T: t, replicas: all, random: rand.New(rand.NewPCG(1, seed))}
			l.run(360_000, 6*time.Minute)
			l.want(120_000, 108, 92, 0)
		})
	}
}

func TestFourReplicasKeepALimitWhileTheStoreIsDown(t *testing.T) {
	limit(t, 4, []string{"120k/minute"}, func(w *world, all []*limitedReplica) {
		l := load{T: t, replicas: all, random: rand.New(rand.NewPCG(1, 2))}
		l.run(360_000, time.Minute)
		l.spent = nil
		w.hub.Fail(errors.New("down"))
		l.run(360_000, 5*time.Minute)
		l.want(120_000, 110, 85, 0)
		w.hub.Fail(nil)
		l.run(360_000, 2*time.Minute)
		// from a minute before it is up: what the others used until then counts
		// as if it had been used when it is heard
		l.want(120_000, 110, 75, 4*time.Minute)
	})
}

// TestRequestsForLongOutputsAfterShortOnesKeepALimitAtThreeReplicas has a
// caller, whose answers were short, ask for 200 long ones at each replica at
// once, and again in each minute. Answers are charged when the request is sent.
func TestRequestsForLongOutputsAfterShortOnesKeepALimitAtThreeReplicas(t *testing.T) {
	for _, size := range []int64{4000, 16_000} {
		limit(t, 3, []string{"200k/minute"}, func(w *world, all []*limitedReplica) {
			l := load{T: t, replicas: all, random: rand.New(rand.NewPCG(3, 1))}
			begun := time.Now()
			send := func(r *limitedReplica, output int64, lasts time.Duration) {
				r.admit("alice", ratelimit.Estimate{Prompt: 50, Output: ratelimit.Undeclared}, func(admitted limiter.Reservation) {
					l.count(int(time.Since(begun)/(100*time.Millisecond)) + 1)
					l.spend(50 + output)
					time.AfterFunc(lasts, func() {
						admitted.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 50, Output: output, Counted: true})
					})
				})
			}
			for range 10 {
				for range 34 {
					send(all[0], 10, 100*time.Millisecond)
					time.Sleep(200 * time.Millisecond)
				}
				for range 200 {
					for _, r := range all {
						send(r, size, 20*time.Second)
					}
				}
				time.Sleep(time.Until(begun.Add(time.Since(begun).Truncate(time.Minute) + time.Minute)))
			}
			time.Sleep(20 * time.Second)
			l.want(200_000, 110, 10, 0)
		})
	}
}

// TestThreeReplicasKeepTheLimitsOfModels and a limit of all models, also while
// the store is down. One model has no limit of its own. Each asks for as much
// as all may use together.
func TestThreeReplicasKeepTheLimitsOfModels(t *testing.T) {
	for _, whole := range []float64{240_000, 120_000} {
		limits := map[string]float64{"luna": 60_000, "terra": 90_000, "sol": whole}
		texts := []string{fmt.Sprintf("%.0f/minute", whole), "60k/minute luna", "90k/minute terra"}
		limit(t, 3, texts, func(w *world, all []*limitedReplica) {
			loads := make(map[string]*load)
			for model, limit := range limits {
				loads[model] = &load{T: t, replicas: all, random: rand.New(rand.NewPCG(1, uint64(limit))), model: model}
			}
			run := func(long time.Duration) {
				var running sync.WaitGroup
				for _, l := range loads {
					running.Go(func() { l.run(int(whole), long) })
				}
				running.Wait()
			}
			want := func(average float64, from time.Duration) {
				t.Helper()
				together := &load{T: t}
				for model, limit := range limits {
					l := loads[model]
					l.want(limit, 110, 0, from) // others may leave it little
					together.count(len(l.spent))
					for i, tokens := range l.spent {
						together.spent[i] += tokens
					}
				}
				together.want(whole, 110, average, from)
			}
			run(4 * time.Minute)
			want(70, 0)
			w.hub.Fail(errors.New("down"))
			run(3 * time.Minute)
			want(85, 4*time.Minute)
		})
	}
}
