package sockets

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gobwas/ws"
	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	sockets "github.com/openai-lb/caddy-openai-lb/modules/websocket"
)

// TestAMessageThatDoesNotEndFillsNoMemory neither as the first one nor after a
// response.
func TestAMessageThatDoesNotEndFillsNoMemory(t *testing.T) {
	mebibyte := strings.Repeat("x", 1<<20)
	for name, c := range map[string]struct {
		frame  []byte
		frames int
		close  uint16
	}{
		"long frames":  {masked(0x00, mebibyte), 40, 1009},
		"empty frames": {masked(0x00, ""), 1 << 17, 1008},
	} {
		for _, first := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, first %t", name, first), func(t *testing.T) {
				inPool(t, "caller alice {\nmax_requests 5\n}", func(t *testing.T, w *lbtest.World) {
					s := dial(t, w, "/v1/responses", aliceKey)
					if !first {
						s.say(hi)
						s.wantServed("a")
					}
					s.listen()
					go func() {
						s.Write(masked(0x01, "x"))
						for range c.frames {
							if _, err := s.Write(c.frame); err != nil {
								return
							}
						}
					}()
					if first {
						if e := s.hears(); e.Type != "error" || e.Status >= 500 {
							t.Errorf("the client got %s", e.raw)
						}
					}
					s.wantClosed(c.close)
					s.Close()
					time.Sleep(time.Minute)
					if n := sockets.Memory().Used(); n != 0 {
						t.Errorf("%d bytes are held", n)
					}
					if u := of(w, "alice"); u.InFlight != 0 {
						t.Errorf("alice has used %+v", u)
					}
				})
			})
		}
	}
}

// TestAFirstMessageIsHeldOnce while it waits for a backend.
func TestAFirstMessageIsHeldOnce(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		w.AllReply(speaks(func(*websocket.Conn, string) {}))
		s := dial(t, w, "/v1/responses", aliceKey)
		message := `{"type":"response.create","model":"gpt-5","input":"` + strings.Repeat("x", 5<<20) + `"}`
		s.say(message)
		synctest.Wait()
		if n := sockets.Memory().Used(); int(n) != len(message) {
			t.Errorf("of %d bytes, %d are held", len(message), n)
		}
		s.Close()
		time.Sleep(time.Minute)
		if n := sockets.Memory().Used(); n != 0 {
			t.Errorf("%d bytes are held", n)
		}
	})
}

// inFrames is a backend that opens a WebSocket, waits for a message, and then
// sends these frames.
func inFrames(frames ...ws.Frame) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		rw.Flush()
		if _, err := ws.ReadHeader(rw); err != nil {
			return
		}
		go io.Copy(io.Discard, rw)
		for _, f := range frames {
			if ws.WriteFrame(conn, f) != nil {
				return
			}
		}
		time.Sleep(10 * time.Second)
	}
}

// TestABackendThatAnswersWithControlFramesFillsNoMemory and the message goes to
// another one.
func TestABackendThatAnswersWithControlFramesFillsNoMemory(t *testing.T) {
	for name, frame := range map[string]ws.Frame{"pongs": ws.NewPongFrame(make([]byte, 125)), "empty frames": ws.NewFrame(ws.OpContinuation, false, nil)} {
		inPool(t, "", func(t *testing.T, w *lbtest.World) {
			frames := make([]ws.Frame, 100_000)
			for i := range frames {
				frames[i] = frame
			}
			frames[0] = ws.NewFrame(ws.OpText, false, nil)
			if frame.Header.OpCode.IsControl() {
				frames[0] = frame
			}
			w.Backends["a"].Replies(inFrames(frames...))
			s := dial(t, w, "/v1/responses", aliceKey)
			begun := time.Now()
			s.say(hi)
			s.wantServed("b")
			if after := time.Since(begun); after > 0 {
				t.Errorf("%s: the response comes after %v", name, after)
			}
			s.Close()
		})
	}
}

// TestABackendThatBeginsResponsesWithoutEndOpensFew whatever their ids.
func TestABackendThatBeginsResponsesWithoutEndOpensFew(t *testing.T) {
	inPool(t, "caller alice {\nrequests 10k/day\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(speaks(func(s *websocket.Conn, _ string) {
			for i := range 1000 {
				websocket.Message.Send(s, fmt.Sprintf(`{"type":"response.created","response":{"id":"resp_%010d"}}`, i))
			}
		}))
		s := dial(t, w, "/v1/responses", aliceKey)
		s.say(hi)
		for range 1000 {
			s.hears()
		}
		synctest.Wait()
		if used := of(w, "alice").Limits[0].Used; used < 1000-64 {
			t.Errorf("%d responses are open", 1000-used)
		}
		s.Close()
		time.Sleep(time.Minute)
		if u := of(w, "alice"); u.InFlight != 0 || u.Reserved != 0 {
			t.Errorf("alice has used %+v", u)
		}
	})
}

