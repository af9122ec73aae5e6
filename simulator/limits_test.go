package simulator

import (
	"math"
	"testing"
	"time"
)

var start = time.Date(2026, 10, 21, 7, 28, 0, 0, time.UTC)

// step is one request at a time after the start, and what becomes of it.
type step struct {
	at   time.Duration
	cost cost
	want refusal // zero: admitted
}

func TestALimitRefusesWhatIsTooMuchAndSaysForHowLong(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	one := cost{prompt: 1}
	for name, tc := range map[string]struct {
		rules rules
		steps []step
	}{
		"no limit admits anything": {
			steps: []step{{cost: cost{1e9, 1e9}}, {cost: cost{1e9, 1e9}}},
		},
		"600 a minute are 10 in a second": {
			rules: rules{requestsPerMinute: 600, requestWindow: s},
			steps: append(repeat(10, step{at: 100 * ms, cost: one}),
				step{at: 400 * ms, cost: one, want: refusal{limit: limitRequests, wait: 700 * ms}},
				step{at: 1100*ms - 1, cost: one, want: refusal{limit: limitRequests, wait: 1}},
				step{at: 1100 * ms, cost: one}),
		},
		"180 a minute are 30 in 10 seconds": {
			rules: rules{requestsPerMinute: 180, requestWindow: 10 * s},
			steps: append(repeat(30, step{cost: one}),
				step{at: 3 * s, cost: one, want: refusal{limit: limitRequests, wait: 7 * s}},
				step{at: 10 * s, cost: one}),
		},
		"a window opens with the first use after the last one closed": {
			rules: rules{requestsPerMinute: 6, requestWindow: 10 * s},
			steps: []step{
				{at: 0, cost: one},
				{at: 25 * s, cost: one},
				{at: 26 * s, cost: one, want: refusal{limit: limitRequests, wait: 9 * s}},
				{at: 35 * s, cost: one},
			},
		},
		"a request limit is never rounded down to none": {
			rules: rules{requestsPerMinute: 1, requestWindow: s},
			steps: []step{{cost: one}, {cost: one, want: refusal{limit: limitRequests, wait: s}}, {at: s, cost: one}},
		},
		"tokens are the prompt and what may be generated": {
			rules: rules{tokensPerMinute: 1000},
			steps: []step{
				{cost: cost{250, 250}},
				{at: 10 * s, cost: cost{250, 251}, want: refusal{limit: limitTokens, wait: 50 * s}},
				{at: 10 * s, cost: cost{250, 250}},
				{at: 20 * s, cost: one, want: refusal{limit: limitTokens, wait: 40 * s}},
				{at: 60 * s, cost: cost{1000, 0}},
			},
		},
		"a request above the whole limit is refused in every window": {
			rules: rules{tokensPerMinute: 1000},
			steps: []step{
				{cost: cost{1001, 0}, want: refusal{limit: limitTokens, wait: 60 * s}},
				{at: 60 * s, cost: cost{1001, 0}, want: refusal{limit: limitTokens, wait: 60 * s}},
			},
		},
		"what the token limit refuses counts as a request": {
			rules: rules{requestsPerMinute: 12, requestWindow: 10 * s, tokensPerMinute: 10},
			steps: []step{
				{cost: cost{11, 0}, want: refusal{limit: limitTokens, wait: 60 * s}},
				{at: s, cost: cost{11, 0}, want: refusal{limit: limitTokens, wait: 59 * s}},
				{at: 2 * s, cost: one, want: refusal{limit: limitRequests, wait: 8 * s}},
			},
		},
		"what the request limit refuses takes no tokens": {
			rules: rules{requestsPerMinute: 6, requestWindow: 10 * s, tokensPerMinute: 10},
			steps: []step{
				{cost: cost{5, 0}},
				{at: s, cost: cost{5, 0}, want: refusal{limit: limitRequests, wait: 9 * s}},
				{at: 10 * s, cost: cost{5, 0}},
			},
		},
		// 60 PTU of 1000 TPM: 1000 tokens/s; 2 s of them fit in the bucket.
		"a bucket that is not full takes any request, a full one none": {
			rules: rules{drain: 1000, capacity: 2000, outputRatio: 4},
			steps: []step{
				{cost: cost{1999, 0}},
				{cost: cost{2000, 200}}, // up to 4799
				{cost: one, want: refusal{limit: limitPTU, wait: 2800 * ms}},
				{at: 2799 * ms, cost: one, want: refusal{limit: limitPTU, wait: 1 * ms}},
				{at: 2800 * ms, cost: one},
			},
		},
		"a bucket filled to the brim says one millisecond": {
			rules: rules{drain: 1000, capacity: 2000, outputRatio: 4},
			steps: []step{
				{cost: cost{2000, 0}},
				{cost: one, want: refusal{limit: limitPTU, wait: ms}},
				{at: ms, cost: one},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := &limiter{rules: tc.rules}
			for i, s := range tc.steps {
				got, ok := l.admit(start.Add(s.at), s.cost)
				if got != s.want || ok != (s.want == refusal{}) {
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
	l := &limiter{rules: rules{drain: 2500, capacity: 25000, outputRatio: 4}}
	c := cost{prompt: 2000, output: 200}
	l.level = l.capacity
	l.drained = start
	admitted := 0
	for now := start; now.Before(start.Add(10 * time.Minute)); {
		refused, ok := l.admit(now, c)
		if ok {
			admitted++
		}
		now = now.Add(refused.wait)
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
			l := &limiter{rules: rules{drain: 1, capacity: 1000, outputRatio: 4}}
			c := cost{prompt: 100, output: 100}
			l.admit(start, c)
			l.settle(start, c, tc.produced)
			if l.level != tc.wantLevel {
				t.Errorf("got level %v, want %v", l.level, tc.wantLevel)
			}
			if got, want := l.utilization(start), tc.wantLevel/10; got != want {
				t.Errorf("got utilization %v, want %v", got, want)
			}
		})
	}
}

func TestSettlingGivesPayAsYouGoTokensNeverBack(t *testing.T) {
	l := &limiter{rules: rules{tokensPerMinute: 100}}
	c := cost{prompt: 10, output: 80}
	l.admit(start, c)
	l.settle(start, c, 1)
	if _, tokens := l.meters(start); tokens.remaining != 10 {
		t.Errorf("got %d tokens left, want 10", tokens.remaining)
	}
}

func TestMetersNeverFallBelowZero(t *testing.T) {
	l := &limiter{rules: rules{requestsPerMinute: 6, requestWindow: 10 * time.Second}}
	for range 5 {
		l.admit(start, cost{})
	}
	requests, tokens := l.meters(start.Add(4 * time.Second))
	want := meter{limit: 6, remaining: 0, reset: 6 * time.Second, renewal: 10 * time.Second}
	if requests != want {
		t.Errorf("got %+v, want %+v", requests, want)
	}
	if tokens != (meter{}) {
		t.Errorf("got %+v for a limit that is not set", tokens)
	}
}

// OpenAI refuses such a request whenever it comes, and names no time.
func TestARequestAboveTheWholeLimitOfOpenAIIsTooLarge(t *testing.T) {
	const large = `{"model":"m","max_tokens":1000,"messages":[{"role":"user","content":"12345678"}]}`
	for _, hints := range []string{"openai_dur", "azure_both"} {
		srv := listen(t, &Handler{TokensPerMinute: 500, ErrorBody: "openai_tokens", Hints: hints})
		resp, body := call(t, srv, "POST", "/v1/chat/completions", large)
		want := `{"error":{"message":"Request too large for m in organization org-simulator on tokens per min (TPM): Limit 500, Requested 1002. ` +
			`The input or output tokens must be reduced in order to run successfully. Visit https://platform.openai.com/account/rate-limits to learn more.",` +
			`"type":"tokens","param":null,"code":"rate_limit_exceeded"}}`
		if resp.StatusCode != 429 || body != want {
			t.Errorf("%s: got %d %s, want %s", hints, resp.StatusCode, body, want)
		}
		for name, want := range map[string]string{"retry-after": "", "retry-after-ms": "", "x-ratelimit-limit-tokens": "500", "x-ratelimit-remaining-tokens": "500"} {
			if got := resp.Header.Get(name); got != want {
				t.Errorf("%s: %s is %q, want %q", hints, name, got, want)
			}
		}
		if resp, body := call(t, srv, "POST", "/v1/chat/completions", chatBody); resp.StatusCode != 200 {
			t.Errorf("%s: got %d %s for a smaller one", hints, resp.StatusCode, body)
		}
		if got := status(t, srv); got.Early != 0 || got.Throttled.Tokens != 1 {
			t.Errorf("%s: %d are early, %d are throttled", hints, got.Early, got.Throttled.Tokens)
		}
	}
}

func TestARequestIsEarlyUntilThePromisedTime(t *testing.T) {
	l := &limiter{}
	if l.early(start) {
		t.Error("early without a promise")
	}
	l.promise(start, 7*time.Second)
	l.promise(start.Add(time.Second), time.Second) // a shorter one takes nothing back
	for at, want := range map[time.Duration]bool{
		-1:                false, // under way before the 429
		0:                 true,
		7*time.Second - 1: true,
		7 * time.Second:   false,
	} {
		if got := l.early(start.Add(at)); got != want {
			t.Errorf("arrived %s after the 429: got %t, want %t", at, got, want)
		}
	}
	l.promise(start.Add(8*time.Second), time.Second)
	if l.early(start.Add(5 * time.Second)) {
		t.Error("a promise holds for requests from before it")
	}
}

func TestARequestThatMayHaveBeenUnderWayIsNotEarly(t *testing.T) {
	l := &limiter{rules: rules{grace: 10 * time.Millisecond}}
	l.promise(start, 7*time.Second)
	l.promise(start.Add(time.Second), 6*time.Second) // whoever is refused again knows of the first one
	for at, want := range map[time.Duration]bool{
		10*time.Millisecond - 1:             false,
		10 * time.Millisecond:               true,
		time.Second + 5*time.Millisecond:    true,
		7*time.Second - 10*time.Millisecond: true,
		7 * time.Second:                     false,
	} {
		if got := l.early(start.Add(at)); got != want {
			t.Errorf("arrived %s after the 429: got %t, want %t", at, got, want)
		}
	}
}

func TestOnlyWhoIsToldToStayAwayCanComeEarly(t *testing.T) {
	for _, c := range []struct {
		hints, body string
		want        int64
	}{
		{"azure_both", "empty", 1}, {"azure_none", "empty", 1}, {"azure_day", "empty", 1},
		{"azure_neg1", "azure_classic", 1}, {"garbage", "azure_new", 1}, {"negative", "openai_tokens", 1}, // which their text tells
		{"azure_neg1", "string_error", 0}, {"garbage", "html", 0}, {"negative", "azure_ptu", 0},
		{"zero", "azure_classic", 0},
	} {
		srv := listen(t, &Handler{RequestsPerMinute: 6, Hints: c.hints, ErrorBody: c.body})
		for range 3 {
			call(t, srv, "POST", chatPath, chatBody)
		}
		if got := status(t, srv); got.Early != c.want || got.Throttled.Requests != 2 {
			t.Errorf("%s, %s: got %d early of %d, want %d", c.hints, c.body, got.Early, got.Throttled.Requests, c.want)
		}
	}
}

func TestAHugeMaxTokensDoesNotOverflow(t *testing.T) {
	huge := int64(math.MaxInt64)
	c := request{MaxTokens: &huge, Input: "prompt"}.cost(opChat)
	l := &limiter{rules: rules{tokensPerMinute: 100}}
	if _, ok := l.admit(start, c); ok {
		t.Errorf("%d tokens were admitted to 100", c.tokens())
	}
}

func TestCostIsEstimatedFromTheText(t *testing.T) {
	limit := func(n int64) *int64 { return &n }
	text := func(s string) any { return []any{map[string]any{"role": "user", "content": s}} }
	for name, tc := range map[string]struct {
		op   operation
		req  request
		want cost
	}{
		"an empty request may generate 16":  {opChat, request{}, cost{0, 16}},
		"four characters are a token":       {opChat, request{Messages: text("12345678")}, cost{2, 16}},
		"a fifth one begins another":        {opChat, request{Messages: text("12345")}, cost{2, 16}},
		"characters, not bytes":             {opChat, request{Messages: text("äöüß")}, cost{1, 16}},
		"max_tokens":                        {opChat, request{MaxTokens: limit(300)}, cost{0, 300}},
		"max_completion_tokens":             {opChat, request{MaxCompletionTokens: limit(5)}, cost{0, 5}},
		"max_output_tokens":                 {opResponse, request{MaxOutputTokens: limit(7), Input: "1234", Instructions: "5678"}, cost{2, 7}},
		"content parts":                     {opChat, request{Messages: []any{map[string]any{"content": []any{map[string]any{"type": "text", "text": "1234"}, map[string]any{"type": "image_url", "image_url": map[string]any{"url": "data:image/png;base64,AAAAAAAAAAAA"}}}}}}, cost{1, 16}},
		"embeddings generate nothing":       {opEmbedding, request{Input: []any{"1234", "5678"}}, cost{2, 0}},
		"a number is a token":               {opEmbedding, request{Input: []any{1.0, 2.0, 3.0}}, cost{3, 0}},
		"tools weigh what their JSON does":  {opChat, request{Tools: []any{map[string]any{"type": "function", "function": map[string]any{"name": "<f>"}}}}, cost{12, 16}}, // 47 characters
		"so does a call of a function":      {opChat, request{Messages: []any{map[string]any{"tool_calls": []any{map[string]any{"function": map[string]any{"name": "f", "arguments": "12345678"}}}}}}, cost{2, 16}},
		"and its result":                    {opResponse, request{Input: []any{map[string]any{"type": "function_call", "arguments": "1234"}, map[string]any{"type": "function_call_output", "output": "5678"}}}, cost{2, 16}},
		"n replies":                         {opChat, request{N: limit(5), MaxTokens: limit(300)}, cost{0, 1500}},
		"n replies of a length unknown":     {opCompletion, request{N: limit(5)}, cost{0, 80}},
		"n of the best":                     {opCompletion, request{N: limit(2), BestOf: limit(7), MaxTokens: limit(10)}, cost{0, 70}},
		"no n is too much":                  {opChat, request{N: limit(1e12)}, cost{0, 128 * 16}},
		"nor too little":                    {opCompletion, request{N: limit(-5), BestOf: limit(-7)}, cost{0, 16}},
		"best_of is for completions":        {opChat, request{BestOf: limit(7)}, cost{0, 16}},
		"a response is one":                 {opResponse, request{N: limit(5)}, cost{0, 16}},
		"embeddings have no n":              {opEmbedding, request{Input: "1234", N: limit(5)}, cost{1, 0}},
		"transcriptions are not in advance": {opTranscription, request{}, cost{0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tc.req.cost(tc.op); got != tc.want {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestARequestThatNoBucketHoldsSaysAYearAtMost(t *testing.T) {
	huge := int64(1e15)
	c := request{MaxTokens: &huge}.cost(opChat)
	for _, r := range []rules{
		{drain: 1.0 / 60, capacity: 1, outputRatio: 4},
		{drain: 1.0 / 60, capacity: 1, outputRatio: 1e300},
	} {
		l := &limiter{rules: r}
		if _, ok := l.admit(start, c); !ok {
			t.Error("an empty bucket refused a request")
		}
		refused, ok := l.admit(start, cost{prompt: 1})
		if ok || refused != (refusal{limit: limitPTU, wait: maxWait}) {
			t.Errorf("ratio %g: got %+v, want a wait of %s", r.outputRatio, refused, maxWait)
		}
		if l.settle(start, c, 16); l.utilization(start) > 100*(1+16*r.outputRatio) || math.IsNaN(l.level) {
			t.Errorf("ratio %g: the level is %g after the settlement", r.outputRatio, l.level)
		}
	}
}

func TestATokenLimitAsHighAsItGetsDoesNotOverflow(t *testing.T) {
	l := &limiter{rules: rules{tokensPerMinute: math.MaxInt64}}
	l.tokens = window{end: start.Add(time.Minute), used: math.MaxInt64 - 5}
	if got, ok := l.admit(start, cost{prompt: 6}); ok || got != (refusal{limit: limitTokens, wait: time.Minute}) {
		t.Errorf("got %+v, %t", got, ok)
	}
	if _, ok := l.admit(start, cost{prompt: 5}); !ok {
		t.Error("what is left was refused")
	}
}

func TestALongReplyWithALongLatencyDoesNotOverflow(t *testing.T) {
	for _, tc := range []struct {
		first, each time.Duration
		n           int64
		want        time.Duration
	}{
		{1, 2, 3, 7},
		{5, 2, 0, 5},
		{0, time.Hour, 1 << 31, math.MaxInt64},
		{math.MaxInt64, 1, 1, math.MaxInt64},
	} {
		if got := generationTime(tc.first, tc.each, tc.n); got != tc.want {
			t.Errorf("%s and %d times %s: got %s, want %s", tc.first, tc.n, tc.each, got, tc.want)
		}
	}
}
