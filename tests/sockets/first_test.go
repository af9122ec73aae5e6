package sockets

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestTheFirstMessageOfAWebSocketDecidesOnItsBackend(t *testing.T) {
	lbtest.InBubble(t, keyed("backend http://a {\nmodel gpt-5\n}\nbackend http://b {\nmodel o3 o3-deployment\n}"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(responds("a", 7, 5))
		w.Backends["b"].Replies(responds("b", 7, 5))
		for range 3 {
			c := dial(t, w, "/v1/responses", aliceKey)
			c.say(`{"type":"response.create","model":"gpt-5","input":"hi"}`)
			c.wantServed("a")
			c.Close()
			c = dial(t, w, "/v1/responses", aliceKey)
			c.say(`{"type":"response.create","model":"o3","input":"hi"}`)
			c.wantServed("b")
			c.say(`{"type":"response.create","model":"o3","input":"hi"}`)
			c.wantServed("b")
			c.say(`{"type":"response.create","model":"gpt-5","input":"hi"}`)
			c.wantError(400, "websocket_connection_limit_reached")
			c.Close()
		}
		c := dial(t, w, "/v1/responses", aliceKey)
		c.say(`{"type":"response.create","model":"unknown","input":"hi"}`)
		c.wantError(404, "model_not_found")
		c.say(`{"type":"response.create","model":"o3","input":"hi"}`)
		c.wantServed("b")
		c.Close()
		time.Sleep(time.Second)
	})
}

const hi = `{"type":"response.create","model":"gpt-5","input":"hi"}`

// inPool runs a test with two accounts, of which a is asked first.
func inPool(t *testing.T, options string, test func(t *testing.T, w *lbtest.World)) {
	t.Helper()
	lbtest.InBubble(t, keyed("backend http://a {\napi_key key-of-backend-a\n}\nbackend http://b {\npriority 2\n}\n"+options), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(responds("a", 7, 5))
		w.Backends["b"].Replies(responds("b", 7, 5))
		test(t, w)
		time.Sleep(time.Minute)
	})
}

func TestAResponseFailsOverUntilItsFirstMessage(t *testing.T) {
	const throttled = `{"type":"error","status":429,"error":{"type":"tokens","code":"rate_limit_exceeded","message":"Rate limit reached. key-of-backend-a"},"headers":{"retry-after":"7"}}`
	for name, c := range map[string]struct {
		reply    http.HandlerFunc
		cooldown time.Duration
		most     time.Duration
	}{
		"a throttled handshake": {lbtest.Throttled("7"), 7 * time.Second, 0},
		"a broken handshake":    {lbtest.Status(500), 0, 0},
		"no WebSocket":          {lbtest.Status(404), 0, 0},
		"no upgrade":            {lbtest.Says(200, "{}"), 0, 0},
		"a 429 as an event":     {speaks(func(s *websocket.Conn, _ string) { websocket.Message.Send(s, throttled) }), 7 * time.Second, 0},
		"a failure as an event": {speaks(func(s *websocket.Conn, _ string) {
			websocket.Message.Send(s, `{"type":"response.failed","response":{"id":"resp_1","error":{"code":"server_error","message":"x"}}}`)
		}), 10 * time.Second, 0},
		"a reset":         {speaks(func(s *websocket.Conn, _ string) { s.Close() }), 10 * time.Second, 0},
		"silence":         {speaks(func(*websocket.Conn, string) {}), 10 * time.Second, 5 * time.Minute},
		"a silent server": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, 0, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inPool(t, "", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				s := dial(t, w, "/v1/responses", aliceKey)
				begun := time.Now()
				s.say(hi)
				s.wantServed("b")
				if after := time.Since(begun); after != c.most {
					t.Errorf("the response comes after %v, want %v", after, c.most)
				}
				s.Close()
				time.Sleep(time.Second)
				cooldowns := w.Logged("cooldown started")
				if (len(cooldowns) == 1) != (c.cooldown > 0) || len(cooldowns) == 1 && cooldowns[0].ContextMap()["seconds"] != c.cooldown.Seconds() {
					t.Errorf("got the cooldowns %v, want one of %v", cooldowns, c.cooldown)
				}
				// without another backend, the client gets the error as an
				// event, and may go on
				w.Backends["b"].Replies(lbtest.Status(401))
				s = dial(t, w, "/v1/responses", aliceKey)
				s.say(hi)
				e := s.hears()
				if e.Type != "error" || e.Status < 400 || e.Error.Message == "" || strings.Contains(e.raw, "key-of-backend") {
					t.Errorf("the client got %s", e.raw)
				}
				if c.cooldown == 7*time.Second && (e.Status != 429 || e.Headers["retry-after"] == "" || e.Error.Headers["retry-after"] == "") {
					t.Errorf("the client got %s", e.raw)
				}
				w.Backends["a"].Replies(responds("a", 7, 5))
				time.Sleep(4 * time.Minute)
				s.say(hi)
				s.wantServed("a")
				s.Close()
			})
		})
	}
}

