package sockets

import (
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// withTiers is a pool with one backend, of which the tier of alice keeps a
// half.
func withTiers() string {
	return keyed("backend http://a {\nname a\nmodel gpt-5\n}\ntier gold {\nreserve 50%\n}\ntier bronze\ncaller alice {\ntier gold\n}\ncaller bob {\ntier bronze\n}")
}

// overBoth is a backend that answers WebSockets by socket, and other requests
// by plain.
func overBoth(socket, plain http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			socket(w, r)
		} else {
			plain(w, r)
		}
	}
}

// served is a reply over HTTP, while this much of the backend is used.
func served(utilization string) http.HandlerFunc {
	return lbtest.Says(200, `{"id":"resp_1","object":"response","usage":{"input_tokens":7,"output_tokens":5}}`, "Azure-OpenAI-Deployment-Utilization", utilization)
}

// usedByAlice returns the cost that alice's tier has got.
func usedByAlice(w *lbtest.World) (cost int64) {
	synctest.Wait()
	for _, costs := range lbtest.EntryOf(w.Handler.Pool).Pool.Members[0].TierCosts(time.Now()) {
		cost += costs[1][1]
	}
	return cost
}

const thousand = `"model":"gpt-5","max_output_tokens":1000,"input":"hi"}`

func TestEachResponseInAWebSocketCountsInTheUseOfItsTier(t *testing.T) {
	lbtest.InBubble(t, withTiers(), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(overBoth(responds("a", 7, 5), served("50%")))
		for range 5 {
			post(w, "/v1/responses", "{"+thousand, aliceKey).WantStatus(t, 200)
		}
		overHTTP := usedByAlice(w)
		c := dial(t, w, "/v1/responses", aliceKey)
		for range 5 {
			c.say(`{"type":"response.create",` + thousand)
			c.wantServed("a")
		}
		if got := usedByAlice(w) - overHTTP; got < overHTTP || got > overHTTP*11/10 {
			t.Errorf("five responses in a WebSocket count as %d in the use of the tier, and five over HTTP as %d", got, overHTTP)
		}
		c.Close()
		time.Sleep(time.Minute)
	})
}

// TestAResponseThatTheSessionBeginsCountsInTheUseOfItsTier as what the client
// has sent for it, if that was a response.steer.
func TestAResponseThatTheSessionBeginsCountsInTheUseOfItsTier(t *testing.T) {
	lbtest.InBubble(t, withTiers(), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(steerable("a"))
		c := dial(t, w, "/v1/responses", aliceKey)
		c.say(`{"type":"response.create",` + thousand)
		first := c.hears().Response.ID
		before := usedByAlice(w)
		c.say(`{"type":"response.steer","previous_response_id":"` + first + `","input":"` + strings.Repeat("x", 4000) + `"}`)
		c.hears()
		c.hears()
		if got := usedByAlice(w) - before; got < 1000 || got > 1100 {
			t.Errorf("a prompt of 1000 tokens counts as %d in the use of the tier", got)
		}
		c.Close()
		time.Sleep(time.Minute)
	})
}

