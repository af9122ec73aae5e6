package sockets

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// withQuota is a pool without client keys, whose backend a has a quota.
func withQuota(quota string) string {
	return "openai_lb {\npool " + lbtest.Unique("sockets") + "\nbackend http://a {\n" + quota + "\n}\nbackend http://b {\npriority 2\n}\n}"
}

// wantUsed checks how much of each quota of backend a is used.
func wantUsed(t *testing.T, w *lbtest.World, want ...int64) {
	t.Helper()
	synctest.Wait()
	entry := lbtest.EntryOf(w.Handler.Pool)
	var got []int64
	for _, u := range entry.Quota(entry.Pool.Members[0], time.Now()) {
		got = append(got, u.Used)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the use of a is %d, want %d", got, want)
	}
}

// wantRefused checks how many responses did not reach backend a because of its
// quota, by the metric, the admin API and the log.
func wantRefused(t *testing.T, w *lbtest.World, want int) {
	t.Helper()
	lbtest.WantSums(t, w.Handler.Pool, fmt.Sprint("quota_passed_over_total ", want))
	entry := lbtest.EntryOf(w.Handler.Pool)
	if got := entry.Quota(entry.Pool.Members[0], time.Now())[0].Refused; got != uint64(want) {
		t.Errorf("the quota has refused %d, want %d", got, want)
	}
	if got := len(w.Logged("backend over its quota")); got != want {
		t.Errorf("the log has %d refusals, want %d", got, want)
	}
}

func TestEachResponseOfARealtimeSessionIsChargedToTheQuotaOfItsBackend(t *testing.T) {
	lbtest.InBubble(t, withQuota("requests 100/minute\ntokens 1M/hour"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(speaks(realtime(70, 50)))
		c := dial(t, w, session, aliceKey)
		wantUsed(t, w, 0+1, 0)
		for i := range int64(3) {
			c.say(`{"type":"response.create"}`)
			c.wantServed("a")
			wantUsed(t, w, 2+i, 120*(1+i))
		}
		c.say(`{"type":"input_audio_buffer.commit"}`) // the session begins a response by itself
		c.wantServed("a")
		wantUsed(t, w, 5, 480)
		c.Close()
		time.Sleep(time.Minute)
	})
}

func TestASessionOverTheQuotaOfItsBackendStaysOpen(t *testing.T) {
	lbtest.InBubble(t, withQuota("requests 3/minute"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(speaks(realtime(70, 50)))
		c := dial(t, w, session, aliceKey)
		for range 2 {
			c.say(`{"type":"response.create"}`)
			c.wantServed("a")
		}
		c.say(`{"type":"response.create"}`)
		for e := c.hears(); e.Type != "response.done" || e.Response.StatusDetails.Error.Code != "rate_limit_exceeded"; e = c.hears() {
			if e.Type == "error" {
				t.Fatal(e.raw)
			}
		}
		time.Sleep(2 * time.Second)
		c.say(`{"type":"input_audio_buffer.append","event_id":"mine","audio":"AAAA"}`)
		if e := c.hears(); e.Type != "error" || e.Error.Code != "rate_limit_exceeded" {
			t.Errorf("the client got %s", e.raw)
		}
		time.Sleep(2 * time.Minute)
		c.say(`{"type":"response.create"}`)
		c.wantServed("a")
		c.Close()
		time.Sleep(time.Minute)
		w.WantCalls(map[string]int{"a": 1, "b": 0})
		w.WantNobodyBlamed()
		wantRefused(t, w, 1) // audio is no response
	})
}

func TestAHandshakeGoesToABackendWithinItsQuota(t *testing.T) {
	lbtest.InBubble(t, withQuota("requests 1/hour"), func(t *testing.T, w *lbtest.World) {
		for _, b := range w.Backends {
			b.Replies(speaks(realtime(70, 50)))
		}
		for _, want := range []map[string]int{{"a": 1, "b": 0}, {"a": 1, "b": 1}} {
			c := dial(t, w, session, aliceKey)
			w.WantCalls(want)
			c.Close()
		}
		time.Sleep(time.Minute)
	})
}

func TestTheMessagesOfAWebSocketOfResponsesAreChargedToAQuota(t *testing.T) {
	lbtest.InBubble(t, withQuota("requests 2/hour\ntokens 1M/hour"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(responds("a", 70, 50))
		c := dial(t, w, "/v1/responses", aliceKey)
		for i := range int64(2) {
			c.say(`{"type":"response.create","model":"gpt-5","max_output_tokens":10,"input":"hello"}`)
			c.wantServed("a")
			wantUsed(t, w, 1+i, 120*(1+i))
		}
		c.say(`{"type":"response.create","model":"gpt-5","max_output_tokens":10,"input":"hello"}`)
		c.wantError(429, "rate_limit_exceeded")
		c.Close()
		time.Sleep(time.Minute)
		w.WantCalls(map[string]int{"a": 1, "b": 0})
		wantRefused(t, w, 1)
	})
}

func TestAQuotaGetsItsChargeForAResponseBackThatTheBackendHasNotExecuted(t *testing.T) {
	for name, tc := range map[string]struct {
		failure  string
		requests int64
	}{
		"a throttle":                {`{"type":"error","status":429,"error":{"type":"tokens","code":"rate_limit_exceeded","message":"Rate limit reached."}}`, 1},
		"a mistake of the client's": {`{"type":"error","status":400,"error":{"type":"invalid_request_error","code":"unsupported_value","message":"x"}}`, 2},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, withQuota("requests 10/hour\ntokens 1M/hour"), func(t *testing.T, w *lbtest.World) {
				answer := `{"type":"response.completed","response":{"id":"resp_a_0000000001","usage":{"input_tokens":70,"output_tokens":50}}}`
				w.Backends["a"].Replies(speaks(func(s *websocket.Conn, _ string) {
					websocket.Message.Send(s, answer)
					answer = tc.failure
				}))
				c := dial(t, w, "/v1/responses", aliceKey)
				for range 2 {
					c.say(`{"type":"response.create","model":"gpt-5","max_output_tokens":10,"input":"` + strings.Repeat("x", 4000) + `"}`)
					c.hears()
				}
				wantUsed(t, w, tc.requests, 120)
				c.Close()
				time.Sleep(time.Minute)
			})
		})
	}
}
