package callers

import (
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestARequestThatFailsBecauseOfItselfCostsARequest has replies of two backends
// and, in some cases, of a third one. Azure counts refused requests, too:
// otherwise one caller could use up the requests of every backend.
func TestARequestThatFailsBecauseOfItselfCostsARequest(t *testing.T) {
	tooLarge := lbtest.Says(429, `{"error":{"message":"Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 1000000000."}}`)
	overBudget := lbtest.Says(402, `{"error":{"message":"This request requires more credits, or fewer max_tokens."}}`)
	noModel := lbtest.Says(404, `{"error":{"code":"model_not_found","param":"model"}}`)
	failedStream := lbtest.Streams("data: {\"error\":{\"message\":\"no\",\"type\":\"server_error\",\"code\":null}}\n\n")
	throttled, failed := lbtest.Throttled("7"), lbtest.Status(500)
	for name, c := range map[string]struct {
		replies  []http.HandlerFunc // of a, b and c
		requests int64
	}{
		"too large everywhere":                  {[]http.HandlerFunc{tooLarge, tooLarge}, 1},
		"too large for a budget":                {[]http.HandlerFunc{overBudget, overBudget}, 1},
		"too large at one, another throttles":   {[]http.HandlerFunc{tooLarge, throttled}, 1},
		"one throttles, too large at the other": {[]http.HandlerFunc{throttled, tooLarge}, 1},
		"too large at one, another fails":       {[]http.HandlerFunc{tooLarge, failed}, 1},
		"both fail":                             {[]http.HandlerFunc{failed, failed}, 1},
		"both break the connection":             {[]http.HandlerFunc{lbtest.Aborts, lbtest.Aborts}, 1},
		"both begin a stream with an error":     {[]http.HandlerFunc{failedStream, failedStream}, 1},
		"no headers come from either":           {[]http.HandlerFunc{lbtest.Hangs, lbtest.Hangs}, 1},
		"neither has the model":                 {[]http.HandlerFunc{noModel, noModel}, 1},
		"two fail, and a third throttles":       {[]http.HandlerFunc{failed, failed, throttled}, 1},
		"one fails":                             {[]http.HandlerFunc{failed}, 0},
		"one fails, and another throttles":      {[]http.HandlerFunc{failed, throttled}, 0},
		"one fails, another has no capacity":    {[]http.HandlerFunc{failed, lbtest.Status(503)}, 0},
		"both throttle":                         {[]http.HandlerFunc{throttled, throttled}, 0},
		"both have no capacity":                 {[]http.HandlerFunc{lbtest.Status(503), lbtest.Status(503)}, 0},
		"both refuse our key":                   {[]http.HandlerFunc{lbtest.Status(401), lbtest.Status(401)}, 0},
		"both have no budget":                   {[]http.HandlerFunc{lbtest.Says(429, `{"error":{"code":"insufficient_quota"}}`), lbtest.Status(402)}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			names := []string{"a", "b", "c"}[:len(c.replies)]
			backends := "lb_policy first\nresponse_header_timeout 5s\nstream_first_event_timeout 5s\n"
			for _, name := range names {
				backends += "backend http://" + name + "\n"
			}
			inBubbleWith(t, backends+limited, func(t *testing.T, w *world) {
				for i, name := range names {
					w.Backends[name].Replies(c.replies[i])
				}
				w.chat(prompt(50, `"stream":true,`))
				w.wantCost(t, c.requests, 0)
				if w.TotalCalls() != len(names) {
					t.Errorf("%d calls, want %d", w.TotalCalls(), len(names))
				}
			})
		})
	}
}

// TestRequestsThatAreTooLargeAreLimited is the attack: without a limit, sixty
// of them made 120 calls.
func TestRequestsThatAreTooLargeAreLimited(t *testing.T) {
	inBubble(t, "backend http://b\ncaller alice {\nrequests 5/minute\n}", func(t *testing.T, w *world) {
		w.AllReply(lbtest.Says(429, `{"error":{"message":"Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 1000000000."}}`))
		for range 60 {
			if got := w.chat(`{"model":"gpt-4o","max_tokens":1000000000}`); got.Status != 429 || !strings.Contains(got.Body, "error") {
				t.Errorf("got %d %s", got.Status, got.Body)
			}
		}
		if w.TotalCalls() != 10 {
			t.Errorf("%d calls, want 10", w.TotalCalls())
		}
	})
}