func TestAHandshakeThatIsNone(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		for name, c := range map[string]struct {
			header, value string
			status        int
		}{
			"another version": {"Sec-WebSocket-Version", "8", 426},
			"no key":          {"Sec-WebSocket-Key", "", 400},
			"a short key":     {"Sec-WebSocket-Key", "aGk=", 400},
		} {
			s, res := handshake(t, w, "/v1/responses", bobKey, c.header, c.value)
			if s != nil || res.StatusCode != c.status || (res.Header.Get("Sec-WebSocket-Version") == "13") != (c.status == 426) {
				t.Errorf("%s: the handshake gives %d %v", name, res.StatusCode, res.Header)
			}
		}
		w.WantCalls(map[string]int{"a": 0, "b": 0})
	})
}

// TestAPoolOpensNoWebSocketIfNoBackendDoes but its client learns at the
// handshake that it has to use HTTP. The message that has found that out gets
// the same answer.
func TestAPoolOpensNoWebSocketIfNoBackendDoes(t *testing.T) {
	silent := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	reset := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	for _, c := range []struct {
		name, path string
		a, b       http.HandlerFunc
		status     int           // of the answer to the message
		lasts      time.Duration // how long handshakes get a 426
	}{
		{"an error of the client", "/v1/responses", lbtest.Status(400), lbtest.Status(422), 426, 10 * time.Minute},
		{"no permission", "/v1/responses", lbtest.Status(403), lbtest.Status(403), 426, 10 * time.Minute},
		{"a page", "/v1/responses", lbtest.Says(403, "<html>Forbidden</html>"), lbtest.Says(404, "<html>nginx</html>"), 426, 10 * time.Minute},
		{"no such path", "/v1/responses", lbtest.Status(426), lbtest.Status(405), 426, 10 * time.Minute},
		{"a failure", "/v1/responses", lbtest.Status(500), lbtest.Status(502), 426, time.Minute},
		{"too busy", "/v1/responses", lbtest.Status(503), lbtest.Status(503), 426, time.Minute},
		{"a reset", "/v1/responses", reset, reset, 426, time.Minute},
		{"silence", "/v1/responses", silent, silent, 426, time.Minute},
		{"a 200", "/v1/responses", lbtest.Says(200, "{}"), lbtest.Says(200, "<html>"), 426, time.Minute},
		{"the shorter one", "/v1/responses", lbtest.Status(501), lbtest.Status(500), 426, time.Minute},
		{"a query", "/v1/responses?api-version=x", lbtest.Status(404), lbtest.Status(404), 404, 0},
		{"one opens it", "/v1/responses", lbtest.Status(404), responds("b", 7, 5), 0, 0},
		{"a rejected key", "/v1/responses", lbtest.Status(401), lbtest.Status(401), 502, 0},
		{"a throttle", "/v1/responses", lbtest.Throttled("7"), lbtest.Throttled("7"), 429, 0},
		{"a throttle of one", "/v1/responses", lbtest.Status(403), lbtest.Throttled("7"), 429, 0},
		{"a rejected key at one", "/v1/responses", lbtest.Status(403), lbtest.Status(401), 426, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			inPool(t, "", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.a)
				w.Backends["b"].Replies(c.b)
				s := dial(t, w, c.path, bobKey)
				s.say(hi)
				if e := s.hears(); e.Status != c.status || c.status == 426 && e.Error.Code != "websocket_not_supported" {
					t.Errorf("the client got %s", e.raw)
				}
				s.Close()
				if c.status == 426 && c.name != "too busy" && c.name != "a rejected key at one" {
					w.WantNobodyBlamed()
				}
				opens := func() bool {
					s, res := handshake(t, w, "/v1/responses", aliceKey)
					if s == nil {
						if text, _ := io.ReadAll(res.Body); res.StatusCode != 426 || !strings.Contains(string(text), "websocket_not_supported") {
							t.Errorf("the handshake gives %d %s", res.StatusCode, text)
						}
						return false
					}
					s.Close()
					return true
				}
				if c.lasts > 0 {
					time.Sleep(c.lasts - 10*time.Second)
					if opens() {
						t.Error("it opens too early")
					}
					time.Sleep(20 * time.Second)
				}
				if !opens() {
					t.Error("it does not open")
				}
			})
		})
	}
}

