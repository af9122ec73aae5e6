package simulator

import (
	"cmp"
	"fmt"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// withOptions is a simulator that has the options of a Caddyfile.
func withOptions(t *testing.T, options string) *Handler {
	t.Helper()
	h := new(Handler)
	if err := h.UnmarshalCaddyfile(caddyfile.NewTestDispenser("openai_simulator {\n" + options + "\n}")); err != nil {
		t.Fatal(err)
	}
	return h
}

// asking is the body of a request for a service tier.
func asking(tier string) string {
	return `{"model":"gpt-4o","service_tier":"` + tier + `","input":"Say hello.","messages":[{"role":"user","content":"Say hello."}]}`
}

const openaiChat = "/v1/chat/completions"

func TestAReplyNamesTheTierThatServedIt(t *testing.T) {
	srv := listen(t, withOptions(t, ""))
	const azure, header = "/openai/v1/responses", "x-ms-service-tier"
	for _, tc := range []struct {
		path, body, header, want string
	}{
		{openaiChat, chatBody, "", "default"},
		{openaiChat, `{"model":"m","service_tier":null}`, "", "default"},
		{openaiChat, asking("auto"), "", "default"},
		{openaiChat, asking("default"), "", "default"},
		{openaiChat, asking("flex"), "", "flex"},
		{openaiChat, asking("priority"), "", "priority"},
		{openaiChat, asking("fast"), "", "fast"},
		{"/v1/responses", asking("flex"), "", "flex"},
		{azure, asking("priority"), "", "priority"},
		{azure, responsesBody, "flex", "flex"},
		{azure, asking("priority"), "flex", "flex"},
		{chatPath, asking("flex"), "default", "default"},
		{chatPath, asking("flex"), "auto", "default"},
		{openaiChat, asking("priority"), "flex", "priority"}, // the header is Azure's
		{"/v1/embeddings", asking("flex"), "", ""},
	} {
		resp, body := call(t, srv, "POST", tc.path, tc.body, header, tc.header)
		if got := tiersIn(body); resp.StatusCode != 200 || len(got) > 1 || strings.Join(got, "") != tc.want {
			t.Errorf("%s %s, header %q: got %d %s, want %q", tc.path, tc.body, tc.header, resp.StatusCode, body, tc.want)
		}
	}
}

// tiersIn are the service tiers that a reply names, each once.
func tiersIn(body string) (tiers []string) {
	for _, rest := range strings.Split(body, `"service_tier":"`)[1:] {
		tier, _, _ := strings.Cut(rest, `"`)
		tiers = append(tiers, tier)
	}
	return slices.Compact(tiers)
}

func TestEachChunkAndEachResponseInAStreamNamesItsTier(t *testing.T) {
	srv := listen(t, withOptions(t, "output_tokens 3"))
	stream := strings.Replace(asking("flex"), "{", `{"stream":true,"background":true,`, 1)
	last := ""
	for _, tc := range []struct{ path, want string }{
		{openaiChat, "role token token token stop"}, {"/v1/responses", "created in_progress completed"},
	} {
		var named []string
		all, _ := events(t, srv, tc.path, stream, "")
		for _, event := range all {
			if tiers := tiersIn(event); slices.Equal(tiers, []string{"flex"}) {
				named = append(named, event)
			}
		}
		if got := summary(named); got != tc.want {
			t.Fatalf("%s: the tier is in %s, want %s", tc.path, got, tc.want)
		}
		last = named[len(named)-1]
	}
	_, id, _ := strings.Cut(last, `"id":"`)
	id, _, _ = strings.Cut(id, `"`)
	if _, again := call(t, srv, "GET", "/v1/responses/"+id+"?stream=true", ""); strings.Count(again, `"service_tier":"flex"`) != 3 {
		t.Errorf("a response that is read again names its tier otherwise: %s", again)
	}
}

// outcomes are the statuses of requests for a tier, and the tiers that served
// them.
func outcomes(t *testing.T, srv *httptest.Server, n int, tier string) (all []string) {
	t.Helper()
	for range n {
		resp, body := call(t, srv, "POST", openaiChat, asking(tier))
		all = append(all, strings.Join(append([]string{strconv.Itoa(resp.StatusCode)}, tiersIn(body)...), " "))
	}
	return all
}

func TestAShareOfTheRequestsForATierIsServedInItEvenly(t *testing.T) {
	for options, want := range map[string]string{
		"":                     "200 flex,200 flex,200 flex,200 flex,200 flex,200 flex",
		"flex_capacity 100":    "200 flex,200 flex,200 flex,200 flex,200 flex,200 flex",
		"flex_capacity 67":     "200 flex,429,200 flex,200 flex,429,200 flex",
		"flex_capacity 50":     "200 flex,429,200 flex,429,200 flex,429",
		"flex_capacity 33":     "429,200 flex,429,429,200 flex,429",
		"flex_capacity 0":      "429,429,429,429,429,429",
		"priority_capacity 0":  "200 default,200 default,200 default,200 default,200 default,200 default",
		"priority_capacity 33": "200 default,200 priority,200 default,200 default,200 priority,200 default",
	} {
		tier, _, _ := strings.Cut(cmp.Or(options, "flex_"), "_")
		srv := listen(t, withOptions(t, options))
		if got := strings.Join(outcomes(t, srv, 6, tier), ","); got != want {
			t.Errorf("%s: got  %s\nwant %s", options, got, want)
		}
		for _, other := range []string{"flex", "priority", "default"} {
			if other != tier && outcomes(t, srv, 1, other)[0] != "200 "+other {
				t.Errorf("%s: %s is disturbed", options, other)
			}
		}
	}
	for percent := range 101 {
		srv := provision(t, withOptions(t, fmt.Sprintf("flex_capacity %d", percent)))
		served := 0
		for range 100 {
			if w, _ := run(srv, chatPath, asking("flex"), "", 0); w.Code == 200 {
				served++
			}
		}
		if served != percent {
			t.Errorf("flex_capacity %d: %d of 100 are served", percent, served)
		}
	}
}

func TestFlexWithoutCapacityCostsNothingAndNamesNoWait(t *testing.T) {
	srv := listen(t, withOptions(t, "flex_capacity 0\nrequests_per_minute 6\ntokens_per_minute 600"))
	resp, body := call(t, srv, "POST", openaiChat, asking("flex"))
	want := `{"error":{"message":"There is no flex capacity now. You were not charged. Try again later, or with another service_tier.",` +
		`"type":"resource_unavailable","param":null,"code":"resource_unavailable"}}`
	if resp.StatusCode != 429 || body != want {
		t.Errorf("got %d %s, want 429 %s", resp.StatusCode, body, want)
	}
	for name, want := range map[string]string{
		"retry-after": "", "retry-after-ms": "", "x-ratelimit-remaining-requests": "1", "x-ratelimit-remaining-tokens": "600",
	} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	if resp, body := call(t, srv, "POST", openaiChat, chatBody); resp.StatusCode != 200 {
		t.Errorf("got %d %s for the one request that is allowed", resp.StatusCode, body)
	}
	if resp, _ := call(t, srv, "POST", openaiChat, asking("flex")); resp.StatusCode != 429 || resp.Header.Get("x-ratelimit-remaining-requests") != "0" {
		t.Errorf("got %d %v when the limit is used up", resp.StatusCode, resp.Header)
	}
	got := status(t, srv)
	if got.Throttled != (Throttled{Flex: 2}) || got.Early != 0 || got.Admitted != 1 || got.Tokens.Input != 3 {
		t.Errorf("got %+v", got)
	}
}

func TestATierThatIsNotHereIsAMistakeOfTheClients(t *testing.T) {
	for options, refused := range map[string]string{"": "scale", "no_flex": "scale flex", "ptu 50": "scale flex"} {
		srv := listen(t, withOptions(t, options))
		for _, tier := range []string{"scale", "flex", "priority", "default", "auto"} {
			want := fmt.Sprintf(`{"error":{"message":"Invalid service_tier argument: '%s' is not available for this model.",`+
				`"type":"invalid_request_error","param":"service_tier","code":null}}`, tier)
			resp, body := call(t, srv, "POST", chatPath, chatBody, "x-ms-service-tier", tier)
			if slices.Contains(strings.Fields(refused), tier) {
				if resp.StatusCode != 400 || body != want {
					t.Errorf("%s, %s: got %d %s, want 400 %s", options, tier, resp.StatusCode, body, want)
				}
			} else if resp.StatusCode != 200 {
				t.Errorf("%s, %s: got %d %s", options, tier, resp.StatusCode, body)
			}
			if resp, body := call(t, srv, "POST", "/v1/embeddings", asking(tier)); resp.StatusCode != 200 {
				t.Errorf("%s, embeddings with %s: got %d %s", options, tier, resp.StatusCode, body)
			}
		}
	}
}

func TestFlexTakesItsTimeBeforeTheFirstByte(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h := provision(t, withOptions(t, "flex_latency 100s\nfirst_token_latency 300ms\noutput_tokens 1"))
		stream := strings.Replace(asking("flex"), "{", `{"stream":true,`, 1)
		for body, want := range map[string]time.Duration{
			asking("flex"): 100300 * time.Millisecond, stream: 100300 * time.Millisecond,
			asking("priority"): 300 * time.Millisecond, chatBody: 300 * time.Millisecond,
		} {
			if w, _ := run(h, chatPath, body, "", 0); w.header != want || w.Code != 200 {
				t.Errorf("%s: got %d after %s, want %s", body, w.Code, w.header, want)
			}
		}
		if w, _ := run(h, "/v1/responses", stream, "", 0); w.header != 100*time.Second {
			t.Errorf("a stream of the Responses API begins after %s", w.header)
		}
		if _, aborted := run(h, chatPath, stream, "", time.Minute); !aborted {
			t.Error("the reply was not aborted")
		}
		if s := h.state.snapshot(time.Now()); s.Cancelled != 1 || s.InFlight != 0 {
			t.Errorf("got %+v", s)
		}
	})
}
