package websocket

import (
	"bytes"
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/gobwas/ws"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// side is one end of a fuzzed WebSocket. It does what the bytes of a script
// say.
type side struct {
	*end
	script []byte
	random *rand.Rand

	within   bool     // a message was begun
	message  []byte   // as far as it was sent
	sent     [][]byte // whole messages
	begun    bool     // it has done something
	opaque   bool     // it begins with what is no frame, so the WebSocket may be none
	over     bool     // nothing that was sent after it has to arrive
	received [][]byte
	partial  []byte
}

// act does the next things.
func (s *side) act() {
	for _, b := range s.script {
		switch b >> 4 {
		case 0, 1, 2, 3: // a message
			if !s.within {
				s.data(ws.OpText, s.text(int(b&0x3f)), true)
			}
		case 4, 5: // a part of one
			if op := ws.OpContinuation; s.within {
				s.data(op, s.text(int(b&7)), b&8 != 0)
			} else {
				s.data(ws.OpText, s.text(int(b&7)), false)
			}
		case 6: // the end of one
			if s.within {
				s.data(ws.OpContinuation, nil, true)
			}
		case 7, 8:
			time.Sleep(time.Duration(b&15) * time.Duration(b&15) * 300 * time.Millisecond)
		case 9:
			s.send(ws.NewPingFrame(make([]byte, b&15)))
		case 10:
			s.send(ws.NewPongFrame(make([]byte, b&15)))
		case 11: // frames without an end
			for range int(b&15) * 1000 {
				s.data(ws.OpContinuation, nil, false)
			}
		case 12:
			s.deaf.Store(b&1 != 0)
		case 13: // no valid frames
			s.opaque = s.opaque || !s.begun
			s.over = true
			junk := make([]byte, b&15)
			for i := range junk {
				junk[i] = byte(s.random.Uint32())
			}
			_, _ = s.Write(junk)
		case 14:
			s.over = true
			s.send(closing(ws.StatusCode(1000+int(b&15)), "bye"))
		case 15:
			s.over = true
			if b&1 == 0 {
				s.CloseWrite()
			} else {
				s.Close()
			}
		}
	}
}

// text is up to 200 KB of random letters.
func (s *side) text(size int) []byte {
	text := make([]byte, s.random.IntN(1+size*size*50))
	for i := range text {
		text[i] = 'a' + byte(i)%13
	}
	if len(text) > 8 {
		text[0], text[7] = byte('a'+s.random.IntN(26)), 's' // which may begin a key
	}
	return text
}

// send sends frames.
func (s *side) send(frames ...ws.Frame) {
	s.begun = true
	s.end.send(frames...)
}

func (s *side) data(op ws.OpCode, text []byte, fin bool) {
	if op == ws.OpContinuation && !s.within {
		return
	}
	s.within = !fin
	s.message = append(s.message, text...)
	s.send(ws.NewFrame(op, fin, text))
	if fin && !s.over {
		s.sent = append(s.sent, s.message)
	}
	if fin {
		s.message = nil
	}
}

// hear collects messages.
func (s *side) hear() {
	for f := range s.frames {
		if f.Header.OpCode.IsControl() {
			continue
		}
		s.partial = append(s.partial, f.Payload...)
		if f.Header.Fin {
			s.received = append(s.received, s.partial)
			s.partial = nil
		}
	}
}

// checkOrder checks that what one side has received is the beginning of what
// the other has sent.
func checkOrder(t *testing.T, from, to *side) {
	t.Helper()
	for i, got := range to.received {
		if i >= len(from.sent) {
			if !from.over {
				t.Errorf("%d messages arrive, %d were sent", len(to.received), len(from.sent))
			}
			return
		}
		if !bytes.Equal(got, from.sent[i]) {
			t.Errorf("message %d of %d bytes arrives with %d", i, len(from.sent[i]), len(got))
			return
		}
	}
}

// FuzzWebSocket has both sides send messages, parts of messages, control
// frames, nonsense and closes, with pauses.
func FuzzWebSocket(f *testing.F) {
	f.Add([]byte{0x11, 0x48, 0x60, 0x75, 0x12}, []byte{0x21, 0x90, 0x47, 0x47, 0x60, 0x11}, uint64(1))
	f.Add([]byte{0x11, 0xbf, 0x60, 0x75, 0xe0}, []byte{0x21, 0xbf, 0x47, 0x47, 0x60, 0x11, 0xe3}, uint64(6))
	f.Add([]byte{0x11, 0x7f, 0x7f, 0x7f, 0xf0}, []byte{0xc1, 0x7f, 0x7f, 0x11, 0xf1}, uint64(3))
	f.Add([]byte("009\xeb1"), []byte("00"), uint64(67))
	f.Add([]byte("2\xe8\x03\x7f9\x7f\xd8"), []byte("\x80"), uint64(3))
	f.Add([]byte{0x3f, 0xd8, 0x11}, []byte{0x47, 0x78, 0x49, 0xd9}, uint64(0))
	f.Fuzz(func(t *testing.T, client, backend []byte, seed uint64) {
		if len(client) > 300 || len(backend) > 300 {
			return
		}
		bubble.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			budget := NewBudget(8 << 20)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			options := Options{Memory: budget, WebSocketOptions: seam.WebSocketOptions{Closing: ctx}}
			holds, accepted := seed&1 != 0, seed&2 != 0
			var p *pair
			session := seam.WebSocketSession{Secrets: keys.Secrets{secret}}
			if accepted || holds {
				session.Rules, session.Holds = new(rules), true
			}
			if accepted {
				p, session.First = accept(t, options), new(response)
			} else {
				p = open(t, options)
			}
			b := p.toBackend(t)
			go p.backend.listen()
			sides := []*side{{end: p.client, script: client, random: random}, {end: p.backend, script: backend, random: rand.New(rand.NewPCG(seed, 1))}}
			var acts, hears sync.WaitGroup
			for _, s := range sides {
				s.lax.Store(true)
				acts.Go(s.act)
				hears.Go(s.hear)
			}
			most := uint64(0)
			relayed := make(chan bool)
			go func() {
				defer close(relayed)
				if accepted {
					defer p.Close()
					text, err := p.Next()
					if err != nil {
						b.Close()
						return
					}
					left := context.AfterFunc(p.WithContext(ctx), func() { b.Close() })
					_, err = b.Ask(text)
					if left(); err != nil {
						b.Close()
						return
					}
				}
				p.Relay(b, session)
			}()
			acts.Wait()
			time.Sleep(time.Minute)
			if n := budget.Used(); n > 8<<20 {
				t.Errorf("%d bytes are held", n)
			}
			var m runtime.MemStats
			if runtime.ReadMemStats(&m); m.HeapAlloc > most {
				most = m.HeapAlloc
			}
			if most > 200<<20 {
				t.Errorf("the heap has %d MB", most>>20)
			}
			stop()
			for _, s := range sides {
				time.AfterFunc(time.Minute, func() { s.Close() })
			}
			<-relayed
			hears.Wait()
			if n := budget.Used(); n != 0 {
				t.Errorf("%d bytes are held at the end", n)
			}
			if sides[0].opaque || sides[1].opaque {
				return
			}
			checkOrder(t, sides[0], sides[1])
			checkOrder(t, sides[1], sides[0])
			if n := p.logs.Len(); n > 0 {
				t.Errorf("the log has %+v", p.logs.All())
			}
		})
	})
}
