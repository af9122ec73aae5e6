package regions

import (
	"hash/maphash"
	"time"
)

// heard are the messages that were heard lately. Each comes once from every
// server, and the first of them counts. From one server, two equal messages are
// two.
type heard struct {
	// recent are the latest messages, by the server from which they came first,
	// and earlier those before.
	recent, earlier map[uint64]int
	since           time.Time
}

const (
	// remembered is for how long a message is remembered, at least.
	remembered = 10 * time.Second
	// maxHeard is how many messages are in each generation.
	maxHeard = 1 << 16
)

var seed = maphash.MakeSeed()

// isNew reports whether no other server has sent the message.
func (h *heard) isNew(message []byte, server int, now time.Time) bool {
	if now.Sub(h.since) >= remembered || len(h.recent) >= maxHeard {
		h.recent, h.earlier, h.since = make(map[uint64]int), h.recent, now
	}
	sum := maphash.Bytes(seed, message)
	first, known := h.recent[sum]
	if !known {
		first, known = h.earlier[sum]
	}
	if !known {
		h.recent[sum] = server
	}
	return !known || first == server
}
