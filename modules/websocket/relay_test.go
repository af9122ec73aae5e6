package websocket

import (
	"context"
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gobwas/ws"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func text(s string, fin bool) ws.Frame { return ws.NewFrame(ws.OpText, fin, []byte(s)) }
func more(s string, fin bool) ws.Frame { return ws.NewFrame(ws.OpContinuation, fin, []byte(s)) }
func closing(code ws.StatusCode, reason string) ws.Frame {
	return ws.NewCloseFrame(ws.NewCloseFrameBody(code, reason))
}

func TestMessagesPassInBothDirections(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := between(t, seam.WebSocketSession{})
		for _, side := range []struct{ from, to *end }{{p.client, p.backend}, {p.backend, p.client}} {
			side.from.say("hello")
			side.from.send(text("in ", false), ws.NewPingFrame([]byte("?")), more("", false), more("two", true))
			side.from.send(ws.NewBinaryFrame([]byte("binary")), text("", true), ws.NewPongFrame([]byte("!")))
			side.to.wants("hello", "in …", "+two", "binary", "", "pong !")
			side.from.wants("pong ?")
		}
		p.client.send(closing(1000, "bye"))
		p.backend.wants("close 1000 bye")
		p.backend.send(closing(1000, "bye"))
		p.client.wants("close 1000 bye", "end")
		if e := p.over(t); e.Broken != nil || !e.Begun {
			t.Errorf("it ended with %+v", e)
		}
	})
}

// TestALongFramePassesAsSeveral and one of up to 64 KiB as one.
func TestALongFramePassesAsSeveral(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := between(t, seam.WebSocketSession{})
		for _, side := range []struct{ from, to *end }{{p.client, p.backend}, {p.backend, p.client}} {
			whole := strings.Repeat("x", maxPiece)
			side.from.say(whole)
			if f := <-side.to.frames; string(f.Payload) != whole || !f.Header.Fin {
				t.Errorf("got %+v", f.Header)
			}
			long := strings.Repeat("0123456789", maxPiece/4)
			side.from.say(long)
			got := ""
			for {
				f := <-side.to.frames
				if got += string(f.Payload); f.Header.Fin {
					break
				}
			}
			if got != long {
				t.Error("a long frame arrives changed")
			}
		}
		p.client.Close()
		p.over(t)
	})
}

const secret = "sk-0123456789abcdef"

var stars = strings.Repeat("*", len(secret))

// TestNoMessageOfABackendShowsAKey however it is cut into frames.
func TestNoMessageOfABackendShowsAKey(t *testing.T) {
	for name, c := range map[string]struct {
		frames []ws.Frame
		want   string
	}{
		"in one frame":         {[]ws.Frame{text("a "+secret+" b", true)}, "a " + stars + " b"},
		"cut into two frames":  {[]ws.Frame{text("a "+secret[:7], false), more(secret[7:]+" b", true)}, "a " + stars + " b"},
		"in a ping between":    {[]ws.Frame{text("a "+secret[:7], false), ws.NewPingFrame([]byte("?")), more(secret[7:]+" b", true)}, "a " + stars + " b"},
		"byte by byte":         bytewise("a " + secret + " b"),
		"no key after all":     {[]ws.Frame{text("a "+secret[:7], false), more(" b", true)}, "a " + secret[:7] + " b"},
		"half a key":           {[]ws.Frame{text("a "+secret[:7], true)}, "a " + secret[:7]},
		"encoded":              {[]ws.Frame{text(`{"a":"\u0073k-0123456`, false), more(`789abcdef"}`, true)}, `{"a":"` + strings.Repeat("*", len(secret)+5) + `"}`},
		"in a delta":           {[]ws.Frame{text(`{"type":"response.output_text.delta","delta":"`+secret+`"}`, true)}, `{"type":"response.output_text.delta","delta":"` + stars + `"}`},
		"beyond 64 KiB":        {[]ws.Frame{text(strings.Repeat("x", maxPiece-5)+secret+"y", true)}, strings.Repeat("x", maxPiece-5) + stars + "y"},
		"after empty frames":   {[]ws.Frame{text(secret[:3], false), more("", false), more(secret[3:], false), more("", true)}, stars},
		"endless layers begin": {[]ws.Frame{text(strings.Repeat(`\u005cu005c`, 3000), false), more(" b", true)}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				p := between(t, seam.WebSocketSession{Secrets: keys.Secrets{secret}})
				p.backend.send(c.frames...)
				got := ""
				for {
					f, ok := <-p.client.frames
					if got += string(f.Payload); f.Header.Fin || !ok {
						break
					}
				}
				if c.want != "" && got != c.want || strings.Contains(got, secret) {
					t.Errorf("the client got %.300q, want %.300q", got, c.want)
				}
				if n := p.Client.conn.(*wire).in.waiting(); n > maxHeld {
					t.Errorf("%d bytes are held back", n)
				}
				p.backend.send(closing(1008, "key "+secret))
				p.client.wants("close 1008 key " + stars)
				p.client.Close()
				p.over(t)
			})
		})
	}
}

