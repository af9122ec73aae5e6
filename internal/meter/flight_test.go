package meter

import (
	"math/rand/v2"
	"testing"
	"time"
)

// all admits as many of a number of requests as the caller may have at a time, and returns their reservations.
func all(c *Caller, now time.Time, number int, e Estimate) (open []Reservation) {
	for range number {
		if r, refusal := c.Admit(now, e); refusal == nil {
			open = append(open, r)
		}
	}
	return open
}

func TestParallelRequestsUseAtMostTwiceALimit(t *testing.T) {
	for name, e := range map[string]Estimate{
		"declared":           {Prompt: 10, Output: 4096},
		"undeclared":         {Prompt: 10, Output: Undeclared},
		"undeclared, twelve": {Prompt: 10, Output: Undeclared, Replies: 12},
	} {
		for _, limit := range []string{"tokens 10k/minute", "tokens 10k/day"} {
			for _, usual := range []int64{1, 4096} {
				c := caller(t, limit, "tokens 1M/month")
				admitted(t, c, noon, Estimate{Prompt: 10, Output: usual}).end(noon, Cost{Requests: 1, Prompt: 10, Output: usual, Counted: true})
				for range 39 {
					if r, refusal := c.Admit(noon, Estimate{Prompt: 10, Output: 1}); refusal == nil {
						r.Settle(noon, Cost{Requests: 1, Prompt: 10, Output: 1, Counted: true})
					}
				}
				open := all(c, noon, 300, e)
				if len(open) == 0 {
					t.Fatalf("%s, %s: nothing is admitted", name, limit)
				}
				each := max(e.Output, 1024*max(1, e.Replies))
				for _, r := range open {
					r.Settle(noon, Cost{Requests: 1, Prompt: 10, Output: each, Counted: true})
				}
				if got, most := c.Snapshot(noon).Today, 20_000+10+each; len(open) > 1 && got > 20_000 || got > most {
					t.Errorf("%s, %s: %d requests used %d tokens", name, limit, len(open), got)
				}
			}
		}
	}
}

// A discount that was learned still lets most of a limit be used at a time.
func TestRequestsThatDeclareMoreThanTheyUseAreAdmittedByTheirEstimate(t *testing.T) {
	c := caller(t, "tokens 10k/minute")
	for range 20 {
		admitted(t, c, noon, Estimate{Prompt: 10, Output: 10}).end(noon, Cost{Requests: 1, Prompt: 10, Output: 10, Counted: true})
	}
	if got := len(all(c, noon, 300, Estimate{Prompt: 10, Output: 1000})); got != 19 { // of 20k - 400, each may use 1010
		t.Errorf("%d are admitted", got)
	}
}

func TestACallerWithoutRequestsInFlightIsAdmittedWhateverItDeclares(t *testing.T) {
	c := caller(t, "tokens 1000/minute")
	r := admitted(t, c, noon, Estimate{Prompt: 10, Output: 1 << 62})
	got := refused(t, c, noon, Estimate{Prompt: 10, Output: 1})
	if got.Reason != InFlight || got.Wait != time.Second || got.Allowed != 2000 || got.Requested != 11 || got.Used != mostDeclared+10 {
		t.Errorf("another one is refused with %+v", got)
	}
	if s := c.Snapshot(noon); s.Limits[0].Refused != 1 || s.Limits[0].Used != 266 {
		t.Errorf("the limit is %+v", s.Limits[0])
	}
	r.settle(noon)
	admitted(t, c, noon, Estimate{Prompt: 10, Output: 1})
}

