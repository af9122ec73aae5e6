package limiter

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// all admits as many of a number of requests as the caller may have at a time,
// and returns their reservations.
func all(c *Limiter, now time.Time, number int, e ratelimit.Estimate) (open []Reservation) {
	for range number {
		if r, refusal := c.admit(now, e); refusal == nil {
			open = append(open, r)
		}
	}
	return open
}

// An attack: short answers make the estimates low, and then come 200 requests
// for long ones, all at once. They are alike if the requests declare the
// output, or nothing.
func TestParallelRequestsAfterShortAnswersUseAtMost110PercentOfALimit(t *testing.T) {
	worst := 0.0
	for _, e := range []ratelimit.Estimate{{Prompt: 10, Output: 16_000}, {Prompt: 10, Output: ratelimit.Undeclared}, {Prompt: 10, Output: ratelimit.Undeclared, Replies: 8}} {
		for _, limit := range []int64{20_000, 50_000, 60_000, 200_000} {
			for _, short := range []int64{1, 10, 50} {
				c := callerWith(nil)
				c.Change(noon, Settings{Limits: []ratelimit.Limit{{Kind: ratelimit.Tokens, Amount: limit, Unit: ratelimit.Minute}}})
				for range 34 {
					admitted(t, c, noon, ratelimit.Estimate{Prompt: 10, Output: short}).end(noon, ratelimit.Cost{Requests: 1, Prompt: 10, Output: short, Counted: true})
				}
				open := all(c, noon, 200, e)
				for _, r := range open {
					r.Settle(noon, ratelimit.Cost{Requests: 1, Prompt: 10, Output: 16_000 * max(1, e.Replies), Counted: true})
				}
				if len(open) == 0 {
					t.Fatal("nothing is admitted")
				}
				part := float64(c.Snapshot(noon).Today) / float64(limit)
				if worst = max(worst, part); len(open) > 1 && part > 1.1 {
					t.Errorf("%+v, short answers of %d: %d requests used %.0f %% of %d", e, short, len(open), 100*part, limit)
				}
			}
		}
	}
}

// Callers whose answers are alike are hardly held back, at any length of these:
// 200 clients chat, and come back when they are told to. No matter what other
// callers get, or what was declared.
func TestParallelChatsUseMostOfALimit(t *testing.T) {
	for _, output := range []int64{ratelimit.Undeclared, 4096, 32_000} {
		for _, lasts := range []time.Duration{50 * time.Millisecond, time.Second, 5 * time.Second} {
			cs := NewLimiters(nil)
			cs.Configure(noon, func(string) Settings { return Settings{Limits: limits(t, "tokens 100k/minute")} })
			other := cs.Get(noon, "bob")
			admitted(t, other, noon, ratelimit.Estimate{Prompt: 10, Output: ratelimit.Undeclared, Model: "m"}).end(noon, ratelimit.Cost{Requests: 1, Prompt: 10, Output: 100_000, Counted: true, Model: "m"})
			c := cs.Get(noon, "alice")
			type client struct {
				Reservation
				next time.Time
			}
			clients := make([]client, 200)
			for i := range clients {
				clients[i].next = noon
			}
			used := make(map[int64]int64)
			for now := noon; now.Before(noon.Add(3 * time.Minute)); now = now.Add(10 * time.Millisecond) {
				for i := range clients {
					if now.Before(clients[i].next) {
						continue
					}
					if clients[i].Open() {
						clients[i].Settle(now, ratelimit.Cost{Requests: 1, Prompt: 20, Output: 480, Counted: true, Model: "m"})
						used[int64(now.Sub(noon)/time.Minute)] += 500
					}
					var refusal *ratelimit.Refusal
					clients[i].Reservation, refusal = c.Try(now, ratelimit.Estimate{Prompt: 20, Output: output, Model: "m"})
					if clients[i].next = now.Add(lasts); refusal != nil {
						clients[i].next = now.Add(max(time.Second, min(refusal.Wait, 59*time.Second)))
					}
				}
			}
			t.Logf("declared %d, answers after %s: %v", output, lasts, used)
			for minute, n := range used {
				learned := output != 32_000 || minute > 0 // declared so much, it takes longer until that is not believed
				if learned && n < 80_000 || n > 110_000 {
					t.Errorf("declared %d, %s: %d tokens are used in minute %d", output, lasts, n, minute)
				}
			}
		}
	}
}

func TestACallerWithoutRequestsInFlightIsAdmittedWhateverItDeclares(t *testing.T) {
	c := caller(t, "tokens 1000/minute")
	r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 10, Output: 1 << 62})
	got := refused(t, c, noon, ratelimit.Estimate{Prompt: 10, Output: 1})
	if got.Reason != ratelimit.InFlight || got.Wait != time.Second || got.Allowed != 1000 || got.Requested != 11 || got.Used != 1000 {
		t.Errorf("another one is refused with %+v", got)
	}
	if s := c.Snapshot(noon); s.Limits[0].Refused != 1 || s.Limits[0].Used != 266 {
		t.Errorf("the limit is %+v", s.Limits[0])
	}
	r.settle(noon)
	admitted(t, c, noon, ratelimit.Estimate{Prompt: 10, Output: 1})
}

