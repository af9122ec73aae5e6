package websocket

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gobwas/ws"
)

// maxPiece is the longest piece of a message. A frame up to this length is one
// piece.
const maxPiece = 64 << 10

// reader reads the frames of one side as pieces. A piece is a control frame, or
// a part of a message within one frame. await waits for the beginning of the
// next piece, and read reads it.
//
// Between await and read, only the head of a frame is kept, so an idle
// WebSocket needs no buffer besides that of from.
type reader struct {
	from  *bufio.Reader
	state ws.State // whose frames they are, and whether a message has begun

	head  ws.Header // of the current frame
	begun bool      // the current piece was not read
	left  int64     // bytes of the current frame that were not read
	at    int       // how many were
	op    ws.OpCode // whether the current message is text or binary

	frames  int // of the current message
	scratch [ws.MaxHeaderSize]byte
	// framed reports whether a frame was read. Until then, early has the bytes
	// that were read.
	framed bool
	early  bytes.Buffer
	source
}

// source is a connection that measures how long a read waits.
type source struct {
	io.Reader
	begun time.Time
	// since is when the current read began to wait, after begun. It is 0
	// between reads.
	since atomic.Int64
}

// Read implements io.Reader.
func (s *source) Read(p []byte) (int, error) {
	s.since.Store(int64(time.Since(s.begun)) + 1)
	defer s.since.Store(0)
	return s.Reader.Read(p)
}

// silent returns how long the current read has waited.
func (s *source) silent() time.Duration {
	if since := s.since.Load(); since > 0 {
		return time.Since(s.begun) - time.Duration(since-1)
	}
	return 0
}

// piece is a control frame, or a part of a message.
type piece struct {
	op   ws.OpCode
	text []byte
	last bool // the message ends with it
}

// ready reports whether the head of a frame is surely buffered. It may report
// false although a short frame is.
func (r *reader) ready() bool { return r.begun || r.from.Buffered() >= ws.MaxHeaderSize }

// await waits for the next piece. An error of type *Close means that the side
// broke the protocol. Empty frames that do not end a message are skipped, but
// their number is limited.
func (r *reader) await() error {
	for !r.begun {
		if err := r.next(); err != nil {
			return err
		}
	}
	return nil
}

// next reads the head of the next frame.
func (r *reader) next() (err error) {
	from := io.Reader(r.from)
	if !r.framed {
		from = io.TeeReader(from, &r.early)
	}
	if r.head, err = ws.ReadHeaderBuffer(from, r.scratch[:2]); err != nil {
		if errors.Is(err, ws.ErrHeaderLengthMSB) {
			return errFrames
		}
		return err
	}
	switch err = ws.CheckHeader(r.head, r.state); {
	case errors.Is(err, ws.ErrProtocolNonZeroRsv):
		return errCompressed
	case err != nil:
		return errFrames
	}
	if !r.framed {
		r.framed, r.early = true, bytes.Buffer{}
	}
	r.left, r.at, r.begun = r.head.Length, 0, true
	if r.head.OpCode.IsControl() {
		return nil
	}
	if r.head.OpCode != ws.OpContinuation {
		r.op, r.frames = r.head.OpCode, 0
	}
	r.frames++
	r.state = r.state.Clear(ws.StateFragmented)
	if !r.head.Fin {
		r.state = r.state.Set(ws.StateFragmented)
	}
	if r.begun = r.left > 0 || r.head.Fin; !r.begun && r.frames > maxFrames {
		return errManyFrames
	}
	return nil
}

// unframed returns all data of a side whose first bytes were not a frame.
func (r *reader) unframed() io.Reader { return io.MultiReader(&r.early, r.from) }

// isControl reports whether the piece is a control frame.
func (r *reader) isControl() bool { return r.head.OpCode.IsControl() }

// size returns the length of the piece if all of it fits.
func (r *reader) size() int { return int(min(r.left, maxPiece)) }

// isWhole reports whether the piece is a whole message and all of it is
// buffered.
func (r *reader) isWhole() bool {
	return r.head.Fin && r.head.OpCode != ws.OpContinuation && r.left <= int64(r.from.Buffered())
}

// read reads the piece, or as much of it as fits. The rest is the next piece.
func (r *reader) read(room []byte) (p piece, err error) {
	p.op, p.text = r.op, room[:min(len(room), r.size())]
	if r.isControl() {
		p.op = r.head.OpCode
	}
	if _, err = io.ReadFull(r.from, p.text); err != nil {
		return piece{}, err
	}
	if r.head.Masked {
		ws.Cipher(p.text, r.head.Mask, r.at)
	}
	r.at += len(p.text)
	r.left -= int64(len(p.text))
	r.begun = r.left > 0
	p.last = r.head.Fin && !r.begun
	return p, nil
}

// inMessage reports whether a message has begun and not ended.
func (r *reader) inMessage() bool {
	return r.state.Fragmented() || r.begun && !r.isControl()
}

// rooms are buffers for pieces that are read and not kept. All WebSockets share
// them, so an idle WebSocket has none.
var rooms = sync.Pool{New: func() any { return new([maxPiece]byte) }}

func takeRoom() *[maxPiece]byte { return rooms.Get().(*[maxPiece]byte) }
