package replicas

import (
	"sync"
	"time"
)

// clock is the clock of the store, as far as it is known here. Replicas date
// their messages by it, so that a replica which reads one late notices that,
// whatever the clocks of the machines show.
type clock struct {
	mu sync.Mutex
	// shown is what the store's clock showed at a time here. It is zero until
	// the store has answered.
	shown, here time.Time
	// trip is how long an answer takes. It follows a longer one at once, and a
	// shorter one slowly.
	trip time.Duration
}

func (c *clock) set(shown, sent, answered time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	trip := answered.Sub(sent)
	c.shown, c.here, c.trip = shown, sent.Add(trip/2), max(trip, c.trip*7/8)
}

// ahead returns by how much the store's clock is ahead of ours.
func (c *clock) ahead() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.shown.Sub(c.here) // without a monotonic reading, because shown has none
}

func (c *clock) roundTrip() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.trip
}

// at returns what the store's clock shows at a time here, in microseconds since
// 1970, or 0 if that is not known.
func (c *clock) at(here time.Time) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shown.IsZero() {
		return 0
	}
	return c.shown.Add(here.Sub(c.here)).UnixMicro()
}

// age returns how long ago a message was sent, up to maxLength, or 0 if that is
// not known.
func (c *clock) age(m message, now time.Time) time.Duration {
	shows := c.at(now)
	if shows == 0 || m.At == 0 || m.At > shows {
		return 0
	}
	return time.Duration(min(shows-m.At, maxLength.Microseconds())) * time.Microsecond
}
