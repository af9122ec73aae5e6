package sockets

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gobwas/ws"
	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const session = "/v1/realtime?model=gpt-realtime"

// realtime is the backend of a session. It answers a response.create with a
// response that uses these tokens, and begins such a response by itself after
// audio.
func realtime(input, output int) func(socket *websocket.Conn, message string) {
	n := 0
	return func(socket *websocket.Conn, message string) {
		if !strings.Contains(message, "response.create") && !strings.Contains(message, "audio_buffer.commit") {
			websocket.Message.Send(socket, `{"event_id":"event_1","type":"echo","echo":`+message+`}`)
			return
		}
		n++
		id := fmt.Sprintf("resp_a_%010d", n)
		websocket.Message.Send(socket, `{"event_id":"event_1","type":"response.created","response":{"id":"`+id+`","status":"in_progress","usage":null}}`)
		websocket.Message.Send(socket, `{"event_id":"event_2","type":"response.output_text.delta","response_id":"`+id+`","delta":"hello"}`)
		websocket.Message.Send(socket, fmt.Sprintf(`{"event_id":"event_3","type":"response.done","response":{"id":"%s","status":"completed","usage":{"total_tokens":%d,"input_tokens":%d,"output_tokens":%d,"input_token_details":{"cached_tokens":2}}}}`, id, input+output, input, output))
	}
}

func inSession(t *testing.T, options string, test func(t *testing.T, w *lbtest.World, c *client)) {
	t.Helper()
	lbtest.InBubble(t, keyed("backend http://a\n"+options), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(speaks(realtime(70, 50)))
		c := dial(t, w, session, aliceKey)
		test(t, w, c)
		c.Close()
		time.Sleep(time.Minute)
	})
}

func TestResponsesOfARealtimeSessionAreChargedWhatTheyReport(t *testing.T) {
	for name, options := range map[string]string{
		"a limit": "caller alice {\ntokens 10k/day\n}", "no limit of hers": "caller bob {\ntokens 10k/day\n}", "a limit of the model": "caller alice {\ntokens 10k/day gpt-realtime\n}",
	} {
		t.Run(name, func(t *testing.T) {
			inSession(t, options, func(t *testing.T, w *lbtest.World, c *client) {
				for i := range 3 {
					c.say(`{"type":"response.create"}`)
					c.wantServed("a")
					synctest.Wait()
					if s := of(w, "alice"); s.Today != int64(120*(i+1)) || s.Reserved != 0 {
						t.Errorf("alice has used %d tokens, and %d are reserved", s.Today, s.Reserved)
					}
				}
				c.say(`{"type":"input_audio_buffer.commit"}`) // the session begins a response by itself
				c.wantServed("a")
				c.Close()
				time.Sleep(time.Minute)
				if s := of(w, "alice"); s.Today != 480 || s.Reserved != 0 || s.InFlight != 0 || len(s.Limits) > 0 && s.Limits[0].Used != 480 {
					t.Errorf("alice has used %+v", s)
				}
			})
		})
	}
}

func TestASessionWhoseTokensAreUsedUpStaysOpen(t *testing.T) {
	for _, limit := range []string{"tokens 200/minute", "tokens 200/minute gpt-realtime"} {
		inSession(t, "caller alice {\n"+limit+"\n}", func(t *testing.T, w *lbtest.World, c *client) {
			c.say(`{"type":"response.create"}`)
			c.wantServed("a")
			c.say(`{"type":"response.create"}`)
			for e := c.hears(); e.Type != "response.done" || e.Response.StatusDetails.Error.Code != "rate_limit_exceeded"; e = c.hears() {
				if e.Type == "error" {
					t.Fatal(e.raw)
				}
			}
			c.say(`{"type":"conversation.item.create","event_id":"mine"}`)
			if e := c.hears(); e.Type != "echo" {
				t.Errorf("the client got %s", e.raw)
			}
			time.Sleep(2 * time.Minute)
			c.say(`{"type":"response.create"}`)
			c.wantServed("a")
		})
	}
}

