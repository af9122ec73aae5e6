package replicas

import (
	"context"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

const (
	// lead is how long before the end of a bench the right to its probe is
	// claimed, so that it is settled when a request comes.
	lead = 50 * time.Millisecond
	// shortest is how long a bench lasts at least whose probe is claimed. After
	// a shorter one there is nothing to wait for.
	shortest = time.Second
)

// claims are the benches of whose probes the right is to be claimed.
type claims struct {
	mu  sync.Mutex
	due map[recordKey]pool.Bench
	// first is when the first of them ends, as next has seen it.
	first time.Time
	// changed tells that there is one that ends before that.
	changed chan struct{}
}

func newClaims() *claims {
	return &claims{due: make(map[recordKey]pool.Bench), changed: make(chan struct{}, 1)}
}

func (c *claims) plan(backend string, b pool.Bench) {
	if b.Until.Sub(b.Since) < shortest || !shared(b) {
		return
	}
	c.mu.Lock()
	if len(c.due) < maxEnded {
		c.due[recordKey{backend, benchOf(b, b.Since).key()}] = b
	}
	later := !b.Until.Before(c.first)
	c.mu.Unlock()
	if later {
		return
	}
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

func (c *claims) drop(backend string, b pool.Bench) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := recordKey{backend, benchOf(b, b.Since).key()}
	if c.due[key].ID == b.ID {
		delete(c.due, key)
	}
}

// next returns the bench that is due first, and takes it out if it is due now.
// Otherwise it tells when the first is, or how long there is nothing to do.
func (c *claims) next(now time.Time) (backend string, b pool.Bench, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var first recordKey
	wait, c.first = maxLength, now.Add(maxLength)
	for key, bench := range c.due {
		if until := bench.Until.Add(-lead).Sub(now); until < wait {
			first, b, wait, c.first = key, bench, until, bench.Until
		}
	}
	if wait <= 0 {
		delete(c.due, first)
	}
	return first.group, b, wait
}

// claim claims the right to probes.
func (r *Replica) claim(ctx context.Context) {
	for {
		backend, b, wait := r.claims.next(time.Now())
		if wait > 0 {
			select {
			case <-ctx.Done():
				return
			case <-r.claims.changed:
			case <-time.After(wait):
			}
			continue
		}
		if time.Now().Before(b.Until) { // or else probes are on their way
			r.claimProbe(ctx, backend, b)
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// claimProbe claims the right to the probe of a bench. If another replica has
// it, requests here wait for what becomes of that probe. Without an answer each
// replica sends a probe.
func (r *Replica) claimProbe(ctx context.Context, backend string, b pool.Bench) {
	ctx, cancel := context.WithTimeout(ctx, lead+b.Grace())
	defer cancel()
	won, err := r.store.Claim(ctx, idOf(b), lead+b.Grace())
	switch {
	case err != nil:
		claimsTotal.WithLabelValues("failed").Inc()
	case won:
		claimsTotal.WithLabelValues("won").Inc()
	default:
		claimsTotal.WithLabelValues("lost").Inc()
		if m := r.memberOf(backend); m != nil {
			m.HearProbe(b, b.Until)
		}
	}
}
