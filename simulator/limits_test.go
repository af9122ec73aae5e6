package simulator

import (
	"math"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
)

var start = time.Date(2026, 10, 21, 7, 28, 0, 0, time.UTC)

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
	var c limits.Cost
	c.Prompt, c.Output = model.Request{MaxTokens: &huge, Input: "prompt"}.Cost(model.OpChat)
	l := &limits.Limiter{Rules: limits.Rules{TokensPerMinute: 100}}
	if _, ok := l.Admit(start, c); ok {
		t.Errorf("%d tokens were admitted to 100", c.Tokens())
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