func bytewise(s string) (c struct {
	frames []ws.Frame
	want   string
}) {
	c.want = strings.ReplaceAll(s, secret, stars)
	for i := range len(s) {
		f := more(s[i:i+1], i == len(s)-1)
		if i == 0 {
			f = text(s[:1], false)
		}
		c.frames = append(c.frames, f)
	}
	return c
}

func TestACloseFramePassesAsItIs(t *testing.T) {
	for name, c := range map[string]struct {
		sent ws.Frame
		want string
	}{
		"without a code":   {ws.NewCloseFrame(nil), "close 0 "},
		"with a code":      {closing(1001, ""), "close 1001 "},
		"with a reason":    {closing(4001, "session_expired"), "close 4001 session_expired"},
		"a registered one": {closing(1013, "try later"), "close 1013 try later"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				for _, byClient := range []bool{true, false} {
					p := between(t, seam.WebSocketSession{})
					from, to := p.client, p.backend
					if !byClient {
						from, to = to, from
					}
					from.send(c.sent)
					to.wants(c.want)
					to.send(c.sent)
					from.wants(c.want, "end")
					if e := p.over(t); e.Broken != nil {
						t.Errorf("it is broken: %v", e.Broken)
					}
				}
			})
		})
	}
}

// TestAWebSocketIsBrokenIfTheBackendEndsItAndNothingElseDid also says whether
// data had come.
func TestAWebSocketIsBrokenIfTheBackendEndsItAndNothingElseDid(t *testing.T) {
	reset := syscall.ECONNRESET
	for name, c := range map[string]struct {
		before func(p *pair)
		fails  error // nil: the end
		want   error
		begun  bool
	}{
		"the end":                     {func(*pair) {}, nil, errNoClose, false},
		"a reset":                     {func(*pair) {}, reset, reset, false},
		"a reset after a ping":        {func(p *pair) { p.backend.send(ws.NewPingFrame(nil)) }, reset, reset, false},
		"the end after data":          {func(p *pair) { p.backend.say("hi") }, nil, errNoClose, true},
		"a reset after data":          {func(p *pair) { p.backend.say("hi") }, reset, reset, true},
		"amid a message":              {func(p *pair) { p.backend.send(text("hi", false)) }, nil, errNoClose, true},
		"after its close frame":       {func(p *pair) { p.backend.send(closing(1000, "")) }, nil, nil, false},
		"a reset after its close":     {func(p *pair) { p.backend.send(closing(1000, "")) }, reset, nil, false},
		"after the client's close":    {func(p *pair) { p.client.send(closing(1000, "")) }, nil, nil, false},
		"a reset after the client's":  {func(p *pair) { p.client.send(closing(1000, "")) }, reset, nil, false},
		"after the client's end":      {func(p *pair) { p.client.CloseWrite() }, nil, nil, false},
		"a reset after that":          {func(p *pair) { p.client.CloseWrite() }, reset, nil, false},
		"after the client has left":   {func(p *pair) { p.client.Close() }, reset, nil, false},
		"compressed":                  {func(p *pair) { p.backend.say("x"); p.backend.Write([]byte{0xc1, 1, 'x'}) }, nil, errUnreadable, true},
		"masked":                      {func(p *pair) { p.backend.say("x"); p.backend.Write([]byte{0x81, 0x81, 0, 0, 0, 0, 'x'}) }, nil, errUnreadable, true},
		"a continuation of nothing":   {func(p *pair) { p.backend.send(text("x", true), more("x", true)) }, nil, errUnreadable, true},
		"a length of more than 2^63":  {func(p *pair) { p.backend.say("x"); p.backend.Write([]byte{0x81, 127, 0xff, 0, 0, 0, 0, 0, 0, 0}) }, nil, errUnreadable, true},
		"data that is refused: reset": {func(p *pair) { p.backend.in.end(reset); p.client.say("hi") }, reset, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				p := between(t, seam.WebSocketSession{})
				c.before(p)
				time.Sleep(time.Second)
				if c.fails == nil {
					p.backend.CloseWrite()
				} else {
					p.backend.reset(c.fails)
				}
				begin := time.Now()
				e := p.over(t)
				if name == "data that is refused: reset" {
					if e.Broken == nil {
						t.Error("it is not broken")
					}
				} else if !errors.Is(e.Broken, c.want) || c.want == nil && e.Broken != nil || e.Begun != c.begun {
					t.Errorf("it ended with %+v, want %v", e, c.want)
				}
				if after := time.Since(begin); after > Grace {
					t.Errorf("it ended after %s", after)
				}
			})
		})
	}
}

