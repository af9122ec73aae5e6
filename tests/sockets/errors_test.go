package sockets

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestAnErrorSettlesNoResponseThatHasBegun has a client provoke errors about
// other messages.
func TestAnErrorSettlesNoResponseThatHasBegun(t *testing.T) {
	const failure = `{"type":"error","status":400,"error":{"type":"invalid_request_error","code":"unknown_event","message":"Unknown event."}}`
	const created = `{"type":"response.created","response":{"id":"resp_a_1234567890","error":null}}`
	const delta = `{"type":"response.output_text.delta","delta":"hello"}`
	for name, events := range map[string][]string{
		"after it began": {created, delta, "", failure},
		"before":         {"", failure, created, delta},
		"and it fails":   {created, delta, `{"type":"response.failed","response":{"id":"resp_a_1234567890","status":"failed","error":{"code":"server_error","message":"x"}}}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inPool(t, "caller alice {\ntokens 100k/day\n}", func(t *testing.T, w *lbtest.World) {
				at := 0
				w.Backends["a"].Replies(speaks(func(s *websocket.Conn, _ string) {
					if at == 0 {
						websocket.Message.Send(s, `{"type":"response.in_progress"}`)
					}
					for ; at < len(events) && events[at] != ""; at++ {
						websocket.Message.Send(s, events[at])
					}
					at++
				}))
				s := dial(t, w, "/v1/responses", aliceKey)
				s.say(`{"type":"response.create","model":"gpt-5","max_output_tokens":50,"input":"` + strings.Repeat("x", 4000) + `"}`)
				s.hears()
				s.say(`{"type":"bogus"}`)
				for range 3 {
					s.hears()
				}
				s.Close()
				time.Sleep(time.Minute)
				if u := of(w, "alice"); u.Today < 1000 || u.Today > 1100 || u.InFlight != 0 || u.Reserved != 0 {
					t.Errorf("alice has used %+v", u)
				}
			})
		})
	}
}

// TestARejectedResponseOfASessionCostsNothing and does not stay open.
func TestARejectedResponseOfASessionCostsNothing(t *testing.T) {
	for name, id := range map[string]string{"by the id of its message": `,"event_id":"mine"`, "by its code": ""} {
		t.Run(name, func(t *testing.T) {
			inSession(t, "caller alice {\ntokens 3k/minute\n}", func(t *testing.T, w *lbtest.World, _ *client) {
				w.Backends["a"].Replies(speaks(func(s *websocket.Conn, _ string) {
					websocket.Message.Send(s, `{"type":"error","event_id":"e","error":{"type":"invalid_request_error","code":"conversation_already_has_active_response","message":"x"`+id+`}}`)
				}))
				c := dial(t, w, session, aliceKey)
				for range 3 {
					c.say(`{"type":"response.create"` + id + `}`)
					if e := c.hears(); e.Type != "error" {
						t.Errorf("the client got %s", e.raw)
					}
					if u := of(w, "alice"); u.Today != 0 || u.Reserved != 0 || u.InFlight != 2 {
						t.Errorf("alice has used %+v", u)
					}
				}
				c.Close()
				time.Sleep(30 * time.Second) // after 60 s without an answer to a ping, the first session of hers ends, too
				if u := of(w, "alice"); u.Today != 0 || u.Reserved != 0 || u.InFlight != 1 {
					t.Errorf("alice has used %+v", u)
				}
			})
		})
	}
}

// TestACallerOverItsLimitOpensNoWebSocket so that its first messages fill no
// memory.
func TestACallerOverItsLimitOpensNoWebSocket(t *testing.T) {
	for _, limit := range []string{"requests 1/minute", "tokens 10/minute", "max_requests 1"} {
		t.Run(limit, func(t *testing.T) {
			inPool(t, "caller alice {\n"+limit+"\n}", func(t *testing.T, w *lbtest.World) {
				s := dial(t, w, "/v1/responses", aliceKey)
				s.say(`{"type":"response.create","model":"gpt-5"}`)
				s.wantServed("a")
				if limit == "max_requests 1" {
					w.Backends["a"].Replies(speaks(func(*websocket.Conn, string) {}))
					other := dial(t, w, "/v1/responses", aliceKey)
					other.say(hi)
					defer other.Close()
					time.Sleep(time.Second)
				}
				if c, res := handshake(t, w, "/v1/responses", aliceKey); c != nil || res.StatusCode != http.StatusTooManyRequests {
					t.Errorf("the handshake gives %d %v", res.StatusCode, res.Header)
				}
				s.Close()
			})
		})
	}
}

// TestAWebSocketIsARequestInFlightUntilItsFirstMessageHasCome so that halves of
// messages fill no memory.
func TestAWebSocketIsARequestInFlightUntilItsFirstMessageHasCome(t *testing.T) {
	inPool(t, "caller alice {\nmax_requests 1\n}", func(t *testing.T, w *lbtest.World) {
		s := dial(t, w, "/v1/responses", aliceKey)
		s.Write(masked(0x01, "half a message"))
		if c, res := handshake(t, w, "/v1/responses", aliceKey); c != nil || res.StatusCode != http.StatusTooManyRequests {
			t.Error("a second WebSocket opens")
		}
		s.wantError(408, "request_timeout")
		s.Close()
		time.Sleep(time.Minute)
		for range 2 { // the first one does not count once its response is over
			s = dial(t, w, "/v1/responses", aliceKey)
			s.say(hi)
			s.wantServed("a")
			defer s.Close()
		}
		if use := of(w, "alice"); use.InFlight != 0 {
			t.Errorf("%d requests are in flight", use.InFlight)
		}
	})
}

// TestARequestBeginsWithItsFirstMessage and not when its WebSocket was opened.
func TestARequestBeginsWithItsFirstMessage(t *testing.T) {
	inPool(t, "lb_try_duration 5s", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Status(500))
		s := dial(t, w, "/v1/responses", aliceKey)
		time.Sleep(8 * time.Second)
		s.say(hi)
		s.wantServed("b")
		s.Close()
	})
}

// TestOpenResponsesOfAWebSocketAreFew whatever the limits of its caller.
func TestOpenResponsesOfAWebSocketAreFew(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(speaks(func(s *websocket.Conn, _ string) { websocket.Message.Send(s, `{"type":"response.in_progress"}`) }))
		s := dial(t, w, "/v1/responses", aliceKey)
		for range 64 {
			s.say(hi)
			if e := s.hears(); e.Type == "error" {
				t.Fatalf("the client got %s", e.raw)
			}
		}
		s.say(hi)
		s.wantError(429, "rate_limit_exceeded")
		s.Close()
	})
}

// TestASessionHasNoOtherModelInside to transcribe, or by a name in another
// case.
func TestASessionHasNoOtherModelInside(t *testing.T) {
	inSession(t, "caller alice {\nmodels gpt-realtime whisper-1\n}", func(t *testing.T, _ *lbtest.World, c *client) {
		for m, code := range map[string]string{
			`"session":{"audio":{"input":{"transcription":{"model":"whisper-1"}}}}`:      "",
			`"session":{"audio":{"input":{"transcription":{"model":"gpt-transcribe"}}}}`: "model_not_found",
			`"session":{"input_audio_transcription":{"model":"gpt-transcribe"}}`:         "model_not_found",
			`"Session":{"model":"o3"}`:  "missing_required_parameter",
			`"Response":{"model":"o3"}`: "missing_required_parameter",
		} {
			c.say(`{"type":"session.update",` + m + `}`)
			if e := c.hears(); e.Error.Code != code {
				t.Errorf("for %s, the client got %s", m, e.raw)
			}
		}
	})
}
