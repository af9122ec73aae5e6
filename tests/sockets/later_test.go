package sockets

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/ledger"
)

// TestEachMessageHasTheBackendsNameOfTheModel also when two responses are asked
// for at once.
func TestEachMessageHasTheBackendsNameOfTheModel(t *testing.T) {
	lbtest.InBubble(t, keyed("backend http://a {\nmodel gpt-5 deployment-5\n}\ncaller alice {\ntokens 100k/day gpt-5\n}"), func(t *testing.T, w *lbtest.World) {
		got := make(chan string, 1)
		answer := responds("a", 7, 5)
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Sec-Websocket-Extensions") != "" {
				t.Error("the backend may compress")
			}
			speaks(func(s *websocket.Conn, m string) { got <- m })(rw, r)
		})
		c, _ := handshake(t, w, "/v1/responses", bobKey, "Sec-WebSocket-Extensions", "permessage-deflate")
		c.say(hi)
		time.Sleep(time.Second)
		c.Close()
		time.Sleep(time.Second)
		w.Backends["a"].Replies(answer)
		c = dial(t, w, "/v1/responses", aliceKey)
		c.Write(append(append(masked(0x81, hi), masked(0x81, hi)...), masked(0x81, `{"type":"response.steer","input":"x"}`)...))
		c.wantServed("a")
		c.wantServed("a")
		c.Close()
		time.Sleep(time.Minute)
		if m := <-got; m != strings.Replace(hi, "gpt-5", "deployment-5", 1) {
			t.Errorf("the backend got %q", m)
		}
		if u := of(w, "alice"); u.Today != 24 || u.Limits[0].Used != 24 || u.InFlight != 0 || u.Reserved != 0 {
			t.Errorf("alice has used %+v", u)
		}
	})
}

func TestAMessageHasAServiceTierOfItsCallers(t *testing.T) {
	inPool(t, "caller alice {\nservice_tiers default\n}", func(t *testing.T, w *lbtest.World) {
		s := dial(t, w, "/v1/responses", aliceKey)
		for range 2 {
			s.say(`{"type":"response.create","model":"gpt-5","service_tier":"priority"}`)
			s.wantError(400, "invalid_value")
			s.say(hi)
			s.wantServed("a")
		}
		s.Close()
	})
}

// TestAResponseThatIsCutCostsItsEstimate has the backend break off.
func TestAResponseThatIsCutCostsItsEstimate(t *testing.T) {
	inPool(t, "caller alice {\ntokens 10k/day\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(speaks(func(s *websocket.Conn, _ string) {
			websocket.Message.Send(s, `{"type":"response.created","response":{"id":"resp_a_1234567890","error":null}}`)
			websocket.Message.Send(s, `{"type":"response.output_text.delta","delta":"hello"}`)
			s.Close()
		}))
		s := dial(t, w, "/v1/responses", aliceKey)
		s.say(`{"type":"response.create","model":"gpt-5","max_output_tokens":50,"input":"` + strings.Repeat("x", 400) + `"}`)
		s.hears()
		s.hears()
		s.Close()
		time.Sleep(time.Minute)
		if u := of(w, "alice"); u.Today < 100 || u.Today > 200 || u.InFlight != 0 || u.Reserved != 0 {
			t.Errorf("alice has used %+v", u)
		}
	})
}

// TestALateErrorChargesNothing has an error in place of the second response.
// One of the client's own costs a request.
func TestALateErrorChargesNothing(t *testing.T) {
	for name, its := range map[string]struct {
		failure  string
		status   int
		code     string
		requests int64
	}{
		"a throttle":                {`{"type":"error","status":429,"error":{"type":"tokens","code":"rate_limit_exceeded","message":"Rate limit reached."}}`, 429, "rate_limit_exceeded", 2},
		"a mistake of the client's": {`{"type":"error","status":400,"error":{"type":"invalid_request_error","code":"unsupported_value","message":"Unsupported value."}}`, 400, "unsupported_value", 4},
	} {
		t.Run(name, func(t *testing.T) {
			inPool(t, "caller alice {\ntokens 10k/day\nrequests 10/day\n}", func(t *testing.T, w *lbtest.World) {
				n := 0
				w.Backends["a"].Replies(speaks(func(s *websocket.Conn, _ string) {
					if n++; n%2 == 0 {
						websocket.Message.Send(s, its.failure)
						return
					}
					websocket.Message.Send(s, fmt.Sprintf(`{"type":"response.completed","response":{"id":"resp_a_%010d","usage":{"input_tokens":7,"output_tokens":5}}}`, n))
				}))
				s := dial(t, w, "/v1/responses", aliceKey)
				for range 2 {
					s.say(hi)
					s.wantServed("a")
					s.say(hi)
					s.wantError(its.status, its.code)
				}
				s.Close()
				time.Sleep(time.Minute)
				if u := of(w, "alice"); u.Today != 24 || u.Limits[0].Used != its.requests || u.InFlight != 0 || u.Reserved != 0 {
					t.Errorf("alice has used %+v", u)
				}
			})
		})
	}
}

