package simulator

import (
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// throttled is the 429 of a deployment whose second request comes 600 ms after
// the first one, of two that are allowed in 10 s or 60 s.
func throttled(t *testing.T, h *Handler) *httptest.ResponseRecorder {
	t.Helper()
	now := start
	h.now = func() time.Time { return now }
	provision(t, h)
	first := httptest.NewRecorder()
	serve(h, first, httptest.NewRequest("POST", chatPath, strings.NewReader(chatBody)))
	now = now.Add(600 * time.Millisecond)
	second := httptest.NewRecorder()
	serve(h, second, httptest.NewRequest("POST", chatPath, strings.NewReader(chatBody)))
	if first.Code != 200 || second.Code != 429 {
		t.Fatalf("got %d and %d, want 200 and 429", first.Code, second.Code)
	}
	return second
}

func TestAThrottleTellsItsWaitInEveryStyle(t *testing.T) {
	none := map[string]string{"retry-after-ms": "", "retry-after": "", "x-rate-limit-reset-requests": "", "date": ""}
	for style, want := range map[string]map[string]string{
		"azure_ms":   {"retry-after-ms": "9400"},
		"azure_both": {"retry-after-ms": "9400", "retry-after": "10"},
		"azure_s":    {"retry-after": "10"},
		"azure_none": {"x-rate-limit-reset-requests": "10", "x-ratelimit-reset-requests": "", "x-ratelimit-remaining-requests": "", "x-ratelimit-limit-requests": "6"},
		"azure_neg1": {
			"x-ratelimit-limit-requests": "-1", "x-ratelimit-remaining-requests": "-1", "x-ratelimit-reset-requests": "0",
			"x-ratelimit-limit-tokens": "-1", "x-ratelimit-remaining-tokens": "-1", "x-ratelimit-reset-tokens": "0",
		},
		"azure_day": {"retry-after": "86400"},
		// 07:28:00.6 and 9.4 s, so at 07:28:10.
		"date":       {"retry-after": "Wed, 21 Oct 2026 07:28:10 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"},
		"openai_dur": {"x-ratelimit-limit-requests": "6", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "9.4s"},
		"zero":       {"retry-after-ms": "0", "retry-after": "0"},
	} {
		t.Run(style, func(t *testing.T) {
			hdr := throttled(t, &Handler{Hints: style, RequestsPerMinute: 6}).Result().Header
			for name, absent := range none {
				if _, given := want[name]; !given && hdr.Get(name) != absent {
					t.Errorf("%s: got %q, want none", name, hdr.Get(name))
				}
			}
			for name, value := range want {
				if got := hdr.Get(name); got != value {
					t.Errorf("%s: got %q, want %q", name, got, value)
				}
			}
		})
	}
	if len(limits.HintStyles) != 9 {
		t.Errorf("%d styles, of which 9 are tested", len(limits.HintStyles))
	}
}

func TestAThrottleByTokensSaysSo(t *testing.T) {
	h := &Handler{TokensPerMinute: 30, Hints: "azure_none", RequestsPerMinute: 600}
	hdr := throttled(t, h).Result().Header
	for name, want := range map[string]string{
		"x-rate-limit-reset-tokens":      "60",
		"x-ratelimit-remaining-tokens":   "",
		"x-ratelimit-remaining-requests": "98",
		"retry-after":                    "",
	} {
		if got := hdr.Get(name); got != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	if got := h.state.snapshot(start).Throttled; got != (Throttled{Tokens: 1}) {
		t.Errorf("got %+v", got)
	}
}

func TestWhatIsLeftButTooLittleIsNothing(t *testing.T) {
	hdr := throttled(t, &Handler{TokensPerMinute: 37}).Result().Header
	if got := hdr.Get("x-ratelimit-remaining-tokens"); got != "0" {
		t.Errorf("got %s tokens left on a 429 by tokens", got)
	}
}

func TestAThrottleHasEveryBody(t *testing.T) {
	for style, want := range map[string]struct{ contentType, body string }{
		"azure_classic":      {wire.JSONType, `{"error":{"code":"429","message":"Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2024-10-21 have exceeded call rate limit of your current OpenAI S0 pricing tier. Please retry after 10 seconds. Please go here: https://aka.ms/oai/quotaincrease if you would like to further increase the default rate limit."}}`},
		"azure_new":          {wire.JSONType, `{"error":{"code":"RateLimitReached","message":"Your requests to gpt-4o for gpt-4o in Simulated have exceeded the call rate limit for your current AIServices S0 pricing tier. This request was for ChatCompletions_Create under Azure OpenAI API version 2024-10-21. Please retry after 10 seconds. To increase your default rate limit, visit: https://aka.ms/oai/quotaincrease."}}`},
		"azure_capacity":     {wire.JSONType, `{"error":{"message":"The system is currently experiencing high demand and cannot process your request. Your request exceeds the maximum usage size allowed during peak load. For improved capacity reliability, consider switching to Provisioned Throughput.","type":"too_many_requests","param":null,"code":"no_capacity"}}`},
		"azure_ptu":          {wire.JSONType, `{"error":{"message":"Requests have exceeded the throughput limit on your Provisioned-Managed deployment. If you continue to exceed your limit, consider increasing the number of provisioned throughput units deployed.","type":"too_many_requests","param":null,"code":"rate_limit_reached"}}`},
		"openai_tokens":      {wire.JSONType, `{"error":{"message":"Rate limit reached for gpt-4o in organization org-simulator on requests per min (RPM). Please try again in 9.4s. Visit https://platform.openai.com/account/rate-limits to learn more.","type":"requests","param":null,"code":"rate_limit_exceeded"}}`},
		"insufficient_quota": {wire.JSONType, `{"error":{"message":"You exceeded your current quota, please check your plan and billing details.","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}`},
		"mistral_flat":       {wire.JSONType, `{"object":"error","message":"Rate limit exceeded","type":"rate_limited","param":null,"code":"1300","raw_status_code":429}`},
		"openrouter_num":     {wire.JSONType, `{"error":{"code":429,"message":"Provider returned error","metadata":{"provider_name":"Simulator","raw":"rate limited upstream"}}}`},
		"html":               {"text/html; charset=utf-8", "<html><head><title>429 Too Many Requests</title></head><body><h1>429 Too Many Requests</h1></body></html>\n"},
		"empty":              {"", ""},
		"string_error":       {wire.JSONType, `{"error":"Too Many Requests"}`},
	} {
		t.Run(style, func(t *testing.T) {
			rec := throttled(t, &Handler{ErrorBody: style, RequestsPerMinute: 6})
			if got := rec.Body.String(); got != want.body {
				t.Errorf("got  %s\nwant %s", got, want.body)
			}
			if got := rec.Header().Get("content-type"); got != want.contentType {
				t.Errorf("got content-type %q, want %q", got, want.contentType)
			}
		})
	}
	if len(limits.BodyStyles) != 11 {
		t.Errorf("%d styles, of which 11 are tested", len(limits.BodyStyles))
	}
}

func TestAThrottleNamesWhatWasAskedFor(t *testing.T) {
	srv := listen(t, &Handler{Hints: "azure_s", TokensPerMinute: 1})
	for path, want := range map[string]string{
		"/openai/deployments/d/chat/completions?api-version=2": "Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2 have exceeded token rate limit",
		"/v1/embeddings":       "Requests to the Embeddings_Create Operation under Azure OpenAI API version v1 ",
		"/openai/v1/responses": "Requests to the Responses_Create Operation under Azure OpenAI API version v1 ",
		"/v1/chat/completions": "Requests to the ChatCompletions_Create Operation under Azure OpenAI API version v1 ",
	} {
		if _, body := call(t, srv, "POST", path, `{"model":"d","input":"more than one token"}`); !strings.Contains(body, want) {
			t.Errorf("%s: got %s", path, body)
		}
	}
}

func TestAnOpenAITextNamesTokens(t *testing.T) {
	rec := throttled(t, &Handler{ErrorBody: "openai_tokens", TokensPerMinute: 20})
	if want := `on tokens per min (TPM). Please try again in 59.4s. Visit https://platform.openai.com/account/rate-limits to learn more.","type":"tokens"`; !strings.Contains(rec.Body.String(), want) {
		t.Errorf("got %s, want %s", rec.Body, want)
	}
}

func TestADayIsToldInTheTextToo(t *testing.T) {
	rec := throttled(t, &Handler{Hints: "azure_day", RequestsPerMinute: 6})
	if !strings.Contains(rec.Body.String(), "Please retry after 86400 seconds.") {
		t.Errorf("got %s", rec.Body)
	}
}

func TestAProvisionedThrottleIsTheSizeOfItsOverflow(t *testing.T) {
	// 24 PTU of 2500 TPM: 1000 tokens/s, 10 ms of which fit in the bucket. A
	// request of 3 + 4*16 leaves 67 in it; its reply really has 16 tokens.
	now := start
	h := &Handler{PTU: 24, BucketSeconds: 0.01, running: running{now: func() time.Time { return now }}}
	provision(t, h)
	send := func() *httptest.ResponseRecorder {
		rec := httptest.NewRecorder()
		serve(h, rec, httptest.NewRequest("POST", chatPath, strings.NewReader(chatBody)))
		return rec
	}
	if rec := send(); rec.Code != 200 || rec.Header().Get("azure-openai-deployment-utilization") != "670.0%" {
		t.Fatalf("got %d, %s", rec.Code, rec.Header().Get("azure-openai-deployment-utilization"))
	}
	rec := send()
	hdr := rec.Header()
	if rec.Code != 429 || hdr.Get("retry-after-ms") != "58" || hdr.Get("retry-after") != "1" ||
		hdr.Get("azure-openai-deployment-utilization") != "670.0%" || !strings.Contains(rec.Body.String(), "Provisioned-Managed") {
		t.Errorf("got %d %v %s", rec.Code, hdr, rec.Body)
	}
	now = now.Add(58 * time.Millisecond)
	if rec := send(); rec.Code != 200 {
		t.Errorf("got %d at the promised time", rec.Code)
	}
	if got := h.state.snapshot(now); got.Throttled != (Throttled{PTU: 1}) || got.Early != 0 {
		t.Errorf("got %+v", got)
	}
}

// A request that asks for 10^15 tokens fills the bucket for years. The wait
// must not overflow into a negative one.
func TestAHugeMaxTokensIsAWaitThatCanBeTold(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h := provision(t, &Handler{PTU: 1, FirstTokenLatency: 1000 * ms})
		go run(h, chatPath, `{"max_tokens":1000000000000000}`, "", 0)
		synctest.Wait()
		w, _ := run(h, chatPath, chatBody, "", 0)
		if seconds, err := strconv.Atoi(w.Header().Get("retry-after")); w.Code != 429 || err != nil || seconds < 365*24*3600 {
			t.Errorf("got %d %v", w.Code, w.Header())
		}
		synctest.Wait()
		time.Sleep(time.Second)
		synctest.Wait()
		if got := h.state.snapshot(time.Now()); got.Tokens.Output != 16 || got.Utilization < 0 || got.Utilization > 100*16*4/416. {
			t.Errorf("after the reply: %+v", got)
		}
	})
}
