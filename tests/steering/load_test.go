package steering

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
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

// sessions sends requests of 300 sessions at 0.7 times the quotas, which are
// uneven. It returns which part of the requests came where the session's
// previous one was served, so that their prompt was cached there.
func sessions(t *testing.T, options string) (hits float64) {
	t.Helper()
	const warmUp, long, all = 2 * time.Minute, 10 * time.Minute, 160_000 // tokens a minute
	inBubble(t, "a:1 b:1 c:1", options, func(t *testing.T, w *world) {
		var mu sync.Mutex
		var turns, cached int
		home, began := make(map[string]string), time.Now()
		for name, tokens := range map[string]int{"a": all / 8, "b": all * 2 / 8, "c": all * 5 / 8} {
			backend := lbtest.Simulate(t, simulator.Handler{Name: "azure", TokensPerMinute: tokens, OutputTokens: 100, FirstTokenLatency: caddy.Duration(300 * time.Millisecond)})
			w.Serve(name+":80", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				var body struct {
					Key string `json:"prompt_cache_key"`
				}
				text, err := io.ReadAll(r.Body)
				if err == nil {
					err = json.Unmarshal(text, &body)
				}
				if err != nil {
					t.Error(err)
				}
				r.Body = io.NopCloser(bytes.NewReader(text))
				got := httptest.NewRecorder()
				backend.ServeHTTP(got, r)
				if got.Code == http.StatusOK {
					mu.Lock()
					if previous := home[body.Key]; previous != "" && time.Since(began) > warmUp {
						turns++
						if previous == name {
							cached++
						}
					}
					home[body.Key] = name
					mu.Unlock()
				}
				maps.Copy(rw.Header(), got.Header())
				rw.WriteHeader(got.Code)
				_, _ = rw.Write(got.Body.Bytes())
			}))
		}
		const chat = `{"model":"gpt-4o","max_tokens":100,"prompt_cache_key":"%d","messages":[{"role":"user","content":"%s"}]}`
		random, text := rand.New(rand.NewPCG(3, 4)), strings.Repeat("abcd", 200)
		var sent sync.WaitGroup
		for time.Since(began) < warmUp+long {
			time.Sleep(time.Duration(random.ExpFloat64() * 300 / (.7 * all) * float64(time.Minute)))
			session := random.IntN(300)
			sent.Go(func() { w.Post(fmt.Sprintf(chat, session, text)) })
		}
		sent.Wait()
		hits = float64(cached) / float64(turns)
	})
	return hits
}

func TestSessionsKeepTheirCachesBelowTheQuotas(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	off, on := sessions(t, "quota_steering off"), sessions(t, "")
	t.Logf("%.4f of the requests find their prompt without steering, %.4f with it", off, on)
	if on < .99 || off > on {
		t.Errorf("%.4f of the requests find their prompt, want .99; %.4f do without steering", on, off)
	}
}

// fullPTU sends 40 requests a second to a PTU that serves 20, and whose bucket
// holds so many seconds of work, with another backend behind it. It returns the
// calls for each request that was served, and which part of the PTU was used.
func fullPTU(t *testing.T, options, body string, bucket float64) (calls, used float64) {
	t.Helper()
	const warmUp, long = 20 * time.Second, 40 * time.Second
	inBubble(t, "ptu:1 payg:2", options, func(t *testing.T, w *world) {
		w.Serve("ptu:80", lbtest.Simulate(t, simulator.Handler{Name: "ptu", PTU: 127, BucketSeconds: bucket, OutputTokens: 16, FirstTokenLatency: caddy.Duration(20 * time.Millisecond)}))
		w.Serve("payg:80", lbtest.Simulate(t, simulator.Handler{Name: "payg", OutputTokens: 16, FirstTokenLatency: caddy.Duration(20 * time.Millisecond)}))
		random := rand.New(rand.NewPCG(1, 2))
		attempts := func(class, backend string) float64 {
			labels := map[string]string{"pool": w.pool, "class": class}
			if backend != "" {
				labels["backend"] = backend
			}
			return lbtest.SumOf(t, "attempts_total", labels)
		}
		var all sync.WaitGroup
		send := func(long time.Duration) (served, throttled, byPTU float64) {
			served, throttled, byPTU = attempts("served", ""), attempts("throttled", ""), attempts("served", "ptu")
			for began := time.Now(); time.Since(began) < long; time.Sleep(time.Duration(random.ExpFloat64() / 40 * float64(time.Second))) {
				session := random.IntN(100)
				all.Go(func() {
					if got := w.Post(fmt.Sprintf(body, session)); got.Status != 200 {
						t.Errorf("got %d", got.Status)
					}
				})
			}
			return attempts("served", "") - served, attempts("throttled", "") - throttled, attempts("served", "ptu") - byPTU
		}
		send(warmUp)
		served, throttled, byPTU := send(long)
		calls, used = 1+throttled/served, byPTU/(20*long.Seconds())
		all.Wait()
	})
	return calls, used
}

func TestAFullPTUIsUsedAndSeldomCalledInVain(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	const chat = `{"model":"gpt-4o","max_tokens":16,%s:"%%d","messages":[{"role":"user","content":"%s"}]}`
	text := strings.Repeat("abcd", 200)
	simple := fmt.Sprintf(chat, `"user"`, text)
	for name, tc := range map[string]struct {
		bucket        float64
		options, body string
	}{
		"a bucket of 0.5 s": {.5, "", simple},
		"a bucket of 2 s":   {2, "", simple},
		"a bucket of 10 s":  {10, "", simple},
		"streams that wait": {2, "wait 1s", fmt.Sprintf(chat, `"stream":true,"user"`, text)},
		"sessions":          {2, "", fmt.Sprintf(chat, `"prompt_cache_key"`, text)},
	} {
		calls, used := fullPTU(t, tc.options, tc.body, tc.bucket)
		t.Logf("%s: %.3f calls for each request, %.3f used", name, calls, used)
		if calls > 1.06 || used < .99 {
			t.Errorf("%s: %.3f calls for each request, want 1.06 at most; %.3f of the PTU is used, want .99", name, calls, used)
		}
	}
	if calls, _ := fullPTU(t, "quota_steering off", simple, 2); calls < 1.06 {
		t.Errorf("%.3f calls for each request without steering", calls)
	}
}
