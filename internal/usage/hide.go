package usage

import (
	"encoding/json"
	"errors"
	"io"
	"slices"

	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// Hide removes the usage chunk, which the client did not ask for, from a stream
// of chat or completions. That chunk has nothing but the usage. All other bytes
// stay as they are. An event is held back until it has ended, unless it is much
// longer than a usage chunk.
func Hide(stream io.ReadCloser) io.ReadCloser { return &hider{stream: stream} }

const (
	// maxHeld is how much of an event is held back. A usage chunk has a few
	// hundred bytes.
	maxHeld = 8 << 10
	// leastRead is the smallest buffer for a read of the stream.
	leastRead = 4 << 10
)

// hider removes usage chunks from a stream. It filters in the buffer of its own
// reader, so that events that arrive together stay together.
type hider struct {
	stream   io.ReadCloser
	splitter sse.Splitter
	err      error // why there is no more to read
	cutCR    bool  // the last byte was removed, and a line feed that comes next is the rest of it

	// front is data that was read and not returned. Its first ready bytes may
	// be returned; the rest is the beginning of an event.
	front []byte
	ready int

	// text is the data being filtered: front, and after it, from the index
	// piece, the data that was read last. text[:passed] is done, and
	// text[:kept] is what remains of it.
	text                []byte
	piece, kept, passed int
}

// Read implements io.Reader.
func (h *hider) Read(p []byte) (int, error) {
	for h.ready == 0 && h.err == nil {
		buf := p
		if least := len(h.front) + leastRead; len(p) < least {
			buf = make([]byte, least)
		}
		front := copy(buf, h.front)
		var n int
		n, h.err = h.stream.Read(buf[front:])
		text := h.filter(buf[:front+n], front)
		ready := len(text)
		if unfinished := h.splitter.Unfinished(); h.err == nil && unfinished <= maxHeld {
			ready -= unfinished
		}
		n = copy(p, text[:ready]) // which is where it is already, if there was room
		h.front, h.ready = append(h.front[:0], text[n:]...), ready-n
		if n > 0 {
			return n, nil
		}
	}
	if h.ready == 0 {
		return 0, h.err
	}
	n := copy(p, h.front[:h.ready])
	h.front, h.ready = slices.Delete(h.front, 0, n), h.ready-n
	return n, nil
}

// Close implements io.Closer.
func (h *hider) Close() error { return h.stream.Close() }

// filter removes the usage chunks that end in the text. The text ends with a
// new piece of the stream.
func (h *hider) filter(text []byte, piece int) []byte {
	h.text, h.piece, h.kept, h.passed = text, piece, 0, 0
	if h.cutCR && len(text) > 0 {
		h.cutCR = false
		if text[0] == '\n' {
			h.passed = 1
		}
	}
	h.splitter.Split(text[piece:], h.remove)
	if errors.Is(h.err, io.EOF) {
		h.piece = len(text)
		h.splitter.End(h.remove) // SDKs read the last event even if no empty line comes after it
	}
	h.keep(len(text))
	h.text = nil
	return text[:h.kept]
}

// remove removes the event if it is a usage chunk and short enough to be held
// back.
func (h *hider) remove(e sse.Event) {
	begin, end := h.splitter.Bounds()
	if begin, end = begin+h.piece, end+h.piece; begin < 0 || end-begin > maxHeld || !hasOnlyUsage(e.Data) {
		return
	}
	h.keep(begin)
	h.passed, h.cutCR = end, end == len(h.text) && h.text[end-1] == '\r'
}

// keep copies the next part of the text, up to the index to, behind the kept
// part.
func (h *hider) keep(to int) { h.kept += copy(h.text[h.kept:], h.text[h.passed:to]) }

func hasOnlyUsage(data []byte) bool {
	if !mayHoldUsage(data) {
		return false
	}
	var chunk struct {
		Choices *[]json.RawMessage `json:"choices"`
		Usage   map[string]any     `json:"usage"`
	}
	return json.Unmarshal(data, &chunk) == nil && chunk.Choices != nil && len(*chunk.Choices) == 0 && chunk.Usage != nil
}
