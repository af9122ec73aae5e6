package websocket

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gobwas/ws"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

func TestAHandshakeThatIsNone(t *testing.T) {
	for name, c := range map[string]struct {
		proto        int
		version, key string
		want         error
	}{
		"HTTP/1.0":        {0, "13", "dGhlIHNhbXBsZSBub25jZQ==", apierror.OldWebSocket},
		"another version": {1, "8", "dGhlIHNhbXBsZSBub25jZQ==", apierror.WrongWebSocketVersion},
		"no key":          {1, "13", "", apierror.WrongWebSocketKey},
		"a short key":     {1, "13", "aGk=", apierror.WrongWebSocketKey},
		"a handshake":     {1, "13", "dGhlIHNhbXBsZSBub25jZQ==", nil},
	} {
		r := httptest.NewRequest(http.MethodGet, "/v1/responses", nil)
		r.ProtoMinor = c.proto
		r.Header = http.Header{"Sec-Websocket-Version": {c.version}, "Sec-Websocket-Key": {c.key}}
		if err := checkHandshake(r); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func TestAnAcceptedHandshakeNamesNoKeyAsItsProtocol(t *testing.T) {
	header, r := make(http.Header), httptest.NewRequest(http.MethodGet, "/v1/responses", nil)
	r.Header = http.Header{"Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="}, "Sec-Websocket-Protocol": {"openai-insecure-api-key.sk-1", "realtime, other"}}
	answerHandshake(header, r)
	//nolint:staticcheck // as RFC 6455 spells it
	if header["Sec-WebSocket-Accept"][0] != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" || header.Get("Sec-WebSocket-Protocol") != "realtime" { // RFC 6455 section 1.3
		t.Errorf("the answer is %v", header)
	}
}

// TestMessagesThatCannotBeHeld close the WebSocket, and hold nothing after.
func TestMessagesThatCannotBeHeld(t *testing.T) {
	empties := func(n int) (frames []ws.Frame) {
		frames = append(frames, text("x", false))
		for range n {
			frames = append(frames, more("", false))
		}
		return frames
	}
	pings := make([]ws.Frame, maxControls+1)
	for i := range pings {
		pings[i] = ws.NewPongFrame(nil)
	}
	mebibyte := strings.Repeat("x", 1<<20)
	var parts []ws.Frame
	for i := range 9 {
		if parts = append(parts, more(mebibyte, false)); i == 0 {
			parts[0] = text(mebibyte, false)
		}
	}
	for name, c := range map[string]struct {
		frames []ws.Frame
		raw    string
		want   error
		close  string
	}{
		"too long":                 {[]ws.Frame{text(strings.Repeat(mebibyte, 8)+"x", true)}, "", new(http.MaxBytesError), "close 1009 a message is too long"},
		"too long over all frames": {parts, "", new(http.MaxBytesError), "close 1009 a message is too long"},
		"without an end":           {empties(maxFrames), "", errManyFrames, "close 1008 a message has too many frames"},
		"a slow one":               {empties(1), "", os.ErrDeadlineExceeded, "close 1008 a message did not arrive in time"},
		"half a head":              {nil, "\x81", os.ErrDeadlineExceeded, "close 1008 a message did not arrive in time"},
		"half a frame":             {nil, "\x81\x85abcdx", os.ErrDeadlineExceeded, "close 1008 a message did not arrive in time"},
		"none":                     {nil, "", os.ErrDeadlineExceeded, "close 1008 a message did not arrive in time"},
		"only control frames":      {pings, "", errManyPings, "close 1008 too many control frames arrived without a message"},
		"binary":                   {[]ws.Frame{ws.NewBinaryFrame([]byte("x"))}, "", errBinary, "close 1003 a message is not text"},
		"compressed":               {nil, "\xc1\x81abcdx", errCompressed, "close 1003 a message is compressed, which was not agreed upon"},
		"unmasked":                 {nil, "\x81\x01x", errFrames, "close 1002 a frame is malformed"},
		"not UTF-8":                {[]ws.Frame{text("\xff", true)}, "", errNotUTF8, "close 1007 a message is not UTF-8"},
		"a length beyond 2^63":     {nil, "\x81\xff\xff\x00\x00\x00\x00\x00\x00\x00abcd", errFrames, "close 1002 a frame is malformed"},
		"a length of 2^63-1":       {nil, "\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xffabcd", new(http.MaxBytesError), "close 1009 a message is too long"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				p := accept(t, Options{})
				go func() {
					p.client.send(c.frames...)
					io.WriteString(p.client.wire, c.raw)
				}()
				_, err := p.Next()
				tooLong := new(http.MaxBytesError)
				if !errors.Is(err, c.want) && (!errors.As(err, &tooLong) || !errors.As(c.want, &tooLong)) {
					t.Errorf("it is %v, want %v", err, c.want)
				}
				if n := p.Memory.Used(); n != 0 {
					t.Errorf("%d bytes are held", n)
				}
				p.Answer(&http.Response{StatusCode: 400, Header: http.Header{"Retry-After": {"7"}}, Body: io.NopCloser(strings.NewReader(`{"error":{"code":"x"}}`))})
				p.client.wants(`{"type":"error","status":400,"error":{"code":"x","headers":{"retry-after":"7"}},"headers":{"retry-after":"7"}}`)
				closed := make(chan bool)
				go func() {
					p.Close()
					close(closed)
				}()
				p.client.wants(c.close, "end")
				<-closed
			})
		})
	}
}

