package failover

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// The sixteen faults of Failover Bench
// (https://github.com/failoverbench/failoverbench, catalogue 0.1), made again
// from its descriptions. Its checks are those for a system that has a fallback;
// requests are streamed, as there.

// words returns events of so many of sixty tokens.
func words(from, to int) string {
	var b strings.Builder
	for i := from; i < to; i++ {
		fmt.Fprintf(&b, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word%d \"}}]}\n\n", i)
	}
	return b.String()
}

const usageEvent = "data: {\"choices\":[],\"model\":\"m\",\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":60,\"total_tokens\":80}}\n\n"

var wholeAnswer = words(0, 60) + usageEvent + lbtest.StreamEnd

// once gives the fault to the first request, and the whole answer to all
// others.
func once(fault http.HandlerFunc) http.HandlerFunc {
	first := true
	return func(w http.ResponseWriter, r *http.Request) {
		if first {
			first = false
			fault(w, r)
			return
		}
		lbtest.Streams(wholeAnswer)(w, r)
	}
}

// What the client gets.
const (
	whole   = "the whole answer"
	cut     = "a stream that broke off"
	refused = "the backend's 400"
)

func TestTheFaultsOfFailoverBench(t *testing.T) {
	noCapacity := lbtest.Says(503, `{"error":{"message":"overloaded","type":"server_error","param":null,"code":"overloaded"}}`)
	tooLong := lbtest.Says(400, `{"error":{"message":"This model's maximum context length is 8192 tokens.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}`)
	for _, c := range []struct {
		id      string
		fault   http.HandlerFunc
		gets    string
		by      string // the backend that serves, or whose error the client gets
		primary int    // requests at the primary
		within  time.Duration
		options string // of the fallback
	}{
		{id: "S01 429 with Retry-After", fault: once(lbtest.Throttled("2")), gets: whole, by: "b", primary: 1},
		{id: "S02 429 without Retry-After", fault: lbtest.Status(429), gets: whole, by: "b", primary: 1},
		{id: "S03 500 once", fault: once(lbtest.Status(500)), gets: whole, by: "b", primary: 1},
		{id: "S04 503 for long", fault: noCapacity, gets: whole, by: "b", primary: 1},
		{id: "S05 reset before the header", fault: once(lbtest.Aborts), gets: whole, by: "b", primary: 1},
		{id: "S06 no response", fault: lbtest.Hangs, gets: whole, by: "b", primary: 1, within: 5 * time.Minute},
		{id: "S07 slow first token", fault: lbtest.Streams(20*time.Second, wholeAnswer), gets: whole, by: "a", primary: 1, within: 20 * time.Second},
		{id: "S08 stream cut", fault: lbtest.Streams(words(0, 40), lbtest.Abort), gets: cut, by: "a", primary: 1},
		{id: "S09 stream stalls", fault: lbtest.Streams(words(0, 20), 30*time.Second, lbtest.Abort), gets: cut, by: "a", primary: 1, within: 45 * time.Second},
		{id: "S10 malformed event", fault: lbtest.Streams(words(0, 10), "data: {\"choices\":[{\n\n", words(10, 60), usageEvent, lbtest.StreamEnd), gets: whole, by: "a", primary: 1},
		{id: "S11 no [DONE]", fault: lbtest.Streams(words(0, 60), usageEvent), gets: whole, by: "a", primary: 1},
		{id: "S12 context too short", fault: tooLong, gets: refused, by: "a", primary: 1},
		{id: "S12 context too short, and a larger model", fault: tooLong, gets: whole, by: "b", primary: 1, options: "model m larger-model"},
		{id: "S13 content filter", fault: lbtest.Says(400, `{"error":{"message":"filtered","type":"invalid_request_error","param":"prompt","code":"content_policy_violation"}}`), gets: refused, by: "a", primary: 1},
		{id: "S14 stream cut, and no prefill", fault: lbtest.Streams(words(0, 40), lbtest.Abort), gets: cut, by: "a", primary: 1},
		{id: "S16 failed attempts cost nothing", fault: noCapacity, gets: whole, by: "b", primary: 1},
	} {
		t.Run(c.id, func(t *testing.T) {
			config := fmt.Sprintf("openai_lb {\nbackend http://a {\nname a\nmodel m\n}\nbackend http://b {\nname b\npriority 2\n%s\n}\n}", orModel(c.options))
			lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.fault)
				w.Backends["b"].Replies(lbtest.Streams(wholeAnswer))
				began := time.Now()
				reply := w.Post(`{"model":"m","stream":true,"messages":[{"role":"user","content":"Explain."}]}`)
				if took := time.Since(began); took > c.within {
					t.Errorf("it took %s", took)
				}
				got := whole
				switch {
				case reply.Err != nil && reply.Status == 200:
					got = cut
				case reply.Status == 400:
					got = refused
				case reply.Err != nil || reply.Status != 200 || strings.Count(reply.Body, "word") != 60 || !strings.Contains(reply.Body, `"usage"`):
					got = fmt.Sprintf("%d %v %s", reply.Status, reply.Err, reply.Body)
				}
				if got != c.gets || reply.Backend != c.by {
					t.Errorf("the client got %s from %s", got, reply.Backend)
				}
				w.WantCalls(map[string]int{"a": c.primary, "b": map[bool]int{true: 1}[c.by == "b"]})
				for _, call := range w.Backends["b"].Received() { // nothing of a half answer is sent anywhere
					if strings.Contains(string(call.Beginning), "assistant") {
						t.Errorf("the fallback got %s", call.Beginning)
					}
				}
				tokens := map[string]float64{c.by: 60}
				if c.gets == whole {
					for _, backend := range []string{"a", "b"} {
						if n := lbtest.SumOf(t, "tokens_total", map[string]string{"pool": w.Handler.Pool, "backend": backend, "type": "output"}); n != tokens[backend] {
							t.Errorf("%s has produced %v tokens", backend, n)
						}
					}
				}
				w.Backends["a"].Recovers()
				time.Sleep(20 * time.Second)
				w.Post(`{"model":"m"}`).WantServed(t, "a")
			})
		})
	}
}

func orModel(options string) string {
	if options == "" {
		return "model m"
	}
	return options
}

// TestThePrimaryIsBackSoonAfterAnOutage is S15: the primary answers 503 for a
// minute, and a request comes every 4 s.
func TestThePrimaryIsBackSoonAfterAnOutage(t *testing.T) {
	lbtest.InBubble(t, lbtest.InOrder("a b", ""), func(t *testing.T, w *lbtest.World) {
		outage := time.Now().Add(time.Minute)
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if time.Now().Before(outage) {
				lbtest.Status(503)(rw, r)
				return
			}
			lbtest.Streams(wholeAnswer)(rw, r)
		})
		w.Backends["b"].Replies(lbtest.Streams(wholeAnswer))
		back := time.Duration(-1)
		for range 20 {
			reply := w.PostStream()
			reply.WantStatus(t, 200)
			if reply.Backend == "a" && back < 0 {
				back = time.Since(outage)
			} else if back >= 0 {
				reply.WantServed(t, "a")
			}
			time.Sleep(4 * time.Second)
		}
		if back < 0 || back > 30*time.Second {
			t.Errorf("the primary was back after %s", back)
		}
	})
}
