package simulator

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// cachedTokens asks for a chat, or for a response if the body has an input, and
// returns what was cached.
func cachedTokens(t *testing.T, h *Handler, body string) (cached int64, took time.Duration) {
	t.Helper()
	path := "/v1/chat/completions"
	if strings.Contains(body, `"input"`) {
		path = "/v1/responses"
	}
	w, _ := run(h, path, body, "", 0)
	var reply struct {
		Usage struct {
			Chat struct {
				Cached int64 `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
			Responses struct {
				Cached int64 `json:"cached_tokens"`
			} `json:"input_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(w.Body.Bytes(), &reply); err != nil || w.Code != 200 {
		t.Fatalf("%d %s: %v", w.Code, w.Body, err)
	}
	return reply.Usage.Chat.Cached + reply.Usage.Responses.Cached, w.header
}

// chatOf is a chat with these messages, each of so many tokens.
func chatOf(model, system string, tokens ...int) string {
	var messages []string
	for i, n := range tokens {
		messages = append(messages, fmt.Sprintf(`{"role":"user","content":"%s"}`, strings.Repeat(fmt.Sprintf("%-4d", i), n)))
	}
	return fmt.Sprintf(`{"model":%q,"messages":[{"role":"system","content":%q},%s]}`, model, system, strings.Join(messages, ","))
}

func TestAPromptThatBeginsWithAnEarlierOneIsCached(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h := provision(t, &Handler{PromptCache: 4, FirstTokenLatency: 1000 * ms})
		for _, step := range []struct {
			what, body string
			want       int64
			took       time.Duration
		}{
			{"a first turn", chatOf("m", "a", 1300), 0, time.Second},
			{"the same once more", chatOf("m", "a", 1300), 1280, 213 * time.Millisecond},
			{"the second turn", chatOf("m", "a", 1300, 1300), 1280, 606 * time.Millisecond},
			{"the third turn", chatOf("m", "a", 1300, 1300, 10), 2560, 216 * time.Millisecond},
			{"another system message", chatOf("m", "b", 1300), 0, time.Second},
			{"another model", chatOf("n", "a", 1300), 0, time.Second},
			{"too short", chatOf("m", "a", 1000), 0, time.Second},
			{"too short once more", chatOf("m", "a", 1000), 0, time.Second},
			{"other tools", `{"tools":[{}],` + chatOf("m", "a", 1300)[1:], 0, time.Second},
			{"one more", chatOf("m", "c", 1300), 0, time.Second},
			{"the fourth of those used last", chatOf("m", "a", 1300, 1300, 10), 2560, 216 * time.Millisecond},
			{"the fifth", chatOf("m", "a", 1300, 1300), 0, time.Second},
			{"a response", `{"model":"m","input":"` + strings.Repeat("abcd", 1024) + `"}`, 0, time.Second},
			{"it once more", `{"model":"m","input":"` + strings.Repeat("abcd", 1024) + `"}`, 1024, 200 * time.Millisecond},
			{"it with instructions", `{"model":"m","instructions":"x","input":"` + strings.Repeat("abcd", 1024) + `"}`, 0, time.Second},
		} {
			cached, took := cachedTokens(t, h, step.body)
			if cached != step.want || took.Round(time.Millisecond) != step.took {
				t.Errorf("%s: %d cached after %s, want %d after %s", step.what, cached, took, step.want, step.took)
			}
		}
		if got := h.state.snapshot(time.Now()).Tokens.Cached; got != 1280+1280+2560+2560+1024 {
			t.Errorf("the status counts %d cached tokens", got)
		}
		h.PromptCache = 0
		if cached, _ := cachedTokens(t, h, chatOf("m", "a", 1300, 1300)); cached != 0 {
			t.Errorf("%d cached without a cache", cached)
		}
	})
}

func TestCachedTokensCostAProvisionedDeploymentNothing(t *testing.T) {
	now := start
	// 1000 tokens a second, of which 3000 fit in the bucket
	h := provision(t, &Handler{PTU: 24, BucketSeconds: 3, PromptCache: 4, running: running{now: func() time.Time { return now }}})
	ask := func(body string, status int, utilization float64) {
		t.Helper()
		w, _ := run(h, "/v1/chat/completions", body, "", 0)
		if got := h.state.snapshot(now).Utilization; w.Code != status || got != utilization {
			t.Errorf("got %d at %v %%, want %d at %v %%: %s", w.Code, got, status, utilization, w.Body)
		}
	}
	ask(chatOf("m", "abcd", 1299), 200, 100*(1300+4*16)/3000.)
	ask(chatOf("m", "abcd", 1299), 200, 100*(1300+20+2*4*16)/3000.) // 1280 are cached
	ask(chatOf("m", "wxyz", 1999), 200, 100*(1320+2000+3*4*16)/3000.)
	ask(chatOf("m", "efgh", 1299), 429, 100*(3320+3*4*16)/3000.)
	now = now.Add(time.Minute)
	ask(chatOf("m", "efgh", 1299), 200, 100*(1300+4*16)/3000.) // what was refused is not cached
	if got := h.state.snapshot(now).Tokens; got.Estimated != 1316+36+2016+1316 || got.Cached != 1280 {
		t.Errorf("the status says %+v", got)
	}
}

func TestAPayAsYouGoDeploymentChargesCachedTokens(t *testing.T) {
	h := provision(t, &Handler{TokensPerMinute: 10_000, PromptCache: 4})
	for range 2 {
		run(h, "/v1/chat/completions", chatOf("m", "abcd", 1299), "", 0)
	}
	if got := h.state.snapshot(time.Now()).Tokens; got.Estimated != 2*(1300+16) || got.Cached != 1280 {
		t.Errorf("got %+v", got)
	}
}

func TestNoMoreIsCachedThanThePromptHas(t *testing.T) {
	long := strings.Repeat("abcd", 2000)
	for name, body := range map[string]string{
		"tools with content": `{"model":"m","tools":[{"type":"x","content":"` + long + `"}],"messages":[{"role":"user","content":"x"}]}`,
		"a call":             `{"model":"m","messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"` + long + `"}}]}]}`,
		"two kinds":          `{"model":"m","messages":["x"],"input":"` + long + `"}`,
		"a rest":             `{"model":"m","messages":["` + long + `x"]}`,
	} {
		bubble.Test(t, func(t *testing.T) {
			h := provision(t, &Handler{PromptCache: 4, FirstTokenLatency: 1000 * ms, TokenLatency: 10 * ms, OutputTokens: 3})
			cachedTokens(t, h, body)
			cached, took := cachedTokens(t, h, body)
			if prompt := h.state.snapshot(time.Now()).Tokens.Input / 2; cached < 1920 || cached > prompt || took < 200*time.Millisecond || took > time.Second {
				t.Errorf("%s: %d of %d tokens are cached, and it took %s", name, cached, prompt, took)
			}
		})
	}
}