// TestAudioDoesNotPassWhileTheTokensAreUsedUp because a session may begin a
// response after it by itself. The client is told once a second.
func TestAudioDoesNotPassWhileTheTokensAreUsedUp(t *testing.T) {
	for _, limit := range []string{"tokens 120/minute", "tokens 120/minute gpt-realtime"} {
		inSession(t, "caller alice {\n"+limit+"\n}", func(t *testing.T, w *lbtest.World, c *client) {
			const audio, other = `{"type":"input_audio_buffer.append","event_id":"mine","audio":"AAAA"}`, `{"type":"conversation.item.create"}`
			wantEcho := func(of string) {
				t.Helper()
				if e := c.hears(); e.Type != "echo" || !strings.Contains(e.raw, of) {
					t.Errorf("the client got %s, want an echo of %s", e.raw, of)
				}
			}
			c.say(audio)
			wantEcho(audio)
			c.say(`{"type":"response.create"}`)
			c.wantServed("a")
			synctest.Wait()
			for range 2 {
				c.say(audio)
				if e := c.hears(); e.Type != "error" || e.Error.Code != "rate_limit_exceeded" || e.Error.EventID != "mine" {
					t.Errorf("the client got %s", e.raw)
				}
				c.say(audio)
				c.say(audio)
				c.say(other)
				wantEcho(other)
				time.Sleep(time.Second)
			}
			time.Sleep(2 * time.Minute)
			c.say(audio)
			wantEcho(audio)
		})
	}
}

func TestAMessageThatCanBeReadInTwoWaysDoesNotPass(t *testing.T) {
	inSession(t, "caller alice {\ntokens 10k/day\n}", func(t *testing.T, w *lbtest.World, c *client) {
		for _, message := range []string{`{"type":"x","type":"response.create"}`, `[{"type":"response.create"}]`, `{"type":"x"} {"type":"response.create"}`, `{"type"`, ``} {
			c.say(message)
			if e := c.hears(); e.Type != "error" || e.Error.Type != "invalid_request_error" {
				t.Errorf("%s: the client got %s", message, e.raw)
			}
		}
		if c.say(`{"type":"x"}`); c.hears().Type != "echo" {
			t.Error("the session is over")
		}
	})
}

func TestASessionIsForTheModelsOfItsCaller(t *testing.T) {
	inSession(t, "caller alice {\nmodels gpt-realtime\n}", func(t *testing.T, w *lbtest.World, c *client) {
		for _, message := range []string{
			`{"type":"session.update","event_id":"mine","session":{"model":"o3"}}`,
			`{"type":"session.update","event_id":"mine","session":{"model":"gpt-realtime"},"session":{"model":"o3"}}`,
			`{"type":"session.update","event_id":"mine","model":"o3"}`,
			`{"type":"response.create","event_id":"mine","response":{"model":"o3"}}`,
		} {
			c.say(message)
			if e := c.hears(); e.Type != "error" || e.Error.Code != "model_not_found" || e.Error.EventID != "mine" {
				t.Errorf("%s: the client got %s", message, e.raw)
			}
		}
		c.say(`{"type":"session.update","session":{"model":"gpt-realtime"}}`)
		if e := c.hears(); e.Type != "echo" {
			t.Errorf("the client got %s", e.raw)
		}
		if n := len(w.Logged("reply broken")); n > 0 {
			t.Error("the backend is blamed")
		}
	})
}

func TestWhatCannotBeReadClosesTheSession(t *testing.T) {
	long := `{"type":"input_audio_buffer.append","audio":"` + strings.Repeat("A", 16<<20) + `"}`
	for name, c := range map[string]struct {
		frame []byte
		code  uint16
	}{
		"compressed":              {masked(0xc1, "x"), 1003},
		"binary":                  {masked(0x82, "{}"), 1003},
		"longer than 16 MiB":      {masked(0x81, long), 1009},
		"in two frames":           {append(masked(0x01, long[:8<<20]), masked(0x80, long[8<<20:])...), 1009},
		"a length of 63 bits":     {[]byte{0x81, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4}, 1009},
		"a continuation of none":  {masked(0x80, "x"), 1002},
		"a message in a message":  {append(masked(0x01, "x"), masked(0x81, "{}")...), 1002},
		"an unknown opcode":       {masked(0x83, "x"), 1002},
		"a control frame in two":  {masked(0x09, "x"), 1002},
		"a long control frame":    {masked(0x89, strings.Repeat("x", 126)), 1002},
		"an unknown control code": {masked(0x8b, "x"), 1002},
	} {
		t.Run(name, func(t *testing.T) {
			inSession(t, "caller alice {\ntokens 10k/day\n}", func(t *testing.T, w *lbtest.World, s *client) {
				go s.Write(c.frame)
				s.wantClosed(c.code)
			})
		})
	}
}

