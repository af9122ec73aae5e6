package callers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
)

// otherReplica is what alice uses at another replica, as if that were in
// another process.
type otherReplica struct{ alice *limiter.Limiter }

// anotherReplica starts one whose callers have a limit of tokens, perhaps for
// one model.
func anotherReplica(t *testing.T, hub, pool, tokens string) otherReplica {
	t.Helper()
	tokens, model, _ := strings.Cut(tokens, " ")
	limit, err := ratelimit.ParseLimit(ratelimit.Tokens, tokens)
	if err != nil {
		t.Fatal(err)
	}
	limit.Model = model
	callers := limiter.NewLimiters(nil)
	callers.Configure(time.Now(), func(string) limiter.Settings { return limiter.Settings{Limits: []ratelimit.Limit{limit}} })
	r := replicas.New(lbtest.HubOf(hub).Store(), zap.NewNop())
	r.NewLink().ShareUse(pool, callers)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return otherReplica{callers.Get(time.Now(), "alice")}
}

// spend uses tokens.
func (r otherReplica) spend(tokens int64) {
	a, _ := r.alice.Try(time.Now(), ratelimit.Estimate{Prompt: 1, Model: "gpt-4o"})
	a.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: tokens})
}

// wantUsed checks how much of the limit the replica takes for used.
func (r otherReplica) wantUsed(t *testing.T, want int64) {
	t.Helper()
	if got := r.alice.Snapshot(time.Now()).Limits[0].Used; got != want {
		t.Errorf("to the other replica, alice has used %d tokens, want %d", got, want)
	}
}

// flush is within which time replicas hear of what a caller has used that is
// above half of a limit, and late is that of a caller below.
const flush, late = 250 * time.Millisecond, 2 * time.Second