// TestAReloadClosesWebSockets also those that have said nothing yet.
func TestAReloadClosesWebSockets(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	a.Replies(responds("a", 7, 5))
	address := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	config := func(n int) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://%s {\nheader X-Config %d\nopenai_lb {\nbackend %s\n}\n}", address, n, server.URL)
	}
	lbtest.Run(t, config(1))
	open := func() io.ReadWriteCloser {
		socket, err := websocket.Dial("ws://"+address+"/v1/responses", "", "http://"+address)
		if err != nil {
			t.Fatal(err)
		}
		socket.SetDeadline(time.Now().Add(2 * time.Minute))
		return socket
	}
	silent, talks := open(), open()
	io.WriteString(talks, hi)
	buf := make([]byte, 4096)
	if n, err := talks.Read(buf); err != nil || !strings.Contains(string(buf[:n]), "response.created") {
		t.Fatalf("%s %v", buf[:n], err)
	}
	lbtest.Reload(t, config(2))
	for _, s := range []io.ReadWriteCloser{silent, talks} {
		if rest, err := io.ReadAll(s); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("the client reads %q, %v, and not the end", rest, err)
		}
		s.Close()
	}
}

// TestAPoolWhoseBackendsHaveNoWebSocketSaysSo at the second handshake, so that
// clients use HTTP.
func TestAPoolWhoseBackendsHaveNoWebSocketSaysSo(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Status(404))
		s := dial(t, w, "/v1/responses", aliceKey)
		s.say(hi)
		if e := s.hears(); e.Type != "error" || e.Status != 426 {
			t.Errorf("the client got %s", e.raw)
		}
		s.Close()
		if _, res := handshake(t, w, "/v1/responses", aliceKey); res.StatusCode != http.StatusUpgradeRequired {
			t.Errorf("the second handshake gives %d", res.StatusCode)
		}
		w.WantNobodyBlamed()
		w.AllReply(responds("a", 7, 5))
		time.Sleep(10 * time.Minute)
		s = dial(t, w, "/v1/responses", aliceKey)
		s.say(hi)
		s.wantServed("a")
		s.Close()
	})
}

func TestALateErrorShowsNoKeyOfABackend(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		w.AllReply(speaks(func(s *websocket.Conn, _ string) {
			websocket.Message.Send(s, `{"type":"response.created","response":{"id":"resp_a_1234567890","error":null}}`)
			time.Sleep(time.Second)
			websocket.Message.Send(s, `{"type":"error","status":401,"error":{"code":"invalid_api_key","message":"Incorrect API key provided: key-of-backend-a"}}`)
		}))
		c := dial(t, w, "/v1/responses", aliceKey)
		c.say(`{"type":"response.create","model":"gpt-5","input":"hi"}`)
		c.hears()
		if e := c.hears(); e.Type != "error" || e.Error.Code != "invalid_api_key" || !strings.HasSuffix(e.Error.Message, "provided: ****************") {
			t.Errorf("the client got %s", e.raw)
		}
		c.Close()
		time.Sleep(time.Minute)
	})
}

func TestEachResponseIsBilledByItsModel(t *testing.T) {
	lbtest.InBubble(t, keyed("backend http://a"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(responds("a", 7, 5))
		s := dial(t, w, "/v1/responses", aliceKey)
		for _, message := range []string{hi, strings.Replace(hi, "gpt-5", "o5", 1), hi} {
			s.say(message)
			s.wantServed("a")
		}
		s.Close()
		time.Sleep(time.Second)
		pages, err := ledger.Pages(t.Context(), func(where ledger.Where) bool { return where.Pool == w.Handler.Pool })
		if err != nil {
			t.Fatal(err)
		}
		got := make(map[string]int64)
		for _, e := range ledger.Entries(pages) {
			got[e.Caller+" "+e.Model+" "+e.Backend] += e.Output
		}
		if want := map[string]int64{"alice gpt-5 a": 10, "alice o5 a": 5}; !maps.Equal(got, want) {
			t.Errorf("the bill has %v, want %v", got, want)
		}
	})
}
