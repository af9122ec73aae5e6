package redis

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
)

// startCallers runs a replica that shares what its callers use, each with these
// limits of tokens.
func startCallers(t *testing.T, s *server, limits ...string) (callers *limiter.Limiters, stop func()) {
	t.Helper()
	r := replicas.New(open(t, s.engine()), zap.NewNop())
	callers = limiter.NewLimiters(nil)
	var settings limiter.Settings
	for _, text := range limits {
		l, err := ratelimit.ParseLimit(ratelimit.Tokens, text)
		if err != nil {
			t.Fatal(err)
		}
		settings.Limits = append(settings.Limits, l)
	}
	callers.Configure(time.Now(), func(string) limiter.Settings { return settings })
	r.NewLink().ShareUse("the pool", callers)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		r.Run(ctx)
		close(ended)
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(stop)
	return callers, stop
}

// reserve has a request admitted, which may have to hear of the other replicas
// first.
func reserve(t *testing.T, all *limiter.Limiters, tokens int64) (r limiter.Reservation) {
	t.Helper()
	lbtest.WaitFor(t, func() bool { // until it is connected for a while
		var refusal *ratelimit.Refusal
		r, refusal = all.Get(time.Now(), "alice").Await(ratelimit.Estimate{Prompt: tokens})
		return refusal == nil
	})
	return r
}

func waitForUse(t *testing.T, want int64, all ...*limiter.Limiters) {
	t.Helper()
	for _, callers := range all {
		lbtest.WaitFor(t, func() bool {
			return callers.Get(time.Now(), "alice").Snapshot(time.Now()).Month == want
		})
	}
}

func TestReplicasAddUpWhatCallersUse(t *testing.T) {
	s := startServer(t)
	a, stopA := startCallers(t, s, "1k/month")
	b, _ := startCallers(t, s, "1k/month")
	first, second := reserve(t, a, 400), reserve(t, b, 500)
	waitForUse(t, 900, a, b)
	if _, refusal := b.Get(time.Now(), "alice").Try(time.Now(), ratelimit.Estimate{Prompt: 101}); refusal == nil {
		t.Error("a request over the limit was admitted")
	}
	first.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 300})
	second.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 100})
	waitForUse(t, 400, a, b)
	stopA()
	again, _ := startCallers(t, s, "1k/month")
	waitForUse(t, 400, again)
}

// askAsAlice sends a request of the caller alice to a replica.
func askAsAlice(t *testing.T, r *replica, method, path, body string) (status int, answer string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, r.address+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer 0123456789abcdef")
	res, err := r.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(text)
}

func TestATeamIsToldTheSameAtEachOfThreeReplicas(t *testing.T) {
	s := startServer(t)
	options := newAccount(t).backends(1) + "client_key alice 0123456789abcdef\ncaller alice {\nrequests 3/month\ntokens 1M/month\n}\n" + s.option()
	all := startReplicas(t, 3, options)
	use := func(r *replica) string {
		_, answer := askAsAlice(t, r, http.MethodGet, "/v1/usage", "")
		shared, _, found := strings.Cut(answer, `"models":`) // of which each process has its own ledger
		if !found || !strings.HasSuffix(shared, `"models_of":"storage",`) {
			t.Fatalf("got %s", answer)
		}
		return shared
	}
	for i, want := range []int{200, 200, 200, 429} {
		r := all[i%len(all)]
		lbtest.WaitFor(t, func() bool { return strings.Contains(use(r), fmt.Sprintf(`"used":%d,"left":%d`, i, 3-i)) })
		if status, answer := askAsAlice(t, r, http.MethodPost, "/v1/chat/completions", `{"model":"r0"}`); status != want {
			t.Errorf("request %d: got %d %s, want %d", i+1, status, answer, want)
		}
	}
	lbtest.WaitFor(t, func() bool { return use(all[0]) == use(all[1]) && use(all[1]) == use(all[2]) })
}

func TestACallerHasItsLimitOnceAtTwoProcesses(t *testing.T) {
	s := startServer(t)
	options := newAccount(t).backends(1) + "client_key alice 0123456789abcdef\ncaller alice {\nrequests 1/month\n}\n" + s.option()
	all := startReplicas(t, 2, options)
	chat := func(r *replica) int {
		status, _ := askAsAlice(t, r, http.MethodPost, "/v1/chat/completions", `{"model":"r0"}`)
		return status
	}
	if status := chat(all[0]); status != 200 {
		t.Fatalf("got %d", status)
	}
	lbtest.WaitFor(t, func() bool {
		_, use := askAsAlice(t, all[1], http.MethodGet, "/v1/usage", "")
		return strings.Contains(use, `"used":1`)
	})
	if status := chat(all[1]); status != 429 {
		t.Errorf("the other replica answers %d", status)
	}
}

func TestRedisIsKilledBetweenReservingAndSettling(t *testing.T) {
	s := startServer(t)
	a, _ := startCallers(t, s, "1k/month")
	b, _ := startCallers(t, s, "1k/month")
	r := reserve(t, a, 600)
	waitForUse(t, 600, a, b)
	s.kill()
	r.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: 100})
	waitForUse(t, 100, a)
	waitForUse(t, 600, b)
	s.start() // it has lost its data
	waitForUse(t, 100, b)
	again, _ := startCallers(t, s, "1k/month")
	waitForUse(t, 100, again)
}

// TestFourReplicasKeepALimitOnARealRedis which is then down for five minutes.
// Each of them gets as many requests, of three times the limit together. A
// request is a stream of five seconds and of about 300 tokens, which count when
// it begins.
func TestFourReplicasKeepALimitOnARealRedis(t *testing.T) {
	if !*measure {
		t.Skip("it takes a quarter of an hour, with -measure")
	}
	const limit = 120_000
	s := startServer(t)
	var all []*limiter.Limiters
	for range 4 {
		callers, _ := startCallers(t, s, "120k/minute")
		all = append(all, callers)
	}
	time.Sleep(3 * time.Second)
	run := func(name string, long time.Duration) {
		const step = 100 * time.Millisecond
		var spent []int64
		for began := time.Now(); time.Since(began) < long; time.Sleep(step - time.Since(began)%step) {
			for len(spent) <= int(time.Since(began)/step) {
				spent = append(spent, 0)
				for range rand.IntN(5) { // two on average
					c := all[rand.IntN(len(all))].Get(time.Now(), "alice")
					cost := ratelimit.Cost{Requests: 1, Prompt: 100 + rand.Int64N(200), Output: rand.Int64N(200), Counted: true}
					r, refusal := c.Try(time.Now(), ratelimit.Estimate{Prompt: cost.Prompt, Output: ratelimit.Undeclared})
					if refusal == nil {
						spent[len(spent)-1] += cost.Prompt + cost.Output
						time.AfterFunc(5*time.Second, func() { r.Settle(time.Now(), cost) })
					}
				}
			}
		}
		var sum, minute, most int64
		for i, tokens := range spent {
			if minute += tokens; i >= 600 {
				minute -= spent[i-600]
			}
			sum, most = sum+tokens, max(most, minute)
		}
		t.Logf("%s: at most %.1f %% of the limit in a minute, %.1f %% on average", name, 100*float64(most)/limit, 100*float64(sum)/limit/(float64(len(spent))/600))
	}
	run("connected, from idle", 10*time.Minute)
	s.kill()
	run("Redis is down", 5*time.Minute)
	s.start()
	run("connected again", time.Minute)
}
