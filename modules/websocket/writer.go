package websocket

import (
	"bytes"
	"io"
	"slices"
	"sync"

	"github.com/gobwas/ws"
)

// writer writes frames to one side. Each write has whole frames, so any
// goroutine may write at any time. The balancer's own events wait while a
// relayed message is incomplete.
type writer struct {
	lock
	to     io.Writer
	masked bool // as a client's frames are

	inMessage bool     // a message was begun that has not ended
	ending    bool     // a close frame of our own was written or waits, after which no other one may be
	closed    bool     // a close frame was written, after which nothing may follow
	pending   [][]byte // frames of our own that wait
	waiting   int      // how many bytes those have
}

// flush writes the frames of b. inMessage reports whether they end in the
// middle of a message. After a close frame, it writes nothing.
func (w *writer) flush(b *batch, inMessage bool) error {
	w.take()
	defer w.give()
	if w.closed || len(b.frames) == 0 {
		return nil
	}
	w.inMessage = inMessage
	if err := w.write(b.frames); err != nil {
		return err
	}
	return w.catchUp()
}

// catchUp writes the waiting frames if they may be written now.
func (w *writer) catchUp() error {
	if w.inMessage || len(w.pending) == 0 {
		return nil
	}
	frames := w.pending
	w.pending, w.waiting, w.closed = nil, 0, w.ending
	return w.write(bytes.Join(frames, nil))
}

func (w *writer) write(frames []byte) error {
	_, err := w.to.Write(frames)
	return err
}

// hasPending reports whether the balancer's own frames wait.
func (w *writer) hasPending() bool {
	w.take()
	defer w.give()
	return len(w.pending) > 0
}

// control writes a control frame. A close frame waits for the events before it,
// which say why the WebSocket is closed.
func (w *writer) control(op ws.OpCode, text []byte) error {
	b := takeBatch()
	defer b.put()
	b.add(w.head(op, true), text)
	w.take()
	defer w.give()
	switch {
	case w.closed, w.ending && op == ws.OpClose:
		return nil
	case op != ws.OpClose:
	case len(w.pending) > 0:
		w.pending, w.ending = append(w.pending, bytes.Clone(b.frames)), true
		return nil
	default:
		w.ending, w.closed = true, true
	}
	return w.write(b.frames)
}

// close writes a close frame with this code and reason.
func (w *writer) close(c *Close) error {
	return w.control(ws.OpClose, ws.NewCloseFrameBody(c.Code, c.Reason))
}

// say writes a message of the balancer's own, or keeps it until it may be
// written.
func (w *writer) say(text []byte) error {
	b := takeBatch()
	defer b.put()
	b.add(w.head(ws.OpText, true), text)
	w.take()
	defer w.give()
	switch {
	case w.ending:
		return nil
	case !w.inMessage:
		return w.write(b.frames)
	case len(w.pending) >= maxPending, w.waiting+len(b.frames) > maxPendingBytes:
		return errManyWaiting
	}
	w.pending, w.waiting = append(w.pending, bytes.Clone(b.frames)), w.waiting+len(b.frames)
	return nil
}

// pass writes a held message as one frame. It does not change the text of the
// pieces.
func (w *writer) pass(pieces ...[]byte) error {
	h := w.head(ws.OpText, true)
	for _, p := range pieces {
		h.Length += int64(len(p))
	}
	b := takeBatch()
	defer b.put()
	b.addHead(h)
	w.take()
	defer w.give()
	if w.closed {
		return nil
	}
	at := 0
	for _, text := range pieces {
		for part := range slices.Chunk(text, maxPiece) {
			if len(b.frames)+len(part) > maxBatch {
				if err := w.write(b.frames); err != nil {
					return err
				}
				b.frames = b.frames[:0]
			}
			b.addText(h, part, at)
			at += len(part)
		}
	}
	return w.write(b.frames)
}

// head returns the head of a frame for this side. Its length is not set.
func (w *writer) head(op ws.OpCode, fin bool) ws.Header {
	h := ws.Header{Fin: fin, OpCode: op, Masked: w.masked}
	if w.masked {
		h.Mask = ws.NewMask()
	}
	return h
}

// lock is a mutex that may be held for long, while a side is slow to read.
type lock chan struct{}

func (l lock) take() { l <- struct{}{} }
func (l lock) give() { <-l }

// maxBatch is the maximum length of the frames that are written together: a
// piece, and the data that was held back before it.
const maxBatch = ws.MaxHeaderSize + maxHeld + maxPiece

// batch is a buffer of frames that are written together. All WebSockets share
// the batches, so an idle WebSocket has none.
type batch struct {
	frames  []byte
	scratch [ws.MaxHeaderSize]byte
}

var batches = sync.Pool{New: func() any { return &batch{frames: make([]byte, 0, maxBatch)} }}

func takeBatch() *batch { return batches.Get().(*batch) }

// put returns the batch to the pool.
func (b *batch) put() {
	if cap(b.frames) > maxBatch {
		return // it has an event that is longer than any piece
	}
	b.frames = b.frames[:0]
	batches.Put(b)
}

// add adds a frame.
func (b *batch) add(h ws.Header, text []byte) {
	h.Length = int64(len(text))
	b.addHead(h)
	b.addText(h, text, 0)
}

func (b *batch) addHead(h ws.Header) {
	_ = ws.WriteHeaderBuffer(b, h, b.scratch[:]) // which fails only for a negative length
}

// addText adds a part of a frame's payload. number is the offset of the part in
// the payload.
func (b *batch) addText(h ws.Header, text []byte, number int) {
	begin := len(b.frames)
	if b.frames = append(b.frames, text...); h.Masked {
		ws.Cipher(b.frames[begin:], h.Mask, number)
	}
}

// Write implements io.Writer, for the library.
func (b *batch) Write(p []byte) (int, error) {
	b.frames = append(b.frames, p...)
	return len(p), nil
}