// records is a backend that opens a WebSocket, sends these bytes, and passes on
// all that it gets.
func records(got chan<- string, sends ...byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		rw.Flush()
		go conn.Write(sends)
		all, _ := io.ReadAll(rw)
		got <- string(all)
	}
}

// read returns the frames in what one side has got, without their masks.
func read(t *testing.T, got string) (frames []string) {
	t.Helper()
	for r := strings.NewReader(got); r.Len() > 0; {
		h, err := ws.ReadHeader(r)
		text := make([]byte, h.Length)
		if _, more := io.ReadFull(r, text); err != nil || more != nil {
			t.Fatal(err, more)
		}
		if h.Masked {
			ws.Cipher(text, h.Mask, 0)
		}
		frames = append(frames, fmt.Sprintf("%d %t %s", h.OpCode, h.Fin, text))
	}
	return frames
}

func TestMessagesInPiecesPassAsTheyAre(t *testing.T) {
	lbtest.InBubble(t, keyed("backend http://a\ncaller alice {\ntokens 10k/day\n}"), func(t *testing.T, w *lbtest.World) {
		got := make(chan string, 1)
		w.Backends["a"].Replies(records(got))
		c := dial(t, w, session, aliceKey)
		first, ping, last, end := masked(0x01, `{"type":"x",`), masked(0x89, "ping"), masked(0x80, `"y":1}`), masked(0x88, "\x03\xe8bye")
		for _, b := range slices.Concat(first, ping, last, end) {
			c.Write([]byte{b})
			time.Sleep(100 * time.Millisecond)
		}
		c.Close()
		// a ping does not wait for the message in which it comes, and a message
		// that was read is one frame
		want := read(t, string(slices.Concat(ping, masked(0x81, `{"type":"x","y":1}`), end)))
		if got := read(t, <-got); !slices.Equal(got, want) {
			t.Errorf("the backend got %q, want %q", got, want)
		}
		time.Sleep(time.Minute)
	})
}

// manyFrames returns so many messages with different lengths, some in pieces,
// as a client or a server sends them.
func manyFrames(random *rand.Rand, n int, frame func(first byte, payload string) []byte) (all []byte, messages []string) {
	for i := range n {
		text := fmt.Sprintf(`{"type":"conversation.item.create","event_id":"%d","item":"%s"}`, i, strings.Repeat("x", int(math.Exp(9*random.Float64()))))
		messages = append(messages, text)
		if at := 1 + random.IntN(4*len(text)); at < len(text) {
			all = append(append(all, frame(0x01, text[:at])...), frame(0x80, text[at:])...)
		} else {
			all = append(all, frame(0x81, text)...)
		}
		if random.IntN(10) == 0 {
			all = append(all, frame(0x89, "ping")...)
		}
	}
	return all, messages
}

// TestTenThousandMessagesPassAsTheyAre has both sides send at the same time.
func TestTenThousandMessagesPassAsTheyAre(t *testing.T) {
	lbtest.InBubble(t, keyed("backend http://a\ncaller alice {\ntokens 10k/day\nmodels gpt-realtime\n}"), func(t *testing.T, w *lbtest.World) {
		random := rand.New(rand.NewPCG(1, 2))
		unmasked := func(first byte, payload string) []byte {
			f := masked(first, payload)
			head := len(f) - len(payload)
			f[1] &= 0x7f
			return append(f[:head-4], payload...)
		}
		sent, messages := manyFrames(random, 10_000, masked)
		received, _ := manyFrames(random, 10_000, unmasked)
		got := make(chan string, 1)
		w.Backends["a"].Replies(records(got, received...))
		c := dial(t, w, session, aliceKey)
		go func() {
			for rest := sent; len(rest) > 0; {
				n := min(len(rest), 1+random.IntN(20_000))
				c.Write(rest[:n])
				rest = rest[n:]
			}
		}()
		heard := make([]byte, len(received))
		if _, err := io.ReadFull(c, heard); err != nil || !bytes.Equal(heard, received) {
			t.Errorf("the client got other frames (%v)", err)
		}
		synctest.Wait()
		c.Write(masked(0x88, "\x03\xe8bye"))
		time.Sleep(time.Second)
		c.Close()
		var arrived []string
		for _, f := range read(t, <-got) {
			if text, ok := strings.CutPrefix(f, "1 true "); ok {
				arrived = append(arrived, text)
			}
		}
		if !slices.Equal(arrived, messages) {
			t.Error("the backend got other messages")
		}
		time.Sleep(time.Minute)
	})
}
