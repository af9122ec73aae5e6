package attempt

import (
	"unicode/utf8"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

// The codes of close frames (RFC 6455 section 7.4.1).
const (
	closeNormal      = 1000
	closeGoingAway   = 1001
	closeProtocol    = 1002
	closeUnsupported = 1003
	closeNotUTF8     = 1007
	closePolicy      = 1008
	closeTooBig      = 1009
)

// message is one that came in one or more frames: as it came, and what it says.
type message struct{ raw, text []byte }

// holder holds each message of a client until all of it has come.
type holder struct {
	frames
	// most is how long a message may be.
	most uint64

	held    message
	control message // a control frame, which may come amid a message
	within  bool    // a message has begun
	last    bool    // its last frame has
	size    uint64
}

// take reads the next bytes. It calls whole with each message of text that ends in them, and control with each control
// frame, neither of which it keeps. It returns the code with which the WebSocket is to be closed, or 0.
func (h *holder) take(p []byte, whole func(message), control func(opcode byte, m message)) (code uint16) {
	for len(p) > 0 {
		n, begins := h.next(p)
		piece := p[:n]
		p = p[n:]
		if !begins && h.n > 0 {
			break // a part of a head
		}
		if begins {
			if code = h.begin(); code != 0 {
				return code
			}
		}
		to := &h.held
		if h.isControl() {
			to = &h.control
		}
		if begins {
			to.raw = append(to.raw, h.head[:h.headLength()]...)
		} else {
			to.raw, to.text = append(to.raw, piece...), h.unmask(to.text, piece)
		}
		switch {
		case !h.between():
		case h.isControl():
			control(h.opcode(), h.control)
			h.control = message{}
		case h.last:
			h.within, h.size = false, 0
			m := h.held
			h.held = message{}
			if !utf8.Valid(m.text) {
				return closeNotUTF8
			}
			whole(m)
		}
	}
	return 0
}

// begin checks the head of a frame.
func (h *holder) begin() (code uint16) {
	final, opcode := h.head[0]&finalFrame != 0, h.opcode()
	switch {
	case h.head[0]&reservedBits != 0:
		return closeUnsupported // no extension was agreed upon: it is compressed
	case opcode > lastOpcode, h.head[1]&masked == 0, h.isControl() && (!final || h.left > maxPing):
		return closeProtocol
	case h.isControl():
		return 0
	case opcode > lastData, h.within != (opcode == 0):
		return closeProtocol
	case opcode == lastData:
		return closeUnsupported // binary
	}
	if h.within, h.last = true, final; h.size > h.most || h.left > h.most-h.size {
		return closeTooBig
	}
	h.size += h.left
	return 0
}

// listener reads the messages of a backend as they pass.
type listener struct {
	frames
	within, last bool
	// text is what is kept of a message that does not lie in one piece. long reports whether it is longer than that.
	text []byte
	long bool
	// closing reports whether a close frame began, and unreadable whether the bytes are compressed, or no valid frames.
	closing, unreadable bool
	// bad is the offset of the head that makes it unreadable, in the bytes in which that head ends.
	bad int
	// code is that of the close frame, as far as it came.
	code uint16
}

// take reads the next bytes. It calls each with every message that ends in them, and part with the bytes of messages that are
// longer than sse.MaxEvent. at is where the last message ends, or a frame between two messages, and end where the last frame ends.
// They are -1 if none does.
func (l *listener) take(p []byte, each func(sse.Event), part func([]byte)) (at, end int) {
	at, end = -1, -1
	for i := 0; i < len(p) && !l.unreadable; {
		n, begins := l.next(p[i:])
		piece := p[i : i+n]
		if i += n; !begins && l.n > 0 {
			break
		}
		if begins {
			if l.begin(); l.unreadable {
				l.bad = i - l.headLength()
			}
			piece = nil
		}
		if !l.isControl() {
			l.read(piece, each, part)
		} else if l.opcode() == opcodeClose {
			for _, b := range piece[:min(len(piece), max(0, 2+len(piece)-l.used))] {
				l.code = l.code<<8 | uint16(b)
			}
		}
		if !l.between() || l.unreadable {
			continue
		}
		if end = i; !l.within {
			at = i
		}
	}
	return at, end
}

// waits reports whether an incomplete frame is kept back until its end: all but long ones are.
func (l *listener) waits() bool {
	return !l.unreadable && !l.between() && (l.n > 0 || l.left+uint64(l.used) <= sse.MaxEvent)
}

func (l *listener) begin() {
	opcode := l.opcode()
	l.unreadable = l.head[0]&reservedBits != 0 || opcode > lastOpcode || l.head[1]&masked != 0 ||
		!l.isControl() && (opcode > lastData || l.within != (opcode == 0))
	l.closing = l.closing || opcode == opcodeClose
	if !l.isControl() {
		l.within, l.last = true, l.head[0]&finalFrame != 0
	}
}

// read reads the next bytes of a message.
func (l *listener) read(piece []byte, each func(sse.Event), part func([]byte)) {
	ends := l.between() && l.last
	whole := ends && len(l.text) == 0 && !l.long
	switch {
	case whole && len(piece) <= sse.MaxEvent:
	case l.long:
		part(piece)
		piece = nil
	case len(l.text)+len(piece) > sse.MaxEvent:
		l.long = true
		kept := sse.MaxEvent - len(l.text)
		l.text = append(l.text, piece[:kept]...)
		part(l.text)
		part(piece[kept:])
		piece = nil
	default:
		l.text = append(l.text, piece...)
		piece = nil
	}
	if !ends {
		return
	}
	e := sse.Event{Data: l.text, TooLong: l.long}
	if piece != nil {
		e.Data = piece
	}
	e.Name = openaiapi.TypeOf(e.Data)
	each(e)
	l.within, l.text, l.long = false, nil, false
}