// TestAMessageMayTakeLongerIfItIsLong but must keep coming.
func TestAMessageMayTakeLongerIfItIsLong(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := accept(t, Options{})
		begin := time.Now()
		go func() {
			p.client.send(text("x", false))
			for range 40 {
				time.Sleep(time.Second)
				p.client.send(more(strings.Repeat("x", messagePace), false))
			}
			p.client.send(more("", true))
		}()
		s, err := p.Next()
		if err != nil || len(s) != 1+40*messagePace || time.Since(begin) != 40*time.Second {
			t.Errorf("%d bytes come after %s: %v", len(s), time.Since(begin), err)
		}
		p.Close()
	})
}

// TestTheMessagesOfAllWebSocketsAreBounded and short ones still pass.
func TestTheMessagesOfAllWebSocketsAreBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		b := NewBudget(16 << 20)
		var all []*pair
		refused := 0
		for range 20 {
			p := accept(t, Options{Memory: b})
			all = append(all, p)
			go p.client.send(text(strings.Repeat("x", 6<<20), false))
			time.Sleep(time.Second)
			if b.Used() > 16<<20 {
				t.Fatalf("%d bytes are held", b.Used())
			}
			p.mu.Lock()
			if p.fault == errNoMemory {
				refused++
			}
			p.mu.Unlock()
		}
		if refused < 16 || refused > 19 {
			t.Errorf("%d of 20 messages are refused", refused)
		}
		p := accept(t, Options{Memory: b})
		p.client.say("short")
		if s, err := p.Next(); string(s) != "short" {
			t.Errorf("a short message is %q, %v", s, err)
		}
		for _, p := range append(all, p) {
			p.Close()
		}
		if n := b.Used(); n != 0 {
			t.Errorf("%d bytes are held", n)
		}
	})
}

// TestAMessageIsHeldOnce and needs no more memory than it has bytes, once it is
// complete.
func TestAMessageIsHeldOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := accept(t, Options{})
		go p.client.say(strings.Repeat("x", 5<<20))
		s, err := p.Next()
		if n := p.Memory.Used(); err != nil || int(n) != len(s) || cap(s) != len(s) {
			t.Errorf("of %d bytes, %d are held: %v", len(s), n, err)
		}
		p.Close()
	})
}

// TestAClientThatLeavesEndsItsRequest also while its next messages wait.
func TestAClientThatLeavesEndsItsRequest(t *testing.T) {
	for name, leaves := range map[string]func(e *end){
		"by a close frame": func(e *end) { e.send(closing(1000, "")) },
		"by its end":       func(e *end) { e.CloseWrite() },
		"by a reset":       func(e *end) { e.reset(io.ErrUnexpectedEOF) },
		"silently":         func(e *end) { e.deaf.Store(true) },
		"by nonsense":      func(e *end) { io.WriteString(e.wire, "nonsense") },
		"by a flood":       func(e *end) { e.say(strings.Repeat("x", 9<<20)); e.say(strings.Repeat("x", 9<<20)) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				p := accept(t, Options{})
				p.client.say("first")
				ctx := p.WithContext(context.Background())
				if s, err := p.Next(); string(s) != "first" || err != nil {
					t.Fatal(string(s), err)
				}
				p.client.say("second")
				p.client.send(ws.NewPingFrame([]byte("?")))
				p.client.wants("pong ?")
				begin := time.Now()
				leaves(p.client)
				<-ctx.Done()
				if after := time.Since(begin); name != "silently" && after > 0 || after > 3*silence {
					t.Errorf("it is noticed after %s", after)
				}
				p.Close()
				if n := p.Memory.Used(); n != 0 {
					t.Errorf("%d bytes are held", n)
				}
			})
		})
	}
}

func TestMessagesThatWaitedForABackendPassInOrder(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := accept(t, Options{})
		p.client.say("1")
		first, err := p.Next()
		if err != nil {
			t.Fatal(err)
		}
		p.client.say("2")
		p.client.send(text("3", false), more("3", true))
		synctest.Wait()
		b := p.toBackend(t)
		go p.backend.listen()
		go p.backend.say("answer")
		if answer, err := b.ask(first[:0], first); string(answer) != "answer" || err != nil {
			t.Fatal(string(answer), err)
		}
		go func() {
			p.ended <- p.Relay(b, seam.WebSocketSession{Rules: &rules{}, First: new(response), Holds: true})
		}()
		p.client.say("4")
		p.backend.wants("1", "2", "33", "4")
		p.client.wants("answer")
		p.client.Close()
		p.over(t)
	})
}