func TestASideMayGoOnForAWhileAfterTheOtherHasEnded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for _, byClient := range []bool{true, false} {
			for _, says := range []bool{true, false} { // a close frame
				p := between(t, seam.WebSocketSession{})
				from, to := p.client, p.backend
				if !byClient {
					from, to = to, from
				}
				begin := time.Now()
				if says {
					from.send(closing(1000, ""))
					to.wants("close 1000 ")
				} else {
					from.CloseWrite()
					synctest.Wait()
				}
				time.Sleep(Grace - time.Second)
				to.say("and")
				from.wants("and")
				p.over(t)
				if after := time.Since(begin); after != Grace {
					t.Errorf("it ends after %s, want %s", after, Grace)
				}
			}
		}
	})
}

func TestAnIdleSideIsPingedAndClosedIfItDoesNotAnswer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := between(t, seam.WebSocketSession{})
		time.Sleep(time.Hour) // both answer
		p.client.say("still here")
		p.backend.wants("still here")
		p.client.Close()
		if e := p.over(t); e.Broken != nil {
			t.Errorf("it is broken: %v", e.Broken)
		}
		for _, byClient := range []bool{true, false} {
			p = open(t, Options{})
			b := p.toBackend(t)
			deaf, hears := p.client, p.backend
			if !byClient {
				deaf, hears = hears, deaf
			}
			deaf.deaf.Store(true)
			p.relays(b, seam.WebSocketSession{})
			begin := time.Now()
			pings := 0
			for strings.HasPrefix(deaf.next(), "ping") {
				if pings++; time.Since(begin) != time.Duration(pings)*silence {
					t.Errorf("ping %d comes after %s", pings, time.Since(begin))
				}
			}
			if pings != 2 {
				t.Errorf("it gets %d pings", pings)
			}
			e := p.over(t)
			if after := time.Since(begin); after != 3*silence {
				t.Errorf("it ends after %s", after)
			}
			if (e.Broken != nil) == byClient || !byClient && !errors.Is(e.Broken, errNoPong) {
				t.Errorf("it ended with %v", e.Broken)
			}
			if got := hears.next(); got != "end" {
				t.Errorf("the other side got %s", got)
			}
		}
	})
}

// TestASideThatIsNotReadIsNotSilent because the other side takes nothing.
func TestASideThatIsNotReadIsNotSilent(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := open(t, Options{})
		b := p.toBackend(t)
		b.beat.ended = true // it would be closed, and is not what is tested
		go func() { p.ended <- p.Relay(b, seam.WebSocketSession{}) }()
		sent := make(chan bool)
		go func() {
			for range 3 * room / 1000 {
				p.client.say(strings.Repeat("x", 1000))
			}
			close(sent)
		}()
		time.Sleep(10 * time.Minute)
		go p.backend.listen()
		<-sent
		time.Sleep(time.Second)
		p.client.say("last")
		for got := ""; got != "last"; got = p.backend.next() {
			if got == "end" {
				t.Fatal("the client was closed")
			}
		}
		p.client.Close()
		p.over(t)
	})
}