// TestAResponseThatTheBackendHasNotExecutedIsNotInTheUseOfItsTier whether an
// error says so before or after the response has begun, and whether it is the
// first one of its WebSocket or a later one.
func TestAResponseThatTheBackendHasNotExecutedIsNotInTheUseOfItsTier(t *testing.T) {
	const created = `{"type":"response.created","response":{"id":"resp_a_1234567890","error":null}}`
	failed := func(code string) string {
		return `{"type":"response.failed","response":{"id":"resp_a_1234567890","status":"failed","error":{"code":"` + code + `","message":"x"}}}`
	}
	for name, tc := range map[string]struct {
		events []string
		counts bool
	}{
		"a throttle":                 {[]string{`{"type":"error","status":429,"error":{"type":"tokens","code":"rate_limit_exceeded","message":"Rate limit reached."}}`}, false},
		"a throttle after it began":  {[]string{created, failed("rate_limit_exceeded")}, false},
		"a mistake of the client's":  {[]string{`{"type":"error","status":400,"error":{"type":"invalid_request_error","code":"unsupported_value","message":"x"}}`}, false},
		"a failure":                  {[]string{created, failed("server_error")}, true},
		"a throttle after some text": {[]string{created, `{"type":"response.output_text.delta","delta":"hello"}`, failed("rate_limit_exceeded")}, true},
		"a throttle after an item":   {[]string{created, `{"type":"response.output_item.added","item":{"id":"msg_1"}}`, failed("rate_limit_exceeded")}, true},
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, withTiers(), func(t *testing.T, w *lbtest.World) {
				isServed := true
				w.Backends["a"].Replies(speaks(func(s *websocket.Conn, _ string) {
					if isServed {
						isServed = false
						websocket.Message.Send(s, `{"type":"response.completed","response":{"id":"resp_a_0000000001","usage":{"input_tokens":7,"output_tokens":5}}}`)
						return
					}
					for _, e := range tc.events {
						websocket.Message.Send(s, e)
					}
				}))
				c := dial(t, w, "/v1/responses", aliceKey)
				c.say(`{"type":"response.create",` + thousand)
				c.wantServed("a")
				before := usedByAlice(w)
				c.say(`{"type":"response.create",` + thousand)
				for range tc.events {
					c.hears()
				}
				if got := usedByAlice(w) - before; (got > 0) != tc.counts {
					t.Errorf("a later response counts as %d in the use of the tier", got)
				}
				c.Close()
				if len(tc.events) > 1 { // otherwise the WebSocket is not opened
					before = usedByAlice(w)
					c = dial(t, w, "/v1/responses", aliceKey)
					c.say(`{"type":"response.create",` + thousand)
					for range tc.events {
						c.hears()
					}
					if got := usedByAlice(w) - before; (got > 0) != tc.counts {
						t.Errorf("the first response counts as %d in the use of the tier", got)
					}
					c.Close()
				}
				time.Sleep(time.Minute)
			})
		})
	}
}

// TestAResponseThatASessionRefusesIsNotInTheUseOfItsTier as a realtime session
// does while another response is in progress, or while it throttles.
func TestAResponseThatASessionRefusesIsNotInTheUseOfItsTier(t *testing.T) {
	says := func(events ...string) func(*websocket.Conn, string) {
		return func(s *websocket.Conn, _ string) {
			for _, e := range events {
				websocket.Message.Send(s, e)
			}
		}
	}
	const begun = `{"event_id":"event_1","type":"response.created","response":{"id":"resp_a_1234567890","status":"in_progress","status_details":null}}`
	done := func(code string) string {
		return `{"event_id":"event_2","type":"response.done","response":{"id":"resp_a_1234567890","status":"failed","status_details":{"type":"failed","error":{"type":"x","code":"` + code + `","message":"x"}},"output":[],"usage":null}}`
	}
	for name, answer := range map[string]func(*websocket.Conn, string){
		"served":                       realtime(70, 50),
		"served, and fails":            says(begun, done("server_error")),
		"refused, as one is active":    says(`{"type":"error","error":{"type":"invalid_request_error","code":"conversation_already_has_active_response","message":"x"}}`),
		"refused by a throttle":        says(done("rate_limit_exceeded")),
		"refused by a throttle, begun": says(begun, done("rate_limit_exceeded")),
	} {
		lbtest.InBubble(t, strings.ReplaceAll(withTiers(), "model gpt-5", "model gpt-realtime"), func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(speaks(answer))
			c := dial(t, w, session, aliceKey)
			before := usedByAlice(w)
			c.say(`{"type":"response.create","response":{"instructions":"` + strings.Repeat("x", 4000) + `"}}`)
			for e := c.hears(); e.Type != "error" && e.Type != "response.done"; e = c.hears() {
			}
			if got := usedByAlice(w) - before; strings.HasPrefix(name, "served") && (got < 1000 || got > 1100) || strings.HasPrefix(name, "refused") && got != 0 {
				t.Errorf("a response that is %s, with 1000 tokens, counts as %d in the use of the tier", name, got)
			}
			c.Close()
			time.Sleep(time.Minute)
		})
	}
}

