package attempt

import (
	"bytes"
	"io"
	"net"
	"slices"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// written is a client that reads all.
type written struct {
	net.Conn
	bytes.Buffer
}

func (w *written) Read(p []byte) (int, error)  { return w.Buffer.Read(p) }
func (w *written) Write(p []byte) (int, error) { return w.Buffer.Write(p) }
func (*written) Close() error                  { return nil }

func TestWhatComesBeforeAnUnreadableFrameIsPassedOn(t *testing.T) {
	good, bad := frame(opcodeText, false, []byte(`{"type":"x"}`)), append([]byte{0xc1, 126, 0, 200}, make([]byte, 200)...)
	sent := slices.Concat(good, good[:2], good[2:], bad)
	for size := 1; size <= len(sent); size++ {
		client := new(written)
		s := &Socket{conn: client, talk: new(Conversation), holds: true}
		var err error
		for piece := range slices.Chunk(slices.Clone(sent), size) {
			var n int
			if n, err = s.deliver(piece); err != nil {
				break
			} else if n != len(piece) {
				t.Errorf("%d bytes of %d are taken", n, len(piece))
			}
		}
		if want := slices.Concat(good, good, closeFrame(closeUnsupported, false)); err == nil || !bytes.Equal(client.Bytes(), want) {
			t.Errorf("in pieces of %d, the client got %q, want %q", size, client.Bytes(), want)
		}
	}
}

func TestNotManyAnswersWaitForTheEndOfAMessage(t *testing.T) {
	client := new(written)
	s := &Socket{conn: client, talk: new(Conversation), holds: true}
	begin, end := frame(opcodeText, false, []byte("x")), frame(0, false, []byte("y"))
	begin[0] &^= finalFrame
	_, _ = s.deliver(begin)
	for range 1000 {
		s.send(frame(opcodeText, false, []byte("no")))
	}
	_, _ = s.deliver(end)
	want := slices.Concat(begin, end, bytes.Repeat(frame(opcodeText, false, []byte("no")), maxPending), closeFrame(closePolicy, false))
	if !bytes.Equal(client.Bytes(), want) || s.readErr != io.EOF {
		t.Errorf("the client got %q, and reading ends with %v", client.Bytes(), s.readErr)
	}
}

func TestAnErrorShowsNoSecretHoweverItComes(t *testing.T) {
	const secret = "key-of-backend-a"
	delta, long := frame(opcodeText, false, []byte(`{"type":"x.delta","delta":"hi"}`)), frame(opcodeText, false, bytes.Repeat([]byte("x"), sse.MaxEvent+9))
	text := []byte(`{"type":"error","error":{"message":"Incorrect API key provided: ` + secret + `"}}`)
	sent := slices.Concat(delta, frame(opcodeText, false, text), frame(opcodePing, false, nil), long, delta)
	want := bytes.ReplaceAll(sent, []byte(secret), bytes.Repeat([]byte("*"), len(secret)))
	for size := 1; size <= len(sent); size += 1 + size/40 {
		client := new(written)
		s := &Socket{conn: client, talk: new(Conversation), secrets: keys.Secrets{secret}}
		for piece := range slices.Chunk(slices.Clone(sent), size) {
			if n, err := s.deliver(piece); err != nil || n != len(piece) {
				t.Fatalf("%d of %d bytes are taken: %v", n, len(piece), err)
			}
		}
		if !bytes.Equal(client.Bytes(), want) {
			t.Errorf("in pieces of %d, the client got %.200q", size, client.Bytes())
		}
	}
}
