package limits

import (
	"maps"
	"math"
	"net/http"
	"slices"
	"testing"
	"time"
)

var start = time.Date(2026, 10, 21, 7, 28, 0, 0, time.UTC)

// step is one request at a time after the start, and what becomes of it.
type step struct {
	at   time.Duration
	cost Cost
	want Refusal // zero: admitted
}

func TestALimitRefusesWhatIsTooMuchAndSaysForHowLong(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	one := Cost{Prompt: 1}
	for name, tc := range map[string]struct {
		rules Rules
		steps []step
	}{
		"no limit admits anything": {
			steps: []step{{cost: Cost{1e9, 1e9}}, {cost: Cost{1e9, 1e9}}},
		},
		"180 a minute are 30 in 10 seconds": {
			rules: Rules{RequestsPerMinute: 180},
			steps: append(repeat(30, step{cost: one}),
				step{at: 3 * s, cost: one, want: Refusal{Limit: Requests, Wait: 7 * s}},
				step{at: 10 * s, cost: one}),
		},
		"a window opens with the first use after the last one closed": {
			rules: Rules{RequestsPerMinute: 6},
			steps: []step{
				{at: 0, cost: one},
				{at: 25 * s, cost: one},
				{at: 26 * s, cost: one, want: Refusal{Limit: Requests, Wait: 9 * s}},
				{at: 35 * s, cost: one},
			},
		},
		"a request limit is never rounded down to none": {
			rules: Rules{RequestsPerMinute: 1},
			steps: []step{{cost: one}, {cost: one, want: Refusal{Limit: Requests, Wait: 10 * s}}, {at: 10 * s, cost: one}},
		},
		"tokens are the prompt and what may be generated": {
			rules: Rules{TokensPerMinute: 1000},
			steps: []step{
				{cost: Cost{250, 250}},
				{at: 10 * s, cost: Cost{250, 251}, want: Refusal{Limit: Tokens, Wait: 50 * s}},
				{at: 10 * s, cost: Cost{250, 250}},
				{at: 20 * s, cost: one, want: Refusal{Limit: Tokens, Wait: 40 * s}},
				{at: 60 * s, cost: Cost{1000, 0}},
			},
		},
		"a request above the whole limit is refused in every window": {
			rules: Rules{TokensPerMinute: 1000},
			steps: []step{
				{cost: Cost{1001, 0}, want: Refusal{Limit: Tokens, Wait: 60 * s}},
				{at: 60 * s, cost: Cost{1001, 0}, want: Refusal{Limit: Tokens, Wait: 60 * s}},
			},
		},
		"what the token limit refuses counts as a request": {
			rules: Rules{RequestsPerMinute: 12, TokensPerMinute: 10},
			steps: []step{
				{cost: Cost{11, 0}, want: Refusal{Limit: Tokens, Wait: 60 * s}},
				{at: s, cost: Cost{11, 0}, want: Refusal{Limit: Tokens, Wait: 59 * s}},
				{at: 2 * s, cost: one, want: Refusal{Limit: Requests, Wait: 8 * s}},
			},
		},
		"what the request limit refuses takes no tokens": {
			rules: Rules{RequestsPerMinute: 6, TokensPerMinute: 10},
			steps: []step{
				{cost: Cost{5, 0}},
				{at: s, cost: Cost{5, 0}, want: Refusal{Limit: Requests, Wait: 9 * s}},
				{at: 10 * s, cost: Cost{5, 0}},
			},
		},
		// 60 PTU of 1000 TPM: 1000 tokens/s; 2 s of them fit in the bucket.
		"a bucket that is not full takes any request, a full one none": {
			rules: Rules{Drain: 1000, Capacity: 2000},
			steps: []step{
				{cost: Cost{1999, 0}},
				{cost: Cost{2000, 200}}, // up to 4799
				{cost: one, want: Refusal{Limit: PTU, Wait: 2800 * ms}},
				{at: 2799 * ms, cost: one, want: Refusal{Limit: PTU, Wait: 1 * ms}},
				{at: 2800 * ms, cost: one},
			},
		},
		"a bucket filled to the brim says one millisecond": {
			rules: Rules{Drain: 1000, Capacity: 2000},
			steps: []step{
				{cost: Cost{2000, 0}},
				{cost: one, want: Refusal{Limit: PTU, Wait: ms}},
				{at: ms, cost: one},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := &Limiter{Rules: tc.rules}
			for i, s := range tc.steps {
				got, ok := l.Admit(start.Add(s.at), s.cost)
				if got != s.want || ok != (s.want == Refusal{}) {
					t.Errorf("request %d at %s: got %+v, want %+v", i, s.at, got, s.want)
				}
			}
		})
	}
}

func repeat(n int, s step) []step {
	steps := make([]step, n)
	for i := range steps {
		steps[i] = s
	}
	return steps
}

// 50 PTU of gpt-4.1 work off 2500 input tokens a second, so requests of 2000 in
// and 200 out come to 53 a minute.
func TestAProvisionedDeploymentSustainsItsRate(t *testing.T) {
	l := &Limiter{Rules: Rules{Drain: 2500, Capacity: 25000}}
	c := Cost{Prompt: 2000, Output: 200}
	l.level = l.Capacity
	l.drained = start
	admitted := 0
	for now := start; now.Before(start.Add(10 * time.Minute)); {
		refused, ok := l.Admit(now, c)
		if ok {
			admitted++
		}
		now = now.Add(refused.Wait)
	}
	if admitted < 534 || admitted > 537 {
		t.Errorf("admitted %d in 10 minutes, want about 535", admitted)
	}
}

