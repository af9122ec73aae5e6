package websocket

import (
	"crypto/rand"
	"sync"
	"time"

	"github.com/gobwas/ws"
)

// silence is how long a side may send nothing before it gets a ping. It is gone
// after two more such times without an answer.
const silence = 20 * time.Second

// heartbeat detects a side that no longer answers. Its timer is not reset for
// each frame: when the timer fires, heartbeat checks when the side was last
// heard, and sets the timer for the rest. A side from which nothing is read,
// because the other side does not take its data, does not count as silent.
type heartbeat struct {
	options Options
	side    *reader
	to      *writer
	// gone is called if the side is silent for too long. abort is called after
	// a panic.
	gone, abort func()

	// mark is the payload of the balancer's pings. It distinguishes the
	// answering pongs, which the other side must not get.
	mark [8]byte

	mu    sync.Mutex
	timer *time.Timer
	ended bool
}

// begin starts the heartbeat.
func (h *heartbeat) begin(o Options, side *reader, to *writer, gone, abort func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.timer != nil || h.ended {
		return
	}
	h.options, h.side, h.to, h.gone, h.abort = o, side, to, gone, abort
	_, _ = rand.Read(h.mark[:]) // which never fails
	h.timer = time.AfterFunc(silence, h.beat)
}

// beat runs when the timer fires. Its ping may have to wait until the side
// takes earlier data. If the side takes nothing, later beats find it silent.
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

// again sets the timer, and reports whether the heartbeat goes on.
func (h *heartbeat) again(after time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.ended {
		h.timer.Reset(after)
	}
	return !h.ended
}

// isOwn reports whether a pong answers one of the balancer's pings.
func (h *heartbeat) isOwn(pong []byte) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.timer != nil && string(pong) == string(h.mark[:])
}

// end stops the heartbeat.
func (h *heartbeat) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended = true; h.timer != nil {
		h.timer.Stop()
	}
}