// TestABackendThatOpensNoWebSocketServesHTTP and other backends open WebSockets
// meanwhile.
func TestABackendThatOpensNoWebSocketServesHTTP(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				lbtest.Status(500)(rw, r)
				return
			}
			lbtest.Says(200, `{"id":"resp_a_1234567","status":"completed","output":[]}`)(rw, r)
		})
		for range 3 {
			s := dial(t, w, "/v1/responses", aliceKey)
			s.say(hi)
			s.wantServed("b")
			s.Close()
			r := w.Request("POST", "/v1/responses", strings.NewReader(`{"model":"gpt-5","input":"hi"}`))
			r.Header.Set("Authorization", "Bearer "+aliceKey)
			w.Send(r).WantServed(t, "a")
		}
		w.WantCalls(map[string]int{"a": 4, "b": 3})
	})
}

func TestAFirstMessageThatIsNone(t *testing.T) {
	for name, c := range map[string]struct {
		frames [][]byte
		status int
		code   string
		close  uint16 // 0: it stays open
	}{
		"none in time":     {nil, 408, "request_timeout", 1008},
		"half of one":      {[][]byte{masked(0x81, hi)[:20]}, 408, "request_timeout", 1008},
		"too long":         {[][]byte{masked(0x81, `{"type":"response.create","model":"gpt-5","input":"`+strings.Repeat("x", 3000)+`"}`)}, 413, "request_too_large", 1009},
		"not JSON":         {[][]byte{masked(0x81, "hi")}, 400, "invalid_event", 0},
		"JSON after JSON":  {[][]byte{masked(0x81, hi+hi)}, 400, "invalid_event", 0},
		"of two types":     {[][]byte{masked(0x81, `{"type":"x","type":"response.create"}`)}, 400, "invalid_event", 0},
		"of another type":  {[][]byte{masked(0x81, `{"type":"session.update"}`)}, 400, "invalid_event", 0},
		"without a model":  {[][]byte{masked(0x81, `{"type":"response.create"}`)}, 400, "missing_required_parameter", 0},
		"of another model": {[][]byte{masked(0x81, `{"type":"response.create","model":"o3"}`)}, 404, "model_not_found", 0},
		"binary":           {[][]byte{masked(0x82, hi)}, 400, "invalid_body", 1003},
		"unmasked":         {[][]byte{append([]byte{0x81, byte(len(hi))}, hi...)}, 400, "invalid_body", 1002},
		"not UTF-8":        {[][]byte{masked(0x81, "\xff")}, 400, "invalid_body", 1007},
		"compressed":       {[][]byte{masked(0xc1, hi)}, 400, "invalid_body", 1003},
	} {
		t.Run(name, func(t *testing.T) {
			inPool(t, "request_buffers 2KB\ncaller alice {\nmodels gpt-5\n}", func(t *testing.T, w *lbtest.World) {
				s := dial(t, w, "/v1/responses", aliceKey)
				begun := time.Now()
				for _, f := range c.frames {
					go s.Write(f)
				}
				s.wantError(c.status, c.code)
				if c.status == 408 && time.Since(begun) != 10*time.Second {
					t.Errorf("the client waits for %v", time.Since(begun))
				}
				if n := w.TotalCalls(); n > 0 {
					t.Errorf("the backends are called %d times", n)
				}
				if c.close > 0 {
					s.wantClosed(c.close)
					return
				}
				s.say(hi)
				s.wantServed("a")
				s.Close()
			})
		})
	}
}