func TestABackendIsAskedForTheFirstMessage(t *testing.T) {
	pongs := make([]ws.Frame, maxControls+1)
	for i := range pongs {
		pongs[i] = ws.NewPongFrame([]byte("?"))
	}
	empties := []ws.Frame{text("", false)}
	for range maxFrames {
		empties = append(empties, more("", false))
	}
	long := strings.Repeat("x", sse.MaxEvent)
	for name, c := range map[string]struct {
		frames []ws.Frame
		want   string
		fails  string
	}{
		"an answer":              {[]ws.Frame{text("a", true)}, "a", ""},
		"in frames":              {[]ws.Frame{text("a", false), ws.NewPongFrame(nil), more("b", true)}, "ab", ""},
		"as long as an event":    {[]ws.Frame{text(long, true)}, long, ""},
		"a longer one":           {[]ws.Frame{text(long+"y", true)}, "", ""},
		"only pongs":             {pongs, "", "the backend sent only control frames"},
		"only empty frames":      {empties, "", errUnreadable.Text},
		"a close frame":          {[]ws.Frame{closing(1011, "")}, "", errClosedFirst.Text},
		"closed as too long":     {[]ws.Frame{closing(1009, "")}, "", "The message is larger than the backend allows."},
		"closed as not readable": {[]ws.Frame{closing(1007, "")}, "", "The backend does not accept the message."},
		"the end":                {nil, "", errNoClose.Text},
		"the end of half of one": {[]ws.Frame{text("a", false)}, "", errNoClose.Text},
		"no frames":              {[]ws.Frame{more("a", true)}, "", errUnreadable.Text},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				p := accept(t, Options{})
				b := p.toBackend(t)
				go p.backend.listen()
				go func() {
					p.backend.send(ws.NewPingFrame([]byte("alive")))
					p.backend.send(c.frames...)
					p.backend.CloseWrite()
				}()
				answer, err := b.ask([]byte("the "), []byte("question"))
				if string(answer) != c.want || err == nil && c.fails != "" || err != nil && err.Error() != c.fails {
					t.Errorf("it answers %.20q, %v", answer, err)
				}
				p.backend.wants("the question", "pong alive")
				b.Close()
				p.Close()
			})
		})
	}
}

// TestWhatWasReadOfTheAnswerIsRelayedFirst also if it is the beginning of a
// long message.
func TestWhatWasReadOfTheAnswerIsRelayedFirst(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for _, n := range []int{10, sse.MaxEvent, sse.MaxEvent + 1, 5 * sse.MaxEvent} {
			p := accept(t, Options{})
			b := p.toBackend(t)
			go p.backend.listen()
			want := strings.Repeat("0123456789", n/10+1)[:n]
			go func() {
				p.backend.say(want)
				p.backend.say("next")
			}()
			if _, err := b.ask([]byte("question")); err != nil {
				t.Fatal(err)
			}
			go func() {
				p.ended <- p.Relay(b, seam.WebSocketSession{Rules: &rules{}, First: new(response), Holds: true})
			}()
			got := ""
			for {
				f := <-p.client.frames
				if got += string(f.Payload); f.Header.Fin {
					break
				}
			}
			if got != want {
				t.Errorf("of %d bytes, the client got %d", len(want), len(got))
			}
			p.client.wants("next")
			p.client.Close()
			p.over(t)
		}
	})
}

func TestAnErrorEventStandsForAReply(t *testing.T) {
	res := errorReply([]byte(`{"type":"error","status":429,"error":{"type":"tokens","code":"rate_limit_exceeded","message":"x"},"headers":{"retry-after":7,"x-ms-region":"e","set-cookie":"c"}}`))
	if res == nil || res.StatusCode != 429 || res.Header.Get("Retry-After") != "7" || res.Header.Get("X-Ms-Region") != "e" || res.Header.Get("Set-Cookie") != "" {
		t.Errorf("it is %+v", res)
	}
	if res = errorReply([]byte(`{"type":"response.created"}`)); res != nil {
		t.Errorf("it is %+v", res)
	}
	var e struct {
		Stream string `json:"stream_id"`
	}
	text := replyEvent(&http.Response{StatusCode: 503, Body: io.NopCloser(strings.NewReader("no JSON"))}, "lane")
	if err := json.Unmarshal(text, &e); err != nil || e.Stream != "lane" {
		t.Errorf("the event is %s", text)
	}
}
