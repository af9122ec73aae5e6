package sse

import "bytes"

// beginning is what the events of a stream begin with. Each chunk of a chat
// repeats the id, the time, the model and the fingerprint, which together are
// longer than the word that it brings. What was searched once is not searched
// again.
//
// At first it is the beginning of the first event. An event that begins in
// another way shortens it, and one that shares hardly anything with it replaces
// it.
type beginning struct {
	text   [maxBeginning]byte
	length int
}

const (
	maxBeginning = 384
	minBeginning = 32
)

// skip returns the data without its beginning, if that is the usual one. It
// leaves so much of it that each name that matters is whole in the rest, and so
// is its value.
func (b *beginning) skip(data []byte) []byte {
	known := b.text[:b.length]
	if len(known) > 0 && bytes.HasPrefix(data, known) {
		return data[b.length-overlap:]
	}
	if same := commonLength(known, data); same >= minBeginning {
		b.length = same
	} else {
		b.length = copy(b.text[:], data[:nameless(data)])
	}
	return data
}

// overlap is how many bytes of a name that matters can be in the beginning, if
// it is not all there.
const overlap = len(`"error"`) - 1

// nameless returns how many bytes at the beginning of the data have no whole
// name that matters.
func nameless(data []byte) int {
	n := min(len(data), maxBeginning)
	for _, name := range [][]byte{errorName, usageEnd} {
		if i := bytes.Index(data[:n], name); i >= 0 {
			n = i
		}
	}
	if n < minBeginning {
		return 0
	}
	return n
}

var usageEnd = []byte(`usage"`)

func commonLength(a, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}
