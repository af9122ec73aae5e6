package openaiapi

import (
	"compress/gzip"
	"compress/zlib"
	"errors"
	"io"
	"iter"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// Decoder decodes a compressed body as it passes. Write takes the body in
// pieces, and the sink gets the decoded data. If the data cannot be decoded, it
// stops without an error.
//
// The existing decoders read from a reader and block until it has data. So they
// run as a coroutine, which continues in each Write until it has used up the
// piece. Nothing runs concurrently, and Close ends the coroutine.
type Decoder struct {
	encoding string
	sink     func([]byte)
	next     func() (struct{}, bool)
	stop     func()

	// IsCut reports whether the body ended before its compressed data did.
	IsCut bool

	wait    func(struct{}) bool
	piece   []byte
	atEnd   bool
	closed  bool
	in, out int64
}

// A decoded body may be freeGrowth bytes longer than maxGrowth times its
// compressed length. A longer one is a decompression bomb: even JSON that is
// full of repetitions grows only to thirty times its size.
const (
	maxGrowth  = 64
	freeGrowth = 256 << 10
)

// stepSize is the size of a decoding step.
const stepSize = 8 << 10

// NewDecoder returns a decoder for this Content-Encoding. It is nil if the
// coding is not known.
func NewDecoder(encoding string, sink func([]byte)) *Decoder {
	d := &Decoder{encoding: strings.ToLower(encoding), sink: sink}
	switch d.encoding {
	case "gzip", "x-gzip", "deflate", "zstd":
		return d
	}
	return nil
}

// Write decodes the next bytes of the body.
func (d *Decoder) Write(p []byte) {
	if d.closed {
		return
	}
	if d.next == nil {
		d.next, d.stop = iter.Pull(d.run)
	}
	d.piece = p
	d.in += int64(len(p))
	d.next()
	d.piece = nil
}

// Close ends the decoding. The sink gets the data that is left.
func (d *Decoder) Close() {
	d.closed = true
	if d.stop != nil {
		d.stop()
	}
}

// Read implements io.Reader, for the decoders.
func (d *Decoder) Read(p []byte) (int, error) {
	if !d.waitForPiece() {
		return 0, io.EOF
	}
	n := copy(p, d.piece)
	d.piece = d.piece[n:]
	return n, nil
}

// ReadByte implements io.ByteReader. Without it, the gzip and zlib decoders
// would add a buffer.
func (d *Decoder) ReadByte() (byte, error) {
	if !d.waitForPiece() {
		return 0, io.EOF
	}
	b := d.piece[0]
	d.piece = d.piece[1:]
	return b, nil
}

// waitForPiece waits for the next piece if the current one is used up. It
// reports false at the end of the body.
func (d *Decoder) waitForPiece() bool {
	for len(d.piece) == 0 && !d.atEnd {
		d.atEnd = !d.wait(struct{}{})
	}
	return len(d.piece) > 0
}

func (d *Decoder) run(wait func(struct{}) bool) {
	d.wait = wait
	decoder, release := openCoding(d.encoding, d)
	if decoder == nil {
		return
	}
	defer release()
	buf := stepBuffers.Get().(*[stepSize]byte)
	defer stepBuffers.Put(buf)
	for {
		n, err := decoder.Read(buf[:])
		if d.out += int64(n); d.out > freeGrowth+maxGrowth*d.in {
			return
		}
		d.sink(buf[:n])
		if err != nil {
			d.IsCut = errors.Is(err, io.ErrUnexpectedEOF)
			return
		}
	}
}

// Pools of buffers and decoders, which are large enough to be worth reusing.
var (
	stepBuffers = sync.Pool{New: func() any { return new([stepSize]byte) }}
	gzips       = sync.Pool{New: func() any { return new(gzip.Reader) }}
	zlibs       sync.Pool
)

// maxWindow limits the memory that decoding zstd needs.
const maxWindow = 1 << 20

// openCoding returns a decoder of the body, and a function that returns it to
// its pool. It returns nil if the coding is not supported, or the data is not
// the beginning of such a body.
func openCoding(encoding string, body io.Reader) (decoder io.Reader, release func()) {
	switch encoding {
	case "zstd":
		z, err := zstd.NewReader(body, zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, nil
		}
		return z, z.Close
	case "deflate":
		var z io.ReadCloser
		var err error
		if used := zlibs.Get(); used == nil {
			z, err = zlib.NewReader(body)
		} else {
			z, err = used.(io.ReadCloser), used.(zlib.Resetter).Reset(body, nil)
		}
		if err != nil {
			return nil, nil
		}
		return z, func() { zlibs.Put(z) }
	case "gzip", "x-gzip":
		z := gzips.Get().(*gzip.Reader)
		if z.Reset(body) != nil {
			return nil, nil
		}
		return z, func() { gzips.Put(z) }
	}
	return nil, nil
}