func TestATierStaysActiveByItsResponsesInAWebSocket(t *testing.T) {
	lbtest.InBubble(t, withTiers(), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(overBoth(responds("a", 7, 5), served("100%")))
		c := dial(t, w, "/v1/responses", aliceKey)
		c.say(`{"type":"response.create",` + thousand)
		c.wantServed("a")
		time.Sleep(70 * time.Second)
		post(w, "/v1/responses", "{"+thousand, bobKey).WantStatus(t, 200)
		post(w, "/v1/responses", "{"+thousand, bobKey).WantStatus(t, 200) // no other tier is active
		c.say(`{"type":"response.create",` + thousand)
		c.wantServed("a")
		post(w, "/v1/responses", "{"+thousand, bobKey).WantStatus(t, 429)
		c.Close()
		time.Sleep(time.Minute)
	})
}

// TestWhatACallerGetsInAWebSocketCountsInItsFairShare has the backend throttle
// once, so that it is shared, and alice ask for much more than bob.
func TestWhatACallerGetsInAWebSocketCountsInItsFairShare(t *testing.T) {
	for responses, want := range map[int]int{1: http.StatusOK, 20: http.StatusTooManyRequests} {
		lbtest.InBubble(t, keyed("fair_shares\nbackend http://a {\nname a\nmodel gpt-5\n}"), func(t *testing.T, w *lbtest.World) {
			throttles := lbtest.Status(429, "Retry-After-Ms", "50")
			w.Backends["a"].Replies(overBoth(responds("a", 7, 5), throttles))
			c := dial(t, w, "/v1/responses", aliceKey)
			c.say(`{"type":"response.create",` + thousand)
			c.wantServed("a")
			for range 3 {
				post(w, "/v1/responses", "{"+thousand, bobKey).WantStatus(t, 429)
			}
			time.Sleep(5 * time.Second)
			for range responses {
				c.say(`{"type":"response.create",` + thousand)
				c.wantServed("a")
			}
			w.Backends["a"].Replies(served("90%"))
			for range 2 {
				post(w, "/v1/responses", "{"+thousand, bobKey).WantStatus(t, 200)
			}
			if got := post(w, "/v1/responses", "{"+thousand, aliceKey); got.Status != want {
				t.Errorf("after %d responses in a WebSocket, alice got %d, want %d", responses, got.Status, want)
			}
			c.Close()
			time.Sleep(time.Minute)
		})
	}
}

// TestAFirstResponseThatWasNotExecutedIsNotInAFairShare has alice open many
// WebSockets, of which the backend has not executed the first response, or has.
func TestAFirstResponseThatWasNotExecutedIsNotInAFairShare(t *testing.T) {
	for code, want := range map[string]int{"rate_limit_exceeded": http.StatusOK, "server_error": http.StatusTooManyRequests} {
		lbtest.InBubble(t, keyed("fair_shares\nbackend http://a {\nname a\nmodel gpt-5\n}"), func(t *testing.T, w *lbtest.World) {
			fails := speaks(func(s *websocket.Conn, _ string) {
				websocket.Message.Send(s, `{"type":"response.created","response":{"id":"resp_a_1234567890","error":null}}`)
				websocket.Message.Send(s, `{"type":"response.failed","response":{"id":"resp_a_1234567890","status":"failed","error":{"code":"`+code+`","message":"x"}}}`)
			})
			w.Backends["a"].Replies(overBoth(fails, lbtest.Status(429, "Retry-After-Ms", "50")))
			for range 3 {
				post(w, "/v1/responses", "{"+thousand, bobKey).WantStatus(t, 429)
			}
			time.Sleep(5 * time.Second)
			for range 20 {
				c := dial(t, w, "/v1/responses", aliceKey)
				c.say(`{"type":"response.create",` + thousand)
				c.hears()
				c.hears()
				c.Close()
			}
			w.Backends["a"].Replies(served("90%"))
			post(w, "/v1/responses", "{"+thousand, bobKey).WantStatus(t, 200)
			if got := post(w, "/v1/responses", "{"+thousand, aliceKey); got.Status != want {
				t.Errorf("after 20 responses with %s, alice got %d, want %d", code, got.Status, want)
			}
			time.Sleep(time.Minute)
		})
	}
}