func TestABackendClosesBecauseOfTheMessage(t *testing.T) {
	for code, c := range map[int]struct {
		status, calls, cooldowns int
		code                     string
	}{
		1002: {400, 0, 0, "invalid_body"}, 1003: {400, 0, 0, "invalid_body"}, 1007: {400, 0, 0, "invalid_body"},
		1009: {413, 0, 0, "request_too_large"}, 1011: {0, 1, 1, ""},
	} {
		inPool(t, "", func(t *testing.T, w *lbtest.World) {
			closes := speaks(func(s *websocket.Conn, _ string) { s.WriteClose(code); s.Close() })
			w.Backends["a"].Replies(closes)
			if c.status > 0 {
				w.Backends["b"].Replies(closes)
			}
			s := dial(t, w, "/v1/responses", aliceKey)
			s.say(hi)
			if c.status > 0 {
				s.wantError(c.status, c.code)
			} else {
				s.wantServed("b")
			}
			s.Close()
			time.Sleep(time.Second)
			w.WantCalls(map[string]int{"a": 1, "b": c.calls})
			if cooldowns := w.Logged("cooldown started"); len(cooldowns) != c.cooldowns {
				t.Errorf("%d: got the cooldowns %v, want %d", code, cooldowns, c.cooldowns)
			}
		})
	}
}

func TestAFirstMessageComesAsItLikes(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		s := dial(t, w, "/v1/responses", aliceKey)
		for i, b := range masked(0x81, hi) {
			s.Write([]byte{b})
			if i%8 == 0 {
				time.Sleep(time.Second)
			}
		}
		s.wantServed("a")
		s.Close()

		// a client that leaves ends the attempt, and its pings are answered
		// until then
		w.Backends["a"].Replies(speaks(func(*websocket.Conn, string) {}))
		s = dial(t, w, "/v1/responses", aliceKey)
		s.Write(masked(0x89, "1"))
		if first, text := s.next(); first != 0x8a || text != "1" {
			t.Errorf("the client got a frame %#x %q", first, text)
		}
		s.say(hi)
		time.Sleep(time.Second)
		s.Write(masked(0x89, "2"))
		if first, text := s.next(); first != 0x8a || text != "2" {
			t.Errorf("the client got a frame %#x %q", first, text)
		}
		s.Write(masked(0x88, "\x03\xe8"))
		s.wantClosed(1000)
		s.Close()
		time.Sleep(time.Second)
		w.WantNobodyBlamed()

		s = dial(t, w, "/v1/responses", aliceKey)
		s.Close()
		time.Sleep(time.Second)
		w.WantNobodyBlamed()
	})
}

func TestANextMessageMustComeInTime(t *testing.T) {
	for frames, limit := range map[string]time.Duration{"": 5 * time.Minute, string(masked(0x01, "x")): 10 * time.Second, "\x81": 10 * time.Second} {
		inPool(t, "", func(t *testing.T, w *lbtest.World) {
			s := dial(t, w, "/v1/responses", aliceKey)
			s.say("x")
			s.wantError(400, "invalid_event")
			begun := time.Now()
			io.WriteString(s, frames)
			if s.wantClosed(1000 + 8*uint16(min(1, len(frames)))); time.Since(begun) != limit {
				after := time.Since(begun)
				t.Errorf("after %q, it is closed after %v, want %v", frames, after, limit)
			}
		})
	}
}

func TestAClientThatReadsNoPongs(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		s := dial(t, w, "/v1/responses", aliceKey)
		begun := time.Now()
		for time.Since(begun) < time.Hour {
			if _, err := s.Write(masked(0x89, strings.Repeat("1", 125))); err != nil {
				break
			}
		}
		if after := time.Since(begun); after > 12*time.Second {
			t.Errorf("its WebSocket is closed after %v", after)
		}
	})
}