// pass waits until a time has passed, and what is due then is done.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestWhatACallerUsesAtOneReplicaCountsAtAnotherWithinAFlush(t *testing.T) {
	hub := lbtest.Unique("hub")
	inBubble(t, "caller alice {\ntokens 1000/hour\n}\nstate hub "+hub, func(t *testing.T, w *world) {
		lbtest.Connect(t, hub)
		other := anotherReplica(t, hub, w.Handler.Pool, "1000/hour")
		time.Sleep(3 * time.Second) // they know each other
		w.AllReply(used(20, 580))
		w.chat(prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
		pass(late)
		other.wantUsed(t, 600)

		other.spend(150)
		pass(flush)
		w.AllReply(used(100, 50))
		got := w.chat(prompt(100, `"max_tokens":50,`))
		got.WantServed(t, "a")
		wantHeaders(t, got, "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "100")
		pass(flush)
		other.wantUsed(t, 900)

		other.spend(100)
		pass(flush)
		w.chat(prompt(100, `"max_tokens":50,`)).WantError(t, 429, "rate_limit_exceeded")
		w.WantCalls(map[string]int{"a": 2})
	})
}

// TestAScrapeNamesNoCallersOfOtherReplicas because there are only so many
// labels, which callers get for good.
func TestAScrapeNamesNoCallersOfOtherReplicas(t *testing.T) {
	hub := lbtest.Unique("hub")
	inBubble(t, "caller alice {\ntokens 1000/hour\n}\nstate hub "+hub, func(t *testing.T, w *world) {
		lbtest.Connect(t, hub)
		other := anotherReplica(t, hub, w.Handler.Pool, "1000/hour")
		time.Sleep(3 * time.Second) // they know each other
		other.spend(500)
		pass(late)
		lbtest.WantSums(t, w.Handler.Pool, "caller_limit_used_ratio 0")
		w.AllReply(used(20, 80))
		w.chat(prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
		lbtest.WantSums(t, w.Handler.Pool, "caller_limit_used_ratio caller=alice 0.6")
	})
}

// TestRequestsAtAnotherReplicaCountAsThoseAtATime with the numbers of both in
// the error.
func TestRequestsAtAnotherReplicaCountAsThoseAtATime(t *testing.T) {
	hub := lbtest.Unique("hub")
	inBubble(t, "caller alice {\nmax_requests 3\n}\nstate hub "+hub, func(t *testing.T, w *world) {
		lbtest.Connect(t, hub)
		other := anotherReplica(t, hub, w.Handler.Pool, "1G/day")
		other.alice.Change(time.Now(), limiter.Settings{MaxRequests: 3})
		time.Sleep(3 * time.Second) // they know each other
		var there []limiter.Reservation
		for range 3 { // this waits until the others know of it
			r, refusal := other.alice.Admit(time.Now(), ratelimit.Estimate{Prompt: 1})
			if refusal != nil {
				t.Fatalf("got %+v", refusal)
			}
			there = append(there, r)
		}
		pass(late)
		w.AllReply(used(1, 1))
		got := w.chat(`{}`)
		wantRefused(t, got, "rate_limit_exceeded", "requests", "Rate limit reached for alice on requests in progress: Limit 3, Used 3. Please try again in 1s.")
		wantHeaders(t, got, "Retry-After", "1")
		there[0].Settle(time.Now(), ratelimit.Cost{})
		pass(2 * late)
		w.chat(`{}`).WantServed(t, "a")
		for _, r := range there[1:] {
			r.Settle(time.Now(), ratelimit.Cost{})
		}
	})
}

// TestARestartWhileTheStoreIsDownGivesNobodyALimitAgain has each limit used up
// in a store that is then gone, at this replica and at another one.
func TestARestartWhileTheStoreIsDownGivesNobodyALimitAgain(t *testing.T) {
	for _, limit := range []string{"500/minute", "500/hour", "500/day", "500/month"} {
		s, hub := newSite(t), lbtest.Unique("hub")
		options := block("caller alice { tokens "+limit+" }") + "\nstate hub " + hub
		lbtest.Run(t, s.config(options))
		lbtest.Connect(t, hub)
		s.ask(t, options).WantStatus(t, 200)
		anotherReplica(t, hub, s.pool, limit).spend(200)
		lbtest.WaitFor(t, func() bool { return usedToday(s.pool) == 300 })
		lbtest.HubOf(hub).Fail(errors.New("down"))
		served := 0
		for range 3 {
			if err := caddy.Stop(); err != nil {
				t.Fatal(err)
			}
			lbtest.Reload(t, s.config(options))
			for range 3 {
				if s.ask(t, options).Status == 200 {
					served++
				}
			}
		}
		if served > 2 {
			t.Errorf("%s: after restarts %d requests of 100 tokens are served, of 300 used before", limit, served)
		}
		if err := caddy.Stop(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestABalancerThatStartsWhileTheStoreIsDownUsesItsShare(t *testing.T) {
	hub := lbtest.Unique("hub")
	lbtest.HubOf(hub).Fail(errors.New("down"))
	storage, key := lbtest.Context(t).Storage(), "openai_lb/replicas_hub"
	if err := storage.Store(t.Context(), key, []byte("4")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { storage.Delete(context.Background(), key) })
	inBubble(t, "caller alice {\ntokens 1000/hour\n}\nstate hub "+hub, func(t *testing.T, w *world) {
		lbtest.Connect(t, hub)
		pass(4 * time.Second)
		w.AllReply(used(20, 180))
		got := w.chat(prompt(20, `"max_tokens":1,`))
		got.WantServed(t, "a")
		wantHeaders(t, got, "X-Ratelimit-Limit-Tokens", "250")
		w.chat(prompt(60, `"max_tokens":1,`)).WantError(t, 429, "rate_limit_exceeded")
	})
}

// TestEachReplicaLogsAResetThatItHears from another one, or from whoever can
// write to the store.
func TestEachReplicaLogsAResetThatItHears(t *testing.T) {
	for _, limits := range []string{"tokens 1000/day", "tokens 1000/day gpt-4o"} {
		hub := lbtest.Unique("hub")
		inBubble(t, "caller alice {\n"+limits+"\n}\nstate hub "+hub, func(t *testing.T, w *world) {
			lbtest.Connect(t, hub)
			other := anotherReplica(t, hub, w.Handler.Pool, strings.TrimPrefix(limits, "tokens "))
			time.Sleep(3 * time.Second) // they know each other
			other.alice.Reset(time.Now())
			pass(late)
			if logged := w.Logged("caller reset"); len(logged) != 0 {
				t.Errorf("a reset that took nothing away from here is logged: %v", logged)
			}
			w.AllReply(used(20, 80))
			for i := range 4 {
				w.chat(prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
				for range 3 {
					other.alice.Reset(time.Now())
					pass(late)
				}
				w.wantUse(t, 0)
				logged := w.Logged("caller reset")
				if len(logged) != i+1 || fmt.Sprint(logged[i].ContextMap()) != "map[caller:alice elsewhere:true pool:"+w.Handler.Pool+"]" {
					t.Fatalf("%s: logged is %v", limits, logged)
				}
				time.Sleep(time.Minute)
			}
		})
	}
}
