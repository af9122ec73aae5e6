package attempt

import (
	"bytes"
	"io"
	"slices"
	"testing"
)

// pieces is a backend that sends so many bytes at a time.
type pieces struct {
	sent []byte
	size int
	got  bytes.Buffer
}

func (p *pieces) Read(to []byte) (int, error) {
	if len(p.sent) == 0 {
		return 0, io.EOF
	}
	n := copy(to, p.sent[:min(p.size, len(p.sent))])
	p.sent = p.sent[n:]
	return n, nil
}

func (p *pieces) Write(sent []byte) (int, error) { return p.got.Write(sent) }

func TestPingsBeforeTheFirstMessageAreAnswered(t *testing.T) {
	ping, text := frame(opcodePing, false, []byte("12")), []byte(`{"type":"x"}`)
	begin, end := frame(opcodeText, false, text[:5]), frame(0, false, text[5:])
	begin[0] &^= finalFrame
	sent := slices.Concat(ping, begin, ping, end)
	for size := 1; size <= len(sent)+len(ping); size++ {
		b := &pieces{sent: slices.Concat(sent, ping[:3]), size: size}
		held, first, err := exchangeFirst(b, []byte("hi"))
		if want := slices.Concat(begin, end); err != nil || !bytes.Equal(first, text) || !bytes.HasPrefix(held, want) ||
			!bytes.Equal(slices.Concat(held[len(want):], b.sent), ping[:3]) {
			t.Errorf("in pieces of %d: %q, %q, %v", size, held, first, err)
		}
		var h holder
		var pongs []string
		if code := h.take(b.got.Bytes()[2:], nil, func(opcode byte, m message) { pongs = append(pongs, string(opcode)+string(m.text)) }); code != 0 || !slices.Equal(pongs, []string{"\n12", "\n12"}) {
			t.Errorf("in pieces of %d, the backend got %q", size, pongs)
		}
	}
}

func TestNumbersInTheHeadersOfAnErrorStayAsTheyAre(t *testing.T) {
	reply := errorReply([]byte(`{"type":"error","status":429,"error":{"code":"x","message":"x"},"headers":{"x-ratelimit-limit-tokens":30000000}}`))
	if got := reply.Header.Get("X-Ratelimit-Limit-Tokens"); got != "30000000" {
		t.Errorf("the limit is %s", got)
	}
}
