package sse

import "bytes"

// beginning is the text with which the events of a stream begin. It saves
// searching the same text again: each chunk of a chat repeats the id, the time,
// the model and the fingerprint, which together are longer than the new word.
//
// At first it is the beginning of the first event. An event that begins
// differently shortens it to the common part. If that part would be too short,
// the event's own beginning replaces it.
type beginning struct {
	text   [maxBeginning]byte
	length int
}

const (
	maxBeginning = 384
	minBeginning = 32
)

// skip returns the data without the usual beginning, if it has that. It leaves
// the last overlap bytes of the beginning, so that each name that matters is
// complete in the rest, together with its value.
func (b *beginning) skip(data []byte) []byte {
	known := b.text[:b.length]
	if len(known) > 0 && bytes.HasPrefix(data, known) {
		return data[b.length-overlap:]
	}
	if common := commonLength(known, data); common >= minBeginning {
		b.length = common
	} else {
		b.length = copy(b.text[:], data[:nameless(data)])
	}
	return data
}

// overlap is how many bytes of a name that matters can be in the beginning
// without the whole name.
const overlap = len(`"error"`) - 1

// nameless returns the length of the beginning of the data before the first
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
