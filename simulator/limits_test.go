package simulator

import (
	"math"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
)

var start = time.Date(2026, 10, 21, 7, 28, 0, 0, time.UTC)

func TestOnlyWhoIsToldToStayAwayCanComeEarly(t *testing.T) {
	for _, c := range []struct {
		hints, body string
		want        int64
	}{
		{"azure_both", "empty", 1}, {"azure_none", "empty", 1}, {"azure_day", "empty", 1},
		{"azure_neg1", "azure_classic", 1}, {"azure_neg1", "azure_new", 1}, {"azure_neg1", "openai_tokens", 1}, // which their text tells
		{"azure_neg1", "string_error", 0}, {"azure_neg1", "html", 0}, {"azure_neg1", "azure_ptu", 0},
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