func TestARequestThatDeclaresNothingCountsAsTheLargestOutputOfItsModel(t *testing.T) {
	most := func(c *Limiter, now time.Time, model string, replies int64) int64 {
		r := admitted(t, c, now, ratelimit.Estimate{Prompt: 1, Output: ratelimit.Undeclared, Model: model, Replies: replies})
		defer r.end(now, ratelimit.Cost{})
		return r.most[ratelimit.Day]
	}
	c, now := caller(t, "tokens 1G/day"), noon
	for model, output := range map[string]int64{"long": 100_000, "short": 2000} {
		o := c.usual.of(model, now.UnixNano())
		o.atLeast(output, 1)
		for range 10_000_000 { // enough to be sure
			o.vouch(output)
		}
	}
	for model, want := range map[string]int64{"long": 100_000, "short": 2000, "new": mostOutput} {
		if got := most(c, now, model, 1); got != want {
			t.Errorf("%s counts as %d", model, got)
		}
	}
	if got := most(c, now, "new", 3); got != 3*mostOutput {
		t.Errorf("three replies count as %d", got)
	}
	if got := most(c, now, "short", 3); got != 6000 {
		t.Errorf("three short replies count as %d", got)
	}
	for range 23 { // a day is long enough for any pattern of short answers
		now = now.Add(time.Hour)
		admitted(t, c, now, ratelimit.Estimate{Prompt: 1, Output: 1}).end(now, ratelimit.Cost{Requests: 1, Prompt: 1, Output: 10, Counted: true, Model: "long"})
	}
	if got := most(c, now, "long", 1); got != 100_000 {
		t.Errorf("after a day, the largest output is %d", got)
	}
	if got := most(c, now.Add(48*time.Hour), "long", 1); got != mostOutput {
		t.Errorf("after days, the largest output is %d", got)
	}
	for i := range 10_000 {
		admitted(t, c, now, ratelimit.Estimate{Prompt: 1, Output: 1}).end(now, ratelimit.Cost{Requests: 1, Prompt: 1, Output: 9, Counted: true, Model: string(rune('a' + i))})
		now = now.Add(time.Minute)
	}
	if got := len(c.usual.byModel); got > maxModels+1 {
		t.Errorf("%d models are kept", got)
	}
}

func TestARequestOverALimitThatOthersInFlightMayUseGetsTheNextTier(t *testing.T) {
	c := callerWith(nil)
	l := limits(t, "tokens 1000/day")
	l[0].Then = "nightly"
	c.Change(noon, Settings{Limits: l, Tiers: []string{"nightly"}})
	for i, want := range []int{0, 1, 1} {
		if r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 10, Output: 5000}); r.Tier() != want {
			t.Errorf("request %d has the tier %d, want %d", i, r.Tier(), want)
		}
	}
}

func TestAStreamIsChargedAsItsEventsArrive(t *testing.T) {
	c := caller(t, "tokens 1000/minute", "tokens 10k/day", "requests 10/day")
	r := admitted(t, c, noon, ratelimit.Estimate{Prompt: 100, Output: 5000}) // charged with 356
	r.Spend(noon, 200)
	if got := used(t, c, noon, "tokens/minute"); got != 356 {
		t.Errorf("%d are used after less than the estimate", got)
	}
	r.Spend(noon.Add(3*time.Minute), 800)
	r.Spend(noon.Add(3*time.Minute), 700)
	now := noon.Add(3 * time.Minute)
	if minute, day := used(t, c, now, "tokens/minute"), used(t, c, now, "tokens/day"); minute != 800-256 || day != 900 {
		t.Errorf("%d are used of the minute, and %d of the day", minute, day)
	}
	if s := c.Snapshot(now); s.Reserved != 900 || c.unspent[ratelimit.Day] != 4200 {
		t.Errorf("%d are reserved, and %d may follow", s.Reserved, c.unspent[ratelimit.Day])
	}
	r.Settle(now, ratelimit.Cost{Requests: 1, Prompt: 100, Output: 780, Counted: true})
	r.Spend(now, 2000)
	if minute, day := used(t, c, now, "tokens/minute"), used(t, c, now, "tokens/day"); minute != 800-256 || day != 880 {
		t.Errorf("at the end %d are used of the minute, and %d of the day", minute, day) // the rest was the first minute's
	}
	if got := used(t, c, now, "requests/day"); got != 1 {
		t.Errorf("%d requests are used", got)
	}
	if s := c.Snapshot(now); s.Reserved != 0 || c.unspent != [ratelimit.Units]int64{} || s.InFlight != 0 {
		t.Errorf("at the end %+v, %d may follow", s, c.unspent)
	}
}

// In any order, what was spent adds up to what the requests have cost, and what
// may follow to nothing.
func TestWhatMayFollowEndsWithTheRequests(t *testing.T) {
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 9))
		c, now, total := caller(t, "tokens 20k/minute", "tokens 1G/month"), noon, int64(0)
		type request struct {
			Reservation
			most, seen int64
		}
		var open []request
		for len(open) > 0 || random.IntN(500) > 0 {
			if random.IntN(3) == 0 {
				declared := random.Int64N(4000)
				if r, refusal := c.admit(now, ratelimit.Estimate{Prompt: 1 + random.Int64N(100), Output: declared}); refusal == nil {
					open = append(open, request{r, declared, 0})
				}
			}
			if len(open) > 0 {
				i := random.IntN(len(open))
				o := &open[i]
				if o.seen += random.Int64N(1 + o.most - o.seen); random.IntN(3) > 0 {
					o.Spend(now, o.seen)
				} else {
					o.Settle(now, ratelimit.Cost{Requests: 1, Prompt: o.prompt, Output: o.seen, Counted: true})
					total += o.prompt + o.seen
					open = append(open[:i], open[i+1:]...)
				}
			}
			now = now.Add(time.Duration(random.Int64N(int64(5 * time.Second))))
			addUp(t, c)
		}
		if s := c.Snapshot(now); s.Month != total || s.Reserved != 0 || c.unspent != [ratelimit.Units]int64{} {
			t.Fatalf("seed %d: %+v, want %d tokens; %d may follow", seed, s, total, c.unspent)
		}
	}
}

// end ends a request that has cost so much.
func (r Reservation) end(now time.Time, cost ratelimit.Cost) { r.Settle(now, cost) }
