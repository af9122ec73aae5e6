package waiting

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

var seeds = flag.Int("seeds", 6, "how many random configs TestRandomConfigsLoseNoRequest tries")

// chaos makes random choices for many goroutines.
type chaos struct {
	mu     sync.Mutex
	random *rand.Rand
}

func (c *chaos) of(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.random.IntN(n)
}

func (c *chaos) pick(choices ...string) string { return choices[c.of(len(choices))] }

const chaosWait = 900 * time.Millisecond

// config has options at random that have to do with which backend a request
// waits for.
func (c *chaos) config() string {
	options := fmt.Sprintf("wait %s\nclient_key web sk-web-0123456789ab\nclient_key batch sk-batch-0123456789\n", chaosWait) +
		"caller web {\ntier interactive\n" + c.pick("", "tokens 5k/minute\n") + "}\n" +
		"caller batch {\ntier batch\nrequests 8/second\n" + c.pick("", "max_requests 6\n", "tokens 9k/minute\n") + "}\ntier interactive {\nreserve 40%\n}\ntier batch\n" +
		c.pick("", "", "lb_retries 1\n") + c.pick("", "", "lb_try_duration 400ms\n") +
		c.pick("", "silence off\n") + c.pick("", "quota_steering off\n") +
		c.pick("", "ratelimit_headers pool\n", "ratelimit_headers off\n") + c.pick("", "", "lb_policy round_robin\n")
	for i := range 1 + c.of(3) {
		options += fmt.Sprintf("backend http://%c {\nname %c\npriority %d\n%s}\n", 'a'+i, 'a'+i, 1+c.of(2), c.pick("", "", "max_requests 2\n", "weight 0\n"))
	}
	return options
}

// reply answers a request at random, after a while.
func (c *chaos) reply(w *world, slowest int, served func(number string)) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(time.Duration(c.of(slowest)) * time.Millisecond):
		case <-r.Context().Done():
			return
		}
		limits := []string{
			"X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", strconv.Itoa(c.of(1000)), "X-Ratelimit-Reset-Tokens", c.pick("1s", "300ms", "0", "1m0s"),
			"X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", strconv.Itoa(c.of(60)), "X-Ratelimit-Reset-Requests", c.pick("1s", "9", "-1"),
			"Azure-Openai-Deployment-Utilization", strconv.Itoa(c.of(120)) + "%",
		}
		switch c.of(12) {
		case 0, 1, 2, 3:
			served(r.Header.Get("X-Number"))
			lbtest.Says(200, `{"usage":{"prompt_tokens":9,"completion_tokens":9}}`, limits...)(rw, r)
		case 4:
			lbtest.Status(500)(rw, r)
		case 5:
			lbtest.Aborts(rw, r)
		case 6:
			lbtest.Status(429)(rw, r)
		case 7:
			lbtest.Says(400, `{"error":{"message":"x","type":"invalid_request_error","param":null,"code":null}}`, limits...)(rw, r)
		default:
			lbtest.Status(429, append(limits, "Retry-After-Ms", strconv.Itoa(c.of(800)))...)(rw, r)
		}
	}
}

// Whatever the options, the replies and the clients do: no request waits longer
// than it may, none is served twice, and in the end nothing is left.
func TestRandomConfigsLoseNoRequest(t *testing.T) {
	for seed := range *seeds {
		c := &chaos{random: rand.New(rand.NewPCG(uint64(seed), 5))} //nolint:gosec // it is not negative
		config := c.config()
		inBubbleWith(t, config, func(t *testing.T, w *world) {
			const slowest = 120 // ms
			var times sync.Map
			w.AllReply(c.reply(w, slowest, func(number string) {
				n, _ := times.LoadOrStore(number, new(atomic.Int64))
				n.(*atomic.Int64).Add(1)
			}))
			for number := range 300 {
				time.Sleep(time.Duration(c.of(40)) * time.Millisecond)
				body := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}]%s}`, c.pick("gpt-4o", "gpt-4o", "o3"), strings.Repeat("x", c.of(900)), c.pick("", `,"max_tokens":50`, `,"prompt_cache_key":"k"`))
				r := w.Request(http.MethodPost, c.pick("/v1/chat/completions", "/v1/chat/completions", "/v1/images/generations"), strings.NewReader(body))
				r.Header.Set("X-Number", strconv.Itoa(number))
				r.Header.Set("Authorization", "Bearer "+c.pick("sk-web-0123456789ab", "sk-batch-0123456789"))
				if c.of(8) == 0 {
					r.Header.Set("X-Stainless-Read-Timeout", "0.3")
				}
				ctx, leave := r.Context(), context.CancelFunc(func() {})
				if c.of(4) == 0 {
					ctx, leave = context.WithTimeout(ctx, time.Duration(c.of(1000))*time.Millisecond)
				}
				w.wg.Go(func() {
					defer leave()
					begin := time.Now()
					got := w.Send(r.WithContext(ctx))
					// up to three attempts before the wait, and as many after
					// it
					if took := time.Since(begin); took > chaosWait+7*slowest*time.Millisecond {
						t.Errorf("request %d took %s", number, took)
					}
					if got.Err == nil && got.Status == 0 || got.Err != nil && ctx.Err() == nil {
						t.Errorf("request %d failed: %v", number, got.Err)
					}
					for name, values := range got.Header {
						if strings.HasPrefix(name, "X-Ratelimit-") && (len(values) != 1 || strings.HasPrefix(values[0], "-") && values[0] != "-1") {
							t.Errorf("request %d got %s: %v", number, name, values)
						}
					}
				})
			}
			w.wg.Wait()
			time.Sleep(time.Minute)
			times.Range(func(number, n any) bool {
				if n := n.(*atomic.Int64).Load(); n > 1 {
					t.Errorf("request %v was served %d times", number, n)
				}
				return true
			})
			metrics, pool := lbtest.Scrape(t), map[string]string{"pool": w.Handler.Pool}
			for _, name := range []string{"waiting", "requests_in_flight"} {
				if got := metrics.Sum(name, pool); got != 0 {
					t.Errorf("%s is %v", name, got)
				}
			}
			for _, caller := range limitsOf(w) {
				if caller.InFlight != 0 || caller.Reserved != 0 {
					t.Errorf("%s has %d requests in flight and %d tokens reserved", caller.Name, caller.InFlight, caller.Reserved)
				}
			}
		})
		if t.Failed() {
			t.Fatalf("seed %d, with\n%s", seed, config)
		}
	}
}
