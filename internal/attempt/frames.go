package attempt

import (
	"crypto/rand"
	"encoding/binary"
)

// frames splits the bytes that one side of a WebSocket sends into frames (RFC 6455 section 5.2). Libraries decode frames; here they
// are passed on unchanged.
type frames struct {
	head [maxHead]byte // of the latest frame
	n    int           // bytes of the head that came. 0: it is complete, or none has begun
	left uint64        // bytes of the frame after its head that have not come
	used int           // bytes of it that came
}

// maxPing is how long a control frame may be.
const maxPing = 125

// maxHead is two bytes, a length of eight and a mask of four.
const maxHead = 14

const (
	opcodeText   = 0x1
	lastData     = 0x2 // the opcodes of continuations, text and binary data
	firstControl = 0x8
	opcodeClose  = 0x8
	opcodePing   = 0x9
	lastOpcode   = 0xA
	finalFrame   = 0x80 // of the first byte
	reservedBits = 0x70
	masked       = 0x80 // of the second byte
)

// next returns how many of the bytes belong together: they are of a head, or of what is in a frame. begins reports whether they
// complete a head.
func (f *frames) next(p []byte) (n int, begins bool) {
	if f.left > 0 {
		n = int(min(f.left, uint64(len(p))))
		f.left -= uint64(n)
		f.used += n
		return n, false
	}
	for n < len(p) && !begins {
		f.head[f.n] = p[n]
		f.n++
		n++
		begins = f.n >= 2 && f.n == f.headLength()
	}
	if begins {
		f.n, f.used, f.left = 0, 0, f.length()
	}
	return n, begins
}

// between reports whether no frame is incomplete.
func (f *frames) between() bool { return f.n == 0 && f.left == 0 }

func (f *frames) opcode() byte { return f.head[0] & 0x0f }

func (f *frames) isControl() bool { return f.opcode() >= firstControl }

// headLength is how long the head of the frame is, whose first two bytes are there.
func (f *frames) headLength() int {
	n := 2 + f.lengthBytes()
	if f.head[1]&masked != 0 {
		n += 4
	}
	return n
}

// lengthBytes is how many bytes after the first two are the frame's length.
func (f *frames) lengthBytes() int {
	switch f.head[1] & 0x7f {
	case 126:
		return 2
	case 127:
		return 8
	}
	return 0
}

// length is what the head says.
func (f *frames) length() uint64 {
	switch f.lengthBytes() {
	case 0:
		return uint64(f.head[1] & 0x7f)
	case 2:
		return uint64(binary.BigEndian.Uint16(f.head[2:]))
	}
	return binary.BigEndian.Uint64(f.head[2:])
}

// unmask appends the latest bytes of a frame, which next returned, without their mask.
func (f *frames) unmask(to, p []byte) []byte {
	at := len(to)
	if to = append(to, p...); f.head[1]&masked != 0 {
		mask := f.head[f.headLength()-4 : f.headLength()]
		applyMask(to[at:], mask, f.used-len(p))
	}
	return to
}

// applyMask masks or unmasks bytes of a frame, of which the first has this number.
func applyMask(p, mask []byte, number int) {
	var key [8]byte
	for i := range key {
		key[i] = mask[(number+i)&3]
	}
	word := binary.LittleEndian.Uint64(key[:])
	for ; len(p) >= 8; p = p[8:] {
		binary.LittleEndian.PutUint64(p, binary.LittleEndian.Uint64(p)^word)
	}
	for i := range p {
		p[i] ^= key[i]
	}
}

// frame returns a frame that is a whole message, of a server or, with a mask, of a client.
func frame(opcode byte, client bool, pieces ...[]byte) []byte {
	length := 0
	for _, piece := range pieces {
		length += len(piece)
	}
	f := make([]byte, 2, maxHead+length)
	f[0] = finalFrame | opcode
	switch {
	case length < 126:
		f[1] = byte(length)
	case length <= 0xffff:
		f[1] = 126
		f = binary.BigEndian.AppendUint16(f, uint16(length))
	default:
		f[1] = 127
		f = binary.BigEndian.AppendUint64(f, uint64(length))
	}
	var mask [4]byte
	if client {
		_, _ = rand.Read(mask[:]) // which never fails
		f[1] |= masked
		f = append(f, mask[:]...)
	}
	at := len(f)
	for _, piece := range pieces {
		f = append(f, piece...)
	}
	applyMask(f[at:], mask[:], 0) // with zeros, it changes nothing
	return f
}

// closeFrame returns a close frame with this code.
func closeFrame(code uint16, client bool) []byte {
	return frame(opcodeClose, client, binary.BigEndian.AppendUint16(nil, code))
}

// ending follows one side of a WebSocket up to its close frame.
type ending struct {
	frames
	// data reports whether a frame with data began, and closing whether a close frame did.
	data, closing bool
}

// watch reads the next bytes.
func (e *ending) watch(p []byte) {
	for len(p) > 0 && !e.closing {
		n, begins := e.next(p)
		p = p[n:]
		if begins {
			e.data = e.data || e.opcode() <= lastData
			e.closing = e.opcode() == opcodeClose
		}
	}
}
