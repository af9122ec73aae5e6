package usage

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"

	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// Hide takes out of a stream of chat or completions the chunk that tells only its usage, which the
// client did not ask for. All other bytes stay as they are. An event is held back until its end came;
// one that is much longer than such a chunk is not.
func Hide(stream io.ReadCloser) io.ReadCloser { return &hider{stream: stream} }

const (
	// maxHeld is how long an event may be to be taken out. A usage has a few hundred bytes.
	maxHeld  = 8 << 10
	hideRead = 4 << 10
)

// hider cuts a stream into units: an event with the empty line after it, or a comment before one.
type hider struct {
	stream io.ReadCloser
	buf    [hideRead]byte
	err    error  // why there is no more to read
	out    []byte // what the client gets
	gone   int    // how much of it the client has

	held   []byte // the beginning of a unit that may be taken out
	passes bool   // the rest of the unit passes
	hidden bool   // the last unit was taken out

	begun   bool // some of the unit came
	comment bool // the unit is a comment, and ends with its line
	inLine  bool // the line has a byte
	gotCR   bool // the last byte was a carriage return
}

// Read implements io.Reader.
func (h *hider) Read(p []byte) (int, error) {
	for h.gone == len(h.out) && h.err == nil {
		h.out, h.gone = h.out[:0], 0
		n, err := h.stream.Read(h.buf[:])
		h.take(h.buf[:n])
		if h.err = err; errors.Is(err, io.EOF) {
			h.endUnit(h.held) // SDKs read the last event even if no empty line comes after it
		} else if err != nil {
			h.out = append(h.out, h.held...)
		}
	}
	if h.gone == len(h.out) {
		return 0, h.err
	}
	n := copy(p, h.out[h.gone:])
	h.gone += n
	return n, nil
}

// Close implements io.Closer.
func (h *hider) Close() error { return h.stream.Close() }

func (h *hider) take(data []byte) {
	for len(data) > 0 {
		if !h.begun && h.gotCR && data[0] == '\n' { // of the line that ended the last unit
			if !h.hidden {
				h.out = append(h.out, '\n')
			}
			h.gotCR, data = false, data[1:]
			continue
		}
		if !h.begun {
			h.begun, h.comment = true, data[0] == ':'
			h.passes = h.comment
		}
		n, ends := h.unitEnd(data)
		part := data[:n]
		data = data[n:]
		switch {
		case h.passes:
			h.out = append(h.out, part...)
		case ends && len(h.held) == 0:
			h.endUnit(part)
		default:
			h.held = append(h.held, part...)
			if ends {
				h.endUnit(h.held)
			} else if h.passes = len(h.held) > maxHeld; h.passes {
				h.out = append(h.out, h.held...)
			}
			if ends || h.passes {
				h.held = h.held[:0]
			}
		}
		h.hidden = h.hidden && !h.passes
		h.begun = !ends
	}
}

// unitEnd returns how much of the data belongs to the unit, and whether that ends there.
func (h *hider) unitEnd(data []byte) (n int, ends bool) {
	for n < len(data) {
		switch c := data[n]; {
		case c == '\n' && h.gotCR:
			h.gotCR = false
			n++
		case c == '\n' || c == '\r':
			ends = !h.inLine || h.comment
			h.inLine, h.gotCR = false, c == '\r'
			n++
			if ends {
				return n, true
			}
		default:
			h.inLine, h.gotCR = true, false
			if end := bytes.IndexAny(data[n:], "\r\n"); end > 0 {
				n += end
			} else {
				n = len(data)
			}
		}
	}
	return n, false
}

// endUnit passes a unit on, unless it is to be taken out.
func (h *hider) endUnit(unit []byte) {
	if h.hidden = tellsOnlyUsage(unit); !h.hidden {
		h.out = append(h.out, unit...)
	}
}

func tellsOnlyUsage(unit []byte) (only bool) {
	if !mayHoldUsage(unit) {
		return false
	}
	judge := func(e sse.Event) {
		var chunk struct {
			Choices *[]json.RawMessage `json:"choices"`
			Usage   map[string]any     `json:"usage"`
		}
		only = json.Unmarshal(e.Data, &chunk) == nil && chunk.Choices != nil && len(*chunk.Choices) == 0 && chunk.Usage != nil
	}
	var s sse.Splitter
	s.Split(unit, judge)
	s.End(judge)
	return only
}
