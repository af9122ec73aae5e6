package attempt

import "encoding/binary"

// frames follows the frames that one side of a WebSocket sends (RFC 6455 section 5.2).
// It skips what is in them.
type frames struct {
	// data reports whether a frame with data began, and closing whether a close frame did.
	data, closing bool

	head [maxHead]byte // of the frame that begins
	n    int           // bytes of head that came
	skip uint64        // bytes of the frame after its head that did not come yet
}

// maxHead is two bytes, a length of eight and a mask of four.
const maxHead = 14

const (
	lastData    = 0x2 // the opcodes of continuations, text and binary data
	opcodeClose = 0x8
)

// watch reads the next bytes.
func (f *frames) watch(p []byte) {
	for len(p) > 0 && !f.closing {
		if f.skip > 0 {
			skipped := min(f.skip, uint64(len(p)))
			f.skip -= skipped
			p = p[skipped:]
			continue
		}
		f.head[f.n] = p[0]
		f.n++
		p = p[1:]
		if f.n == f.headLength() {
			f.begin()
		}
	}
}

// headLength is how long the head of the frame is, as far as it is known.
func (f *frames) headLength() int {
	if f.n < 2 {
		return 2
	}
	n := 2 + f.lengthBytes()
	if f.head[1]&0x80 != 0 {
		n += 4 // the mask
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

// begin takes the head of a frame.
func (f *frames) begin() {
	switch opcode := f.head[0] & 0x0f; {
	case opcode <= lastData:
		f.data = true
	case opcode == opcodeClose:
		f.closing = true
	}
	switch f.lengthBytes() {
	case 0:
		f.skip = uint64(f.head[1] & 0x7f)
	case 2:
		f.skip = uint64(binary.BigEndian.Uint16(f.head[2:]))
	default:
		f.skip = binary.BigEndian.Uint64(f.head[2:])
	}
	f.n = 0
}
