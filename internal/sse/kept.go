package sse

import "sync"

// kept is a buffer for the text of an event that has not ended. Most events are
// short, so a stream keeps a small buffer for the next one. A longer text
// borrows a large buffer until its event has ended. Growing a buffer for each
// event would cost far more than reading it, and keeping the large one would
// waste memory while a stream waits for its next event.
type kept struct {
	text  []byte
	small []byte // the buffer that stays, while a large one is borrowed
	large *[maxLine]byte
}

// maxSmall is the largest buffer that stays with a stream.
const maxSmall = 8 << 10

var largeBuffers = sync.Pool{New: func() any { return new([maxLine]byte) }}

// add appends to the text, which must not become longer than maxLine.
func (k *kept) add(b []byte) {
	if length := len(k.text) + len(b); length > maxSmall && k.large == nil {
		k.large, k.small = largeBuffers.Get().(*[maxLine]byte), k.text[:0]
		k.text = append(k.large[:0], k.text...)
	}
	k.text = append(k.text, b...)
}

// clear empties the text. A borrowed buffer stays until the event has ended.
func (k *kept) clear() { k.text = k.text[:0] }

// end empties the text, and returns a borrowed buffer.
func (k *kept) end() {
	if k.clear(); k.large != nil {
		largeBuffers.Put(k.large)
		k.text, k.small, k.large = k.small, nil, nil
	}
}
