package attempt

import (
	"bytes"
	"slices"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// FuzzMessages holds messages that come in pieces against those that come at once, in both directions.
func FuzzMessages(f *testing.F) {
	for _, sent := range [][]byte{
		frame(opcodeText, true, []byte("hi")), frame(opcodeText, false, []byte(`{"type":"x"}`)), closeFrame(closeNormal, true),
		slices.Concat([]byte("\x01\x02hi\x89\x00\x80\x01x"), frame(opcodePing, false, []byte("1"))), bytes.Repeat([]byte{0x81, 126, 1, 0}, 70),
		frame(opcodeText, false, make([]byte, sse.MaxEvent+9)), []byte("\xc1\x00"), []byte("\x81\xff\xff\xff\xff\xff\xff\xff\xff\xffabcd"),
	} {
		for _, size := range []int{1, 3, 1000} {
			f.Add(sent, size)
		}
	}
	f.Fuzz(func(t *testing.T, sent []byte, size int) {
		type result struct {
			events, raw []byte
			code        uint16
			at          int
		}
		read := func(size int) (r result) {
			h, l := holder{most: 1 << 16}, listener{}
			r.at = -1
			pass := func(m message) { r.raw = append(append(r.raw, m.raw...), m.text...) }
			for done := 0; done < len(sent); done += size {
				piece := sent[done:min(done+size, len(sent))]
				if r.code == 0 {
					r.code = h.take(piece, pass, func(_ byte, m message) { pass(m) })
				}
				if at, _ := l.take(piece, func(e sse.Event) { r.events = append(append(r.events, e.Data...), '|') }, func(p []byte) { r.events = append(r.events, p...) }); at >= 0 {
					r.at = done + at
				}
			}
			return r
		}
		whole, pieces := read(max(1, len(sent))), read(min(max(1, size), max(1, len(sent))))
		if !bytes.Equal(whole.raw, pieces.raw) || !bytes.Equal(whole.events, pieces.events) || whole.code != pieces.code || whole.at != pieces.at {
			t.Errorf("at once %q %q %d %d, in pieces of %d %q %q %d %d", whole.raw, whole.events, whole.code, whole.at, size, pieces.raw, pieces.events, pieces.code, pieces.at)
		}
	})
}

func TestTheLimitOfAMessageMayFallAmidIt(t *testing.T) {
	h := holder{most: 100}
	whole := func(message) { t.Error("a message passes") }
	begin := frame(opcodeText, true, make([]byte, 60))
	begin[0] &^= finalFrame
	if code := h.take(begin, whole, nil); code != 0 {
		t.Errorf("it is closed with %d", code)
	}
	h.most = 50
	if code := h.take(frame(0, true, make([]byte, 60)), whole, nil); code != closeTooBig {
		t.Errorf("it is closed with %d", code)
	}
}

func TestAFrameOfOurOwnIsReadAsItWasWritten(t *testing.T) {
	for _, size := range []int{0, 1, 125, 126, 127, 65535, 65536, 70000} {
		text := bytes.Repeat([]byte("x"), size)
		var got []message
		h := holder{most: 1 << 20}
		if code := h.take(frame(opcodeText, true, text[:size/2], text[size/2:]), func(m message) { got = append(got, m) }, nil); code != 0 || len(got) != 1 || !bytes.Equal(got[0].text, text) {
			t.Errorf("%d bytes: %d messages, %d", size, len(got), code)
		}
	}
}
