package replay

import (
	"math/bits"
	"sync"
)

// Buffer is memory on loan, for prompts and replies, so that the garbage
// collector has less to do. Put gives it back. Whoever does so must be certain
// that it is not read any more.
type Buffer struct {
	// Bytes is empty at first, and may be changed in any way.
	Bytes []byte
	lent  []byte
	// coded is the compressed form of Bytes. It is nil if Bytes were not
	// decoded. Put gives it back as well.
	coded *Buffer
}

const (
	smallestLog = 10 // 1 KiB
	largestLog  = 26 // 64 MiB
	// stepsLog is the logarithm of how many sizes there are from one power of
	// two to the next, so that hardly more than a sixteenth of a buffer is
	// spare.
	stepsLog = 4
	classes  = (largestLog-smallestLog)<<stepsLog + 1
)

// pools have the buffers of each size.
var pools [classes]sync.Pool

// GetBuffer lends a buffer with room for n bytes.
func GetBuffer(n int) *Buffer {
	i, size := class(n)
	if i >= classes {
		return &Buffer{Bytes: make([]byte, 0, n)}
	}
	if b, ok := pools[i].Get().(*Buffer); ok {
		return b
	}
	memory := make([]byte, 0, size)
	return &Buffer{Bytes: memory, lent: memory}
}

// Put gives the buffer back. It, or its bytes, must not be used after that. A
// buffer that is too large to be kept is left to the garbage collector.
func (b *Buffer) Put() {
	if b == nil {
		return
	}
	b.coded.Put()
	if b.coded = nil; b.lent == nil {
		return
	}
	b.Bytes = b.lent
	i, _ := class(cap(b.lent))
	pools[i].Put(b)
}

// class returns the smallest size of at least n bytes, and which one it is.
func class(n int) (i, size int) {
	if n <= 1<<smallestLog {
		return 0, 1 << smallestLog
	}
	log := bits.Len(uint(n-1)) - 1
	step := 1 << (log - stepsLog)
	above := (n-1-1<<log)/step + 1
	return (log-smallestLog)<<stepsLog + above, 1<<log + above*step
}
