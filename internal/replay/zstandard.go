package replay

import "github.com/klauspost/compress/zstd"

const (
	// maxWindow is the largest window that a body in zstd may have (RFC 9659
	// section 3).
	maxWindow = 8 << 20
	// A body that grows more than this is a bomb: JSON that is full of
	// repetitions grows to thirty times its size.
	maxGrowth  = 64
	freeGrowth = 256 << 10
)

// zstandard decodes bodies, as many at a time as there are processors. It uses
// the output as its window, so it needs hardly any memory of its own. Its
// options are valid.
var zstandard, _ = zstd.NewReader(nil, zstd.WithDecoderConcurrency(0),
	zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecodeAllCapLimit(true))

// decodeZstandard decodes a whole body in zstd. It returns nil if that cannot
// be read, is longer than limit, or far longer than what came.
//
// The buffer has the size that the body declares, or grows until the text fits.
// So a little that arrives never takes much memory.
func decodeZstandard(coded []byte, limit int) *Buffer {
	most := min(limit, freeGrowth+maxGrowth*len(coded))
	size := min(4*len(coded)+firstBuffer, most)
	var frame zstd.Header
	if frame.Decode(coded) == nil && frame.HasFCS {
		if frame.FrameContentSize > uint64(most) {
			return nil
		}
		size = max(int(frame.FrameContentSize), 1)
	}
	for ; ; size = min(4*size, most) {
		b := GetBuffer(size)
		text, err := zstandard.DecodeAll(coded, b.Bytes)
		if err == nil && len(text) <= most {
			b.Bytes = text
			return b
		}
		if b.Put(); size == most { // the decoder has several errors for a lack of room
			return nil
		}
	}
}
