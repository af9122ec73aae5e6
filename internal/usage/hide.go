package usage

import (
	"encoding/json"
	"errors"
	"io"

	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// Hide removes from a stream of chat or completions the chunk that has nothing but the usage, which
// the client did not ask for. All other bytes stay as they are. An event is held back until it has
// ended, unless it is much longer than such a chunk.
func Hide(stream io.ReadCloser) io.ReadCloser { return &hider{stream: stream} }

const (
	// maxHeld is how much of an event is held back. A usage has a few hundred bytes.
	maxHeld  = 8 << 10
	hideRead = 4 << 10
)

// hider copies what it reads to out. An event that has nothing but the usage is cut off again.
type hider struct {
	stream   io.ReadCloser
	splitter sse.Splitter
	err      error // why there is no more to read

	buf    [hideRead]byte
	piece  []byte // what was read last
	passed int    // how much of piece is in out or was removed
	cutCR  bool   // the last byte was removed, and a line feed that comes next is the rest of it

	out   []byte // what was read and not removed
	ready int    // how much of out is for the client: the rest is the beginning of an event
	gone  int    // how much of out the client has
}

// Read implements io.Reader.
func (h *hider) Read(p []byte) (int, error) {
	for h.gone == h.ready && h.err == nil {
		h.readMore()
	}
	if h.gone == h.ready {
		return 0, h.err
	}
	n := copy(p, h.out[h.gone:h.ready])
	h.gone += n
	return n, nil
}

// Close implements io.Closer.
func (h *hider) Close() error { return h.stream.Close() }

func (h *hider) readMore() {
	h.out = append(h.out[:0], h.out[h.ready:]...)
	n, err := h.stream.Read(h.buf[:])
	h.piece, h.passed = h.buf[:n], 0
	if h.cutCR && n > 0 {
		h.cutCR = false
		if h.piece[0] == '\n' {
			h.passed = 1
		}
	}
	h.splitter.Split(h.piece, h.remove)
	h.out = append(h.out, h.piece[h.passed:]...)
	if errors.Is(err, io.EOF) {
		h.piece, h.passed = nil, 0
		h.splitter.End(h.remove) // SDKs read the last event even if no empty line comes after it
	}
	h.gone, h.ready, h.err = 0, len(h.out), err
	if held := h.splitter.Unfinished(); err == nil && held <= maxHeld {
		h.ready -= held
	}
}

// remove leaves the event out if it has nothing but the usage, and its beginning was held back.
func (h *hider) remove(e sse.Event) {
	begin, end := h.splitter.Bounds()
	if begin < -maxHeld || !hasOnlyUsage(e.Data) {
		return
	}
	if begin < 0 {
		h.out = h.out[:len(h.out)+begin]
	} else {
		h.out = append(h.out, h.piece[h.passed:begin]...)
	}
	h.passed, h.cutCR = end, end > 0 && end == len(h.piece) && h.piece[end-1] == '\r'
}

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
