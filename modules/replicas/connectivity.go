package replicas

import (
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// connectivity tracks whether a replica is connected to the others. Each change
// is logged once, instead of each failure.
type connectivity struct {
	mu sync.Mutex
	// hears reports whether messages arrive. compares reports whether the
	// latest comparison succeeded.
	hears, compares bool
	now             connection
	// lacking reports whether some servers of the store cannot be reached,
	// while others can.
	lacking bool
	// since is when the connection was lost.
	since time.Time
}

type connection int

const (
	unknown connection = iota
	connected
	disconnected
)

// heard records that the replica's own heartbeat came back in time.
func (c *connectivity) heard(r *Replica) { c.record(r, &c.hears, true, nil) }

// notHeard records that messages no longer arrive.
func (c *connectivity) notHeard(r *Replica, err error) { c.record(r, &c.hears, false, err) }

// compared records the result of a comparison.
func (c *connectivity) compared(r *Replica, err error) { c.record(r, &c.compares, err == nil, err) }

func (c *connectivity) record(r *Replica, part *bool, works bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*part = works
	logger := r.logger.Load()
	switch {
	case err != nil && c.now != disconnected:
		c.now, c.since = disconnected, time.Now()
		c.hears, c.compares = false, false // both have to be seen again
		logger.Warn("not connected to other replicas", zap.String("error", bounded(err.Error())))
	case c.hears && c.compares && c.now != connected:
		seconds := zap.Skip()
		if c.now == disconnected {
			seconds = zap.Float64("seconds", time.Since(c.since).Seconds())
		}
		c.now = connected
		logger.Info("connected to other replicas", zap.Int("replicas", len(r.peers.list(time.Now()))), seconds)
	}
}

// misses records whether some servers of the store cannot be reached, while
// others can. err is nil if all can be reached.
func (c *connectivity) misses(r *Replica, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err != nil && !c.lacking:
		r.logger.Load().Warn("not connected to all replicas", zap.String("error", bounded(err.Error())))
	case err == nil && c.lacking:
		r.logger.Load().Info("connected to all replicas")
	}
	c.lacking = err != nil
}

// reach reports whether all other running replicas are heard. If not, cut
// reports whether only those that use other servers of the store are missing.
func (c *connectivity) reach() (whole, cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	isConnected := c.now == connected
	return isConnected && !c.lacking, isConnected && c.lacking
}

// isWhole reports whether the replica is connected and reaches all servers of
// the store, so that it hears all other running replicas.
func (c *connectivity) isWhole() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now == connected && !c.lacking
}

// isConnected reports whether the replica is connected, perhaps not to all
// others.
func (c *connectivity) isConnected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now == connected
}

// bounded returns the beginning of a text from outside.
func bounded(text string) string { return pool.CutText(text, 300) }