// TestNoKeyPassesHoweverAMessageIsCut into frames, or how long it is.
func TestNoKeyPassesHoweverAMessageIsCut(t *testing.T) {
	const begins, key = `{"type":"response.created","response":{"id":"resp_a_1234567890","error":null}}`, "key-of-backend-a"
	failure := `{"code":"invalid_api_key","message":"Incorrect API key: ` + key + `","type":"error"}`
	half := strings.Index(failure, key) + 7
	long := `{"type":"error","padding":"` + strings.Repeat("x", 70<<10) + `","message":"` + key + `"}`
	for name, frames := range map[string][]ws.Frame{
		"cut in two":      {ws.NewFrame(ws.OpText, false, []byte(failure[:half])), ws.NewFrame(ws.OpContinuation, true, []byte(failure[half:]))},
		"over 64 KiB":     {ws.NewTextFrame([]byte(long))},
		"in a delta":      {ws.NewTextFrame([]byte(`{"type":"response.output_text.delta","delta":"` + key + `"}`))},
		"in its reason":   {ws.NewCloseFrame(ws.NewCloseFrameBody(1008, key))},
		"type comes last": {ws.NewTextFrame([]byte(failure))},
	} {
		for _, path := range []string{"/v1/responses", "/v1/realtime?model=gpt-realtime"} {
			t.Run(name+", "+path, func(t *testing.T) {
				inPool(t, "", func(t *testing.T, w *lbtest.World) {
					w.Backends["a"].Replies(inFrames(append([]ws.Frame{ws.NewTextFrame([]byte(begins))}, frames...)...))
					s := dial(t, w, path, aliceKey)
					s.say(hi)
					s.hears()
					got := ""
					for first := byte(0); first&0x80 == 0; {
						var text string
						first, text = s.next()
						got += text
					}
					if strings.Contains(got, key) || !strings.Contains(got, strings.Repeat("*", len(key))) {
						t.Errorf("the client got %.300q", got)
					}
					s.Close()
				})
			})
		}
	}
}

// TestAClientThatLeavesWhileItsNextMessageWaitsGivesItsPlaceBack at once.
func TestAClientThatLeavesWhileItsNextMessageWaitsGivesItsPlaceBack(t *testing.T) {
	inPool(t, "caller alice {\nmax_requests 1\n}", func(t *testing.T, w *lbtest.World) {
		ended := make(chan time.Time, 1)
		w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
			speaks(func(*websocket.Conn, string) {})(rw, r)
			ended <- time.Now()
		})
		s := dial(t, w, "/v1/responses", aliceKey)
		s.say(hi)
		s.say(hi)
		time.Sleep(time.Second)
		left := time.Now()
		s.Close()
		if after := (<-ended).Sub(left); after > 0 {
			t.Errorf("the backend is told after %v", after)
		}
		synctest.Wait()
		if u := of(w, "alice"); u.InFlight != 0 {
			t.Errorf("alice has %d requests in flight", u.InFlight)
		}
		w.WantNobodyBlamed()
	})
}

func TestAHandshakeOfHTTP10IsRefused(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		for _, path := range []string{"/v1/responses", "/v1/realtime?model=gpt-realtime"} {
			r := w.Request(http.MethodGet, path, nil)
			conn, err := w.Dial(context.Background(), "tcp", r.URL.Host+":80")
			if err != nil {
				t.Fatal(err)
			}
			go fmt.Fprintf(conn, "GET %s HTTP/1.0\r\nHost: lb\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"+
				"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: Bearer %s\r\n\r\n", path, aliceKey)
			res, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil || res.StatusCode != 400 {
				t.Errorf("%s: %v, %v", path, res, err)
			}
			conn.Close()
		}
		w.WantCalls(map[string]int{"a": 0, "b": 0})
	})
}

