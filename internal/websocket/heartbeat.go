package websocket

import (
	"crypto/rand"
	"sync"
	"time"

	"github.com/gobwas/ws"
)

// silence is after how long a side that has sent nothing gets a ping. After two
// that it did not answer in as long each, it is gone.
const silence = 20 * time.Second

// heartbeat watches whether a side still answers. A timer goes off when the
// side may have been silent for long enough. It is not set again for each
// frame: it looks when the side was last heard. A side from which nothing is
// read, because the other one does not take what it sent, is not silent.
type heartbeat struct {
	options Options
	side    *reader
	to      *writer
	// gone is called if the side is silent for too long, and abort after a
	// panic.
	gone, abort func()

	// mark is in our pings, and so in the side's pongs, which the other side
	// did not ask for.
	mark [8]byte

	mu    sync.Mutex
	timer *time.Timer
	over  bool
}

// begin begins the watch.
func (h *heartbeat) begin(o Options, side *reader, to *writer, gone, abort func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.timer != nil || h.over {
		return
	}
	h.options, h.side, h.to, h.gone, h.abort = o, side, to, gone, abort
	_, _ = rand.Read(h.mark[:]) // which never fails
	h.timer = time.AfterFunc(silence, h.beat)
}

// beat is called when the side may be silent. A ping may have to wait until the
// side takes what was written before. If it takes nothing, the next beats find
// it silent.
func (h *heartbeat) beat() {
	defer h.options.recovered(h.abort)
	quiet := h.side.silent()
	if quiet >= 3*silence {
		h.gone()
		return
	}
	next := silence
	if quiet < silence {
		next -= quiet
	}
	if h.again(next) && quiet >= silence {
		_ = h.to.control(ws.OpPing, h.mark[:]) // if that fails, so does a read
	}
}

// again sets the timer, unless the watch is over.
func (h *heartbeat) again(after time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.over {
		h.timer.Reset(after)
	}
	return !h.over
}

// isOwn reports whether a pong answers one of our pings.
func (h *heartbeat) isOwn(pong []byte) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.timer != nil && string(pong) == string(h.mark[:])
}

// end ends the watch.
func (h *heartbeat) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over = true; h.timer != nil {
		h.timer.Stop()
	}
}
