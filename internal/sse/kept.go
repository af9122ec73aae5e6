package sse

import "sync"

// kept is text that is kept until the event has ended. Most events are short,
// and a stream keeps its small buffer for the next one. A longer text borrows a
// large buffer until the event has ended: growing one anew for each event of a
// stream would cost far more than reading it, and a stream that waits for its
// next event holds no memory for the longest one.
type kept struct {
	text  []byte
	small []byte // the buffer that stays, while a large one is borrowed
	large *[maxLine]byte
}

// maxSmall is how large the buffer is that stays with a stream.
const maxSmall = 8 << 10

var largeBuffers = sync.Pool{New: func() any { return new([maxLine]byte) }}

// add adds to the text, which must not become longer than maxLine.
func (k *kept) add(b []byte) {
	if length := len(k.text) + len(b); length > maxSmall && k.large == nil {
		k.large, k.small = largeBuffers.Get().(*[maxLine]byte), k.text[:0]
		k.text = append(k.large[:0], k.text...)
	}
	k.text = append(k.text, b...)
}

// clear empties the text. A large buffer stays until the event has ended.
func (k *kept) clear() { k.text = k.text[:0] }

// end empties the text, and gives a large buffer back.
func (k *kept) end() {
	if k.clear(); k.large != nil {
		largeBuffers.Put(k.large)
		k.text, k.small, k.large = k.small, nil, nil
	}
}
