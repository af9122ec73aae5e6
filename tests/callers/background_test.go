package callers

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// get asks for a response.
func (w *world) get(t *testing.T, path string) {
	t.Helper()
	r := w.Request(http.MethodGet, path, nil)
	r.Header.Set("Authorization", "Bearer "+aliceKey)
	w.Send(r).WantStatus(t, 200)
	synctest.Wait()
}

func TestAResponseInTheBackgroundIsSettledByTheFirstReplyThatReportsItsUsage(t *testing.T) {
	const id = "resp_0123456789abcdef"
	queued := `{"id":"` + id + `","object":"response","status":"queued","background":true,"usage":null}`
	done := strings.Replace(queued, "null", `{"input_tokens":70,"output_tokens":100000}`, 1)
	for name, reply := range map[string]http.HandlerFunc{
		"at once":     lbtest.Says(200, queued),
		"compressed":  lbtest.Says(200, lbtest.Gzipped(queued), "Content-Encoding", "gzip"),
		"in a stream": lbtest.Streams("event: response.created\ndata: {\"type\":\"response.created\",\"response\":"+queued+"}\n\n", "data: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n", lbtest.Abort),
		"indented":    lbtest.Says(200, strings.ReplaceAll(queued, ":", " : ")),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, limited, func(t *testing.T, w *world) {
				w.AllReply(reply)
				w.post(aliceKey, "/v1/responses", prompt(50, fmt.Sprintf(`"background":true,"stream":%v,"max_output_tokens":4000,`, name == "in a stream")))
				w.wantCost(t, 1, 4050)
				w.AllReply(lbtest.Says(200, queued))
				w.get(t, "/v1/responses/"+id)
				w.wantCost(t, 2, 4050)
				w.AllReply(lbtest.Says(200, done))
				w.get(t, "/v1/responses/resp_ffffffffffffffff")
				w.wantCost(t, 3, 4050)
				for _, want := range []int64{4, 5} {
					w.get(t, "/v1/responses/"+id)
					w.wantCost(t, want, 100_070)
				}
			})
		})
	}
}

func TestAResponseInTheBackgroundIsSettledOnTheDayOfItsRequest(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 1M/day\n}", func(t *testing.T, w *world) {
		time.Sleep(time.Until(time.Date(2000, 1, 2, 23, 59, 0, 0, time.UTC)))
		w.AllReply(lbtest.Says(200, `{"id":"resp_0123456789abcdef","status":"queued","usage":null}`))
		w.post(aliceKey, "/v1/responses", prompt(50, `"background":true,"max_output_tokens":4000,`)).WantStatus(t, 200)
		time.Sleep(2 * time.Minute)
		w.AllReply(used(50, 10))
		w.chat(prompt(50, "")).WantStatus(t, 200)
		w.AllReply(lbtest.Says(200, `{"id":"resp_0123456789abcdef","status":"cancelled","usage":{"input_tokens":50,"output_tokens":40}}`))
		w.post(aliceKey, "/v1/responses/resp_0123456789abcdef/cancel", "").WantStatus(t, 200)
		synctest.Wait()
		w.wantUse(t, 60)
		if got := w.of("alice").Month; got != 60+90 {
			t.Errorf("%d tokens are used of the month", got)
		}
	})
}