func TestAllWebSocketsCloseWithTheirConfiguration(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for name, end := range map[string]func(Options, func()) Options{
			"closing": func(o Options, _ func()) Options { return o },
			"timeout": func(o Options, _ func()) Options { o.Timeout = time.Minute; return o },
		} {
			ctx, stop := context.WithCancel(t.Context())
			p := open(t, end(Options{WebSocketOptions: seam.WebSocketOptions{Closing: ctx}}, stop))
			p.relays(p.toBackend(t), seam.WebSocketSession{})
			begin := time.Now()
			if name == "closing" {
				time.Sleep(time.Minute)
				stop()
			}
			p.client.wants("close 1001 ")
			p.backend.wants("close 1001 ")
			p.client.say("too late")
			if after := time.Since(begin); after != time.Minute {
				t.Errorf("%s: it is closed after %s", name, after)
			}
			if e := p.over(t); e.Broken != nil || time.Since(begin) > time.Minute+lingering {
				t.Errorf("%s: it ends after %s with %v", name, time.Since(begin), e.Broken)
			}
			p.backend.wants("end")
			stop()
		}
	})
}

// TestAClientThatReadsNothingDoesNotKeepItsWebSocketOpen when it has to close.
func TestAClientThatReadsNothingDoesNotKeepItsWebSocketOpen(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		near, far := newWire(100)
		o, _ := withOptions(Options{WebSocketOptions: seam.WebSocketOptions{Closing: ctx}})
		c, err := Open(newTaken(near), o)
		if err != nil {
			t.Fatal(err)
		}
		p := &pair{Client: c, client: newEnd(t, far, true), ended: make(chan seam.WebSocketEnd, 1)}
		p.relays(p.toBackend(t), seam.WebSocketSession{})
		for range 10 {
			p.backend.say(strings.Repeat("x", 100))
		}
		synctest.Wait()
		stop()
		begin := time.Now()
		p.over(t)
		if after := time.Since(begin); after > lingering {
			t.Errorf("it ends after %s", after)
		}
	})
}

// TestManyMessagesArriveInOrder from both sides at a time, in frames of all
// lengths.
func TestManyMessagesArriveInOrder(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		p := between(t, seam.WebSocketSession{Secrets: keys.Secrets{secret}})
		run := func(from, to *end) {
			var want []string
			go func() {
				for i := range 3000 {
					s := strings.Repeat(string(rune('a'+i%26)), i*7%5000)
					if i%3 == 0 {
						from.send(text(s, false), more(s, true))
					} else {
						from.say(s)
					}
				}
			}()
			for i := range 3000 {
				s := strings.Repeat(string(rune('a'+i%26)), i*7%5000)
				if i%3 == 0 {
					s += s
				}
				want = append(want, s)
			}
			for i := range want {
				got := ""
				for {
					f := <-to.frames
					if got += string(f.Payload); f.Header.Fin {
						break
					}
				}
				if got != want[i] {
					t.Errorf("message %d is %.20q…, want %.20q…", i, got, want[i])
					return
				}
			}
		}
		done := make(chan bool)
		go func() { run(p.client, p.backend); done <- true }()
		go func() { run(p.backend, p.client); done <- true }()
		<-done
		<-done
		p.client.Close()
		p.over(t)
	})
}

// TestWhatIsNoWebSocketPassesAsItIs unless its messages have to be read. Keys
// are replaced in it, too.
func TestWhatIsNoWebSocketPassesAsItIs(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		for _, holds := range []bool{false, true} {
			near, far := newWire(room)
			o, _ := withOptions(Options{})
			c, err := Open(newTaken(near), o)
			if err != nil {
				t.Fatal(err)
			}
			p := &pair{Client: c, client: &end{t: t, wire: far}, ended: make(chan seam.WebSocketEnd, 1)}
			b := p.toBackend(t)
			go func() {
				p.ended <- p.Relay(b, seam.WebSocketSession{Secrets: keys.Secrets{secret}, Rules: new(rules), Holds: holds})
			}()
			go io.WriteString(p.client.wire, "hello")
			if holds {
				all, _ := io.ReadAll(p.client.wire)
				if !strings.Contains(string(all), errFrames.Reason) {
					t.Errorf("the client got %q", all)
				}
				p.client.Close()
				p.over(t)
				continue
			}
			got := make([]byte, 5)
			if _, err := io.ReadFull(p.backend.wire, got); err != nil || string(got) != "hello" {
				t.Errorf("the backend got %q, %v", got, err)
			}
			time.Sleep(time.Hour)
			io.WriteString(p.backend.wire, "hello "+secret)
			p.backend.CloseWrite()
			all, err := io.ReadAll(p.client.wire)
			if err != nil || string(all) != "hello "+stars {
				t.Errorf("the client got %q, %v", all, err)
			}
			p.client.Close()
			p.over(t)
		}
	})
}