func TestARequestThatDeclaresNothingCountsAsTheLargestRecentOutputOfItsModel(t *testing.T) {
	c := caller(t, "tokens 100k/minute")
	for _, model := range []string{"long", "short"} {
		output := map[string]int64{"long": 30_000, "short": 2000}[model]
		admitted(t, c, noon, Estimate{Prompt: 1, Output: 1}).end(noon, Cost{Requests: 1, Prompt: 1, Output: output, Counted: true, Model: model})
	}
	now := noon.Add(5 * time.Minute)
	for model, want := range map[string]int64{"long": 30_000, "short": 2000, "new": 1024} {
		r := admitted(t, c, now, Estimate{Prompt: 1, Output: Undeclared, Model: model})
		if got := r.declared; got != want {
			t.Errorf("%s counts as %d", model, got)
		}
		r.settle(now)
	}
	for range 2 * memory { // then the long one is not recent
		admitted(t, c, now, Estimate{Prompt: 1, Output: 1}).end(now, Cost{Requests: 1, Prompt: 1, Output: 10, Counted: true, Model: "long"})
		now = now.Add(time.Minute)
	}
	if got := admitted(t, c, now, Estimate{Prompt: 1, Output: Undeclared, Model: "long"}).declared; got != 1024 {
		t.Errorf("the model's largest recent output is %d", got)
	}
	for i := range 10_000 {
		admitted(t, c, now, Estimate{Prompt: 1, Output: 1}).end(now, Cost{Requests: 1, Prompt: 1, Output: 9, Counted: true, Model: string(rune('a' + i))})
		now = now.Add(time.Minute)
	}
	if got := len(c.usual.largest); got > maxModels+1 {
		t.Errorf("%d models are kept", got)
	}
}

func TestARequestOverALimitThatOthersInFlightMayUseGetsTheNextTier(t *testing.T) {
	c := callerWith(nil)
	l := limits(t, "tokens 1000/day")
	l[0].Then = "nightly"
	c.Change(noon, Settings{Limits: l, Tiers: []string{"nightly"}})
	for i, want := range []int{0, 1, 1} {
		if r := admitted(t, c, noon, Estimate{Prompt: 10, Output: 5000}); r.Tier() != want {
			t.Errorf("request %d has the tier %d, want %d", i, r.Tier(), want)
		}
	}
}

func TestAStreamIsChargedAsItsEventsArrive(t *testing.T) {
	c := caller(t, "tokens 1000/minute", "tokens 10k/day", "requests 10/day")
	r := admitted(t, c, noon, Estimate{Prompt: 100, Output: 5000}) // charged with 356
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
	if s := c.Snapshot(now); s.Reserved != 900 || c.unspent != 4200 {
		t.Errorf("%d are reserved, and %d may follow", s.Reserved, c.unspent)
	}
	r.Settle(now, Cost{Requests: 1, Prompt: 100, Output: 780, Counted: true})
	r.Spend(now, 2000)
	if minute, day := used(t, c, now, "tokens/minute"), used(t, c, now, "tokens/day"); minute != 800-256 || day != 880 {
		t.Errorf("at the end %d are used of the minute, and %d of the day", minute, day) // the rest was the first minute's
	}
	if got := used(t, c, now, "requests/day"); got != 1 {
		t.Errorf("%d requests are used", got)
	}
	if s := c.Snapshot(now); s.Reserved != 0 || c.unspent != 0 || s.InFlight != 0 {
		t.Errorf("at the end %+v, %d may follow", s, c.unspent)
	}
}

// In any order, what was spent adds up to what the requests have cost, and what may follow to nothing.
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
				if r, refusal := c.Admit(now, Estimate{Prompt: 1 + random.Int64N(100), Output: declared}); refusal == nil {
					open = append(open, request{r, declared, 0})
				}
			}
			if len(open) > 0 {
				i := random.IntN(len(open))
				o := &open[i]
				if o.seen += random.Int64N(1 + o.most - o.seen); random.IntN(3) > 0 {
					o.Spend(now, o.seen)
				} else {
					o.Settle(now, Cost{Requests: 1, Prompt: o.prompt, Output: o.seen, Counted: true})
					total += o.prompt + o.seen
					open = append(open[:i], open[i+1:]...)
				}
			}
			now = now.Add(time.Duration(random.Int64N(int64(5 * time.Second))))
			addUp(t, c)
		}
		if s := c.Snapshot(now); s.Month != total || s.Reserved != 0 || c.unspent != 0 {
			t.Fatalf("seed %d: %+v, want %d tokens; %d may follow", seed, s, total, c.unspent)
		}
	}
}

// end ends a request that has cost so much.
func (r Reservation) end(now time.Time, cost Cost) { r.Settle(now, cost) }
