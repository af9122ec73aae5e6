package replicas

import (
	"sync"
	"time"
)

// clock estimates the clock of the store. Replicas date their messages by it.
// So a replica that reads a message late notices that, even if the clocks of
// the machines differ.
type clock struct {
	mu sync.Mutex
	// shown is the time of the store's clock at the local time here. It is zero
	// until the store has answered.
	shown, here time.Time
	// trip is the time that an answer takes. It follows longer times
	// immediately, and shorter ones slowly.
	trip time.Duration
}

func (c *clock) set(shown, sent, answered time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	trip := answered.Sub(sent)
	c.shown, c.here, c.trip = shown, sent.Add(trip/2), max(trip, c.trip*7/8)
}

// ahead returns by how much the store's clock is ahead of the local one.
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

// at converts a local time to the store's clock, in microseconds since 1970. It
// returns 0 if the store's clock is not known.
func (c *clock) at(here time.Time) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shown.IsZero() {
		return 0
	}
	return c.shown.Add(here.Sub(c.here)).UnixMicro()
}

// age returns how long ago a message was sent, at most maxLength. It returns 0
// if that is not known.
func (c *clock) age(m message, now time.Time) time.Duration {
	storeTime := c.at(now)
	if storeTime == 0 || m.At == 0 || m.At > storeTime {
		return 0
	}
	return time.Duration(min(storeTime-m.At, maxLength.Microseconds())) * time.Microsecond
}