func TestAWebSocketIsForTheObjectsOfItsAccount(t *testing.T) {
	inPool(t, "affinity {\ncallers strict\n}", func(t *testing.T, w *lbtest.World) {
		s := dial(t, w, "/v1/responses", aliceKey)
		s.say(hi)
		atA := s.wantServed("a")
		s.say(`{"type":"response.create","model":"gpt-5","previous_response_id":"` + atA + `"}`)
		s.wantServed("a")
		w.Backends["a"].Replies(lbtest.Throttled("7"))
		other := dial(t, w, "/v1/responses", aliceKey)
		other.say(hi)
		atB := other.wantServed("b")
		s.say(`{"type":"response.create","model":"gpt-5","previous_response_id":"` + atB + `"}`)
		s.wantError(400, "websocket_connection_limit_reached")
		other.say(`{"type":"response.create","model":"gpt-5","previous_response_id":"` + atB + `"}`)
		other.wantServed("b")
		w.Backends["a"].Replies(responds("a", 7, 5))
		time.Sleep(10 * time.Second)
		third := dial(t, w, "/v1/responses", aliceKey)
		third.say(`{"type":"response.create","model":"gpt-5","previous_response_id":"` + atB + `"}`)
		third.wantServed("b")

		bobs := dial(t, w, "/v1/responses", bobKey)
		bobs.say(`{"type":"response.create","model":"gpt-5","previous_response_id":"` + atB + `"}`)
		bobs.wantError(404, "previous_response_not_found")
		bobs.say(hi)
		bobs.wantServed("a")
		bobs.say(`{"type":"response.create","model":"gpt-5","previous_response_id":"` + atA + `"}`)
		bobs.wantError(404, "previous_response_not_found")
		bobs.say(`{"type":"response.cancel","response_id":"` + atA + `"}`)
		bobs.wantError(400, "invalid_event")
		for _, c := range []*client{s, other, third, bobs} {
			c.Close()
		}
	})
}

// steerable is a backend whose response goes on until it is steered: then
// another one follows it.
func steerable(name string) http.HandlerFunc {
	var n atomic.Int32
	return speaks(func(socket *websocket.Conn, message string) {
		event := func(kind, id, status string) {
			websocket.Message.Send(socket, fmt.Sprintf(`{"type":"response.%s","response":{"id":"%s","object":"response","status":"%s","usage":{"input_tokens":7,"output_tokens":5}}}`, kind, id, status))
		}
		var asked struct {
			Type     string
			Previous string `json:"previous_response_id"`
		}
		json.Unmarshal([]byte(message), &asked)
		if asked.Type == "response.steer" {
			event("incomplete", asked.Previous, "incomplete")
		}
		event("created", fmt.Sprintf("resp_%s_%010d", name, n.Add(1)), "in_progress")
	})
}

func TestASteeredResponseIsForTheObjectsOfItsCaller(t *testing.T) {
	for _, options := range []string{"affinity {\ncallers strict\n}", ""} {
		inPool(t, options+"\ncaller alice {\nmodels gpt-5\ntokens 50/day\n}", func(t *testing.T, w *lbtest.World) {
			w.AllReply(steerable("a"))
			s := dial(t, w, "/v1/responses", aliceKey)
			s.say(`{"type":"response.create","model":"gpt-5","input":"Hi","max_output_tokens":5}`)
			first := s.hears().Response.ID
			steer := func(id string) string {
				return `{"type":"response.steer","previous_response_id":"` + id + `","input":"louder"}`
			}
			bobs := dial(t, w, "/v1/responses", bobKey)
			bobs.say(hi)
			ofBob := bobs.hears().Response.ID
			s.say(steer(ofBob))
			s.wantError(404, "previous_response_not_found")
			bobs.say(steer(first))
			bobs.wantError(404, "previous_response_not_found")

			s.say(steer(first))
			if e := s.hears(); e.Type != "response.incomplete" || e.Response.ID != first {
				t.Errorf("the client got %s", e.raw)
			}
			second := s.hears().Response.ID
			bobs.say(`{"type":"response.create","model":"gpt-5","previous_response_id":"` + second + `"}`)
			bobs.wantError(404, "previous_response_not_found") // what the session began is alice's, too
			s.say(steer(second))
			s.hears()
			third := s.hears().Response.ID
			s.say(steer(third)) // 36 tokens are used then
			s.hears()
			s.hears()
			s.say(steer(third))
			s.wantError(429, "insufficient_quota")
			s.Close()
			bobs.Close()
			time.Sleep(time.Minute)
		})
	}
}