func TestSettlingTradesTheEstimateForWhatWasGenerated(t *testing.T) {
	for name, tc := range map[string]struct {
		produced  int64
		wantLevel float64
	}{
		"as estimated":    {100, 500},
		"nothing":         {0, 100},
		"less":            {40, 260},
		"more":            {150, 700},
		"never below nil": {-100, 0},
	} {
		t.Run(name, func(t *testing.T) {
			l := &Limiter{Rules: Rules{Drain: 1, Capacity: 1000}}
			c := Cost{Prompt: 100, Output: 100}
			l.Admit(start, c)
			l.Settle(start, c, tc.produced)
			if l.level != tc.wantLevel {
				t.Errorf("got level %v, want %v", l.level, tc.wantLevel)
			}
			if got, want := l.Utilization(start), tc.wantLevel/10; got != want {
				t.Errorf("got utilization %v, want %v", got, want)
			}
		})
	}
}

func TestSettlingGivesPayAsYouGoTokensNeverBack(t *testing.T) {
	l := &Limiter{Rules: Rules{TokensPerMinute: 100}}
	c := Cost{Prompt: 10, Output: 80}
	l.Admit(start, c)
	l.Settle(start, c, 1)
	hdr := make(http.Header)
	l.SetHeaders(hdr, start)
	if got := hdr.Get("x-ratelimit-remaining-tokens"); got != "10" {
		t.Errorf("got %s tokens left, want 10", got)
	}
}

func TestMetersNeverFallBelowZero(t *testing.T) {
	l := &Limiter{Rules: Rules{RequestsPerMinute: 6}}
	for range 5 {
		l.Admit(start, Cost{})
	}
	got := make(http.Header)
	l.SetHeaders(got, start.Add(4*time.Second))
	want := http.Header{
		"X-Ratelimit-Limit-Requests": {"6"}, "X-Ratelimit-Remaining-Requests": {"0"}, "X-Ratelimit-Reset-Requests": {"6"},
	}
	if !maps.EqualFunc(got, want, slices.Equal) {
		t.Errorf("got %v, want %v and nothing of a limit that is not set", got, want)
	}
}

func TestARequestIsEarlyUntilThePromisedTime(t *testing.T) {
	l := &Limiter{}
	if l.Early(start) {
		t.Error("early without a promise")
	}
	l.Promise(start, 7*time.Second)
	l.Promise(start.Add(time.Second), time.Second) // a shorter one takes nothing back
	for at, want := range map[time.Duration]bool{
		-1:                false, // under way before the 429
		0:                 true,
		7*time.Second - 1: true,
		7 * time.Second:   false,
	} {
		if got := l.Early(start.Add(at)); got != want {
			t.Errorf("arrived %s after the 429: got %t, want %t", at, got, want)
		}
	}
	l.Promise(start.Add(8*time.Second), time.Second)
	if l.Early(start.Add(5 * time.Second)) {
		t.Error("a promise holds for requests from before it")
	}
}

func TestARequestThatMayHaveBeenUnderWayIsNotEarly(t *testing.T) {
	l := &Limiter{Rules: Rules{Grace: 10 * time.Millisecond}}
	l.Promise(start, 7*time.Second)
	l.Promise(start.Add(time.Second), 6*time.Second) // a client that is refused again has heard of the first
	for at, want := range map[time.Duration]bool{
		10*time.Millisecond - 1:             false,
		10 * time.Millisecond:               true,
		time.Second + 5*time.Millisecond:    true,
		7*time.Second - 10*time.Millisecond: true,
		7 * time.Second:                     false,
	} {
		if got := l.Early(start.Add(at)); got != want {
			t.Errorf("arrived %s after the 429: got %t, want %t", at, got, want)
		}
	}
}

func TestAWaitForTheLargestRequestDoesNotOverflow(t *testing.T) {
	l := &Limiter{Rules: Rules{Drain: 2500. / 60, Capacity: 1}}    // one unit
	if _, ok := l.Admit(start, Cost{Output: math.MaxInt32}); !ok { // the most that a request may cost
		t.Error("an empty bucket refused a request")
	}
	refused, ok := l.Admit(start, Cost{Prompt: 1})
	if ok || refused.Wait < 6*365*24*time.Hour {
		t.Errorf("got %+v, want a wait of years", refused)
	}
	if l.Settle(start, Cost{Output: math.MaxInt32}, 16); l.level != 16*outputWeight {
		t.Errorf("the level is %g after the settlement", l.level)
	}
}

func TestATokenLimitAsHighAsItGetsDoesNotOverflow(t *testing.T) {
	l := &Limiter{Rules: Rules{TokensPerMinute: math.MaxInt64}}
	l.tokens = window{end: start.Add(time.Minute), used: math.MaxInt64 - 5}
	if got, ok := l.Admit(start, Cost{Prompt: 6}); ok || got != (Refusal{Limit: Tokens, Wait: time.Minute}) {
		t.Errorf("got %+v, %t", got, ok)
	}
	if _, ok := l.Admit(start, Cost{Prompt: 5}); !ok {
		t.Error("what is left was refused")
	}
}