// TestACallerThatMayGoOnNoLongerBuysNoResponse over a WebSocket that is open.
func TestACallerThatMayGoOnNoLongerBuysNoResponse(t *testing.T) {
	const audio = `{"type":"input_audio_buffer.append","audio":"AAAA"}`
	for name, c := range map[string]struct {
		before, after string // what the file of keys says of alice
		wait          time.Duration
		status        int
		reason        string
	}{
		"a revoked key":     {"alice " + aliceKey + " tier=gold", "", time.Second, 401, "Incorrect API key provided."},
		"the key of others": {"alice " + aliceKey + " tier=gold", "carol " + aliceKey + " tier=gold", time.Second, 401, "Incorrect API key provided."},
		"an expired key":    {"alice " + aliceKey + " tier=gold expires=2000-01-01", "alice " + aliceKey + " tier=gold expires=2000-01-01", 24 * time.Hour, 401, "The API key provided has expired."},
	} {
		for path, message := range map[string]string{"/v1/responses": hi, "/v1/realtime?model=gpt-realtime": `{"type":"response.create"}`, "/v1/realtime?model=x": audio} {
			t.Run(name+", "+path, func(t *testing.T) {
				file := filepath.Join(t.TempDir(), "keys")
				write := func(line string) { lbtest.WriteFile(t, file, "bob "+bobKey+" tier=gold\n"+line+"\n") }
				write(c.before)
				config := "openai_lb {\npool " + lbtest.Unique("sockets") + "\nclient_keys_file " + file + "\nbackend http://a\ntier gold {\nrequests 100/day\n}\n}"
				lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
					answers := speaks(realtime(70, 50))
					if path == "/v1/responses" {
						answers = responds("a", 7, 5)
					}
					w.Backends["a"].Replies(answers)
					s := dial(t, w, path, aliceKey)
					s.say(message)
					if message == audio {
						s.hears()
					} else {
						s.wantServed("a")
					}
					write(c.after)
					time.Sleep(c.wait)
					s.say(message)
					if e := s.hears(); e.Type != "error" || e.Status != c.status && path == "/v1/responses" {
						t.Errorf("the client got %s", e.raw)
					}
					if first, text := s.next(); first != 0x88 || text[:2] != "\x03\xf0" || !strings.HasPrefix(text[2:], c.reason) {
						t.Errorf("the client got a frame %#x %q", first, text)
					}
					s.Close()
					time.Sleep(time.Minute)
				})
			})
		}
	}
}

// TestAnIdleWebSocketIsPinged and closed if its client does not answer.
func TestAnIdleWebSocketIsPinged(t *testing.T) {
	inPool(t, "", func(t *testing.T, w *lbtest.World) {
		s := dial(t, w, "/v1/responses", aliceKey)
		s.say(hi)
		s.wantServed("a")
		time.Sleep(24 * time.Hour)
		s.say(hi)
		s.wantServed("a")
		s.Close()

		deaf, _ := handshake(t, w, "/v1/realtime?model=gpt-realtime", aliceKey)
		begun := time.Now()
		io.Copy(io.Discard, deaf)
		if after := time.Since(begun); after != time.Minute {
			t.Errorf("a client that answers no ping is closed after %v", after)
		}
		w.WantNobodyBlamed()
	})
}

// TestACallerThatANewConfigDeniesBuysNoResponse over a WebSocket that the new
// config left open.
func TestACallerThatANewConfigDeniesBuysNoResponse(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	a.Replies(responds("a", 7, 5))
	address := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	pool := lbtest.Unique("sockets")
	config := func(caller string) string {
		return "{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://" + address + " {\nopenai_lb {\npool " + pool + "\nstream_close_delay 1h\nclient_key alice " + aliceKey +
			"\nbackend " + server.URL + "\n" + caller + "\n}\n}"
	}
	lbtest.Run(t, config(""))
	conn := lbtest.Dial(t, address)
	fmt.Fprintf(conn, "GET /v1/responses HTTP/1.1\r\nHost: "+address+"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"+
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: Bearer %s\r\n\r\n", aliceKey)
	r := bufio.NewReader(conn)
	if res, err := http.ReadResponse(r, nil); err != nil || res.StatusCode != 101 {
		t.Fatal(res, err)
	}
	s := newClient(t, conn)
	s.r = r
	s.say(hi)
	s.wantServed("a")
	lbtest.Reload(t, config("timezone Europe/Berlin"))
	s.say(hi)
	s.wantServed("a")
	lbtest.Reload(t, config("caller alice deny"))
	s.say(hi)
	s.wantError(403, "permission_denied")
	s.wantClosed(1008)
}