func TestEachResponseOfAWebSocketIsARequestOfItsCaller(t *testing.T) {
	for name, c := range map[string]struct {
		limit string
		code  string
		used  int64
	}{
		"requests":     {"requests 2/second", "rate_limit_exceeded", 24},
		"tokens":       {"tokens 20/second", "rate_limit_exceeded", 24},
		"a day":        {"requests 2/day", "insufficient_quota", 24},
		"its duration": {"max_requests 1", "", 36},
	} {
		t.Run(name, func(t *testing.T) {
			inPool(t, "caller alice {\n"+c.limit+"\n}", func(t *testing.T, w *lbtest.World) {
				s := dial(t, w, "/v1/responses", aliceKey)
				s.say(hi)
				s.wantServed("a")
				if c.limit != "tokens 20/second" {
					s.say(hi)
					s.wantServed("a")
				} else {
					c.used = 12
				}
				s.say(hi)
				if c.code == "" {
					s.wantServed("a")
				} else {
					e := s.wantError(429, c.code)
					if c.code == "rate_limit_exceeded" && e.Headers["retry-after"] == "" || c.code != "rate_limit_exceeded" && e.Headers["x-should-retry"] != "false" {
						t.Errorf("the client got %s", e.raw)
					}
				}
				s.Close()
				time.Sleep(time.Minute)
				if u := of(w, "alice"); u.Today != c.used || u.InFlight != 0 || u.Reserved != 0 {
					t.Errorf("alice has used %+v", u)
				}
			})
		})
	}
}

func TestAHandshakeWaitsForABackendThatThrottles(t *testing.T) {
	lbtest.InBubble(t, keyed("backend http://a\nwait 2s"), func(t *testing.T, w *lbtest.World) {
		a := w.Backends["a"]
		a.Replies(lbtest.Status(http.StatusTooManyRequests, "Retry-After-Ms", "500"))
		time.AfterFunc(400*time.Millisecond, func() { a.Replies(speaks(realtime(70, 50))) })
		begun := time.Now()
		c := dial(t, w, session, aliceKey)
		if took := time.Since(begun); took < 500*time.Millisecond || took > 510*time.Millisecond {
			t.Errorf("the handshake took %s", took)
		}
		c.Close()
		time.Sleep(time.Minute)
	})
}

// TestASteeredResponseIsOfTheModelOfTheResponseBefore even if the WebSocket was
// opened for another model: it counts for that model's limits.
func TestASteeredResponseIsOfTheModelOfTheResponseBefore(t *testing.T) {
	inPool(t, "caller alice {\ntokens 1k/day gpt-5\n}", func(t *testing.T, w *lbtest.World) {
		n := 0
		w.AllReply(speaks(func(socket *websocket.Conn, message string) {
			event := func(kind, id string) {
				websocket.Message.Send(socket, fmt.Sprintf(`{"type":"response.%s","response":{"id":"%s","object":"response","usage":{"input_tokens":7,"output_tokens":5}}}`, kind, id))
			}
			var asked struct {
				Type, Model string
				Previous    string `json:"previous_response_id"`
			}
			json.Unmarshal([]byte(message), &asked)
			if asked.Type == "response.steer" {
				event("incomplete", asked.Previous)
			}
			n++
			id := fmt.Sprintf("resp_a_%010d", n)
			if event("created", id); asked.Model == "luna" {
				event("completed", id)
			}
		}))
		c := dial(t, w, "/v1/responses", aliceKey)
		c.say(`{"type":"response.create","model":"luna","input":"Hi","max_output_tokens":5}`)
		c.hears()
		c.hears()
		c.say(`{"type":"response.create","model":"gpt-5","input":"Hi","max_output_tokens":5}`)
		id := c.hears().Response.ID
		steer := func() {
			c.say(`{"type":"response.steer","previous_response_id":"` + id + `","model":"luna","input":"louder"}`)
		}
		for i := range int64(3) {
			steer()
			c.hears()
			id = c.hears().Response.ID
			synctest.Wait()
			limits := lbtest.LimitersOf(w.Handler.Pool).Get(time.Now(), "alice").Snapshot(time.Now()).Limits
			if used := limits[0].Used; used < 12*(i+1) {
				t.Errorf("after %d steers, %d tokens of the model are used", i+1, used)
			}
		}
		c.Close()
		time.Sleep(time.Minute)
	})
}
