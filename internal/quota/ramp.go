package quota

import (
	"sync/atomic"
	"time"
)

// ramp makes requests return to a backend step by step after a long cooldown,
// because providers lower the limits of a deployment whose load rises steeply,
// and a server that was away has cold caches.
//
// At first, two requests at a time may wait for their first byte. Their number
// doubles with each first byte that arrives, and every two seconds. Further
// requests skip the backend while another one can serve them. The ramp ends
// when the number is so large that it hardly matters.
type ramp struct {
	// begins is when the cooldown ends. sent is how many requests had been sent
	// before.
	begins Instant
	sent   int64
	// replied is how many requests that were sent after the cooldown have got
	// their first byte.
	replied atomic.Int64
}

const (
	// longCooldown is the longest cooldown without a ramp.
	longCooldown = Instant(10 * time.Second)
	// doublesEvery is the time in which the number doubles without a first
	// byte.
	doublesEvery = Instant(2 * time.Second)
	// mostDoublings is the number of doublings after which the ramp ends.
	mostDoublings = 10
)

// isFull reports whether the allowed number of requests wait for their first
// byte. sent is how many requests were ever sent. ended reports whether the
// ramp has ended.
func (r *ramp) isFull(now Instant, sent int64) (full, ended bool) {
	if now < r.begins {
		return false, false // the cooldown keeps them away
	}
	replied := r.replied.Load()
	doublings := replied + int64((now-r.begins)/doublesEvery)
	if doublings >= mostDoublings {
		return false, true
	}
	return sent-r.sent-replied >= 2<<doublings, false
}
