package quota

import (
	"sync/atomic"
	"time"
)

// ramp lets requests return to a backend step by step after a long cooldown.
// Providers lower the limits of a deployment whose requests increase steeply,
// and a server that was away has cold caches.
//
// At first, two requests may wait for their first byte. Their number doubles
// with each first byte, and every two seconds. Further requests pass the
// backend over while another one can serve them. The ramp ends when the number
// is so large that it hardly matters.
type ramp struct {
	// begins is when the cooldown ends, and sent how many requests were sent
	// before.
	begins Instant
	sent   int64
	// replied is how many requests that were sent since then have their first
	// byte.
	replied atomic.Int64
}

const (
	// longCooldown is the longest cooldown without a ramp.
	longCooldown = Instant(10 * time.Second)
	// doublesEvery is the time in which the number of requests doubles without
	// a first byte.
	doublesEvery = Instant(2 * time.Second)
	// mostDoublings is how often it doubles.
	mostDoublings = 10
)

// isFull reports whether as many requests wait for their first byte as may,
// when so many were sent, and whether the ramp has ended.
func (r *ramp) isFull(now Instant, sent int64) (full, over bool) {
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
