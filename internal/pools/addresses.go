package pools

import (
	"errors"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

const (
	// addressLifetime is how long an address is remembered that is not used, as
	// in Caddy.
	addressLifetime = time.Hour
	// forgetInterval is the time between two searches for addresses to be
	// forgotten.
	forgetInterval = 10 * time.Minute
)

// Addresses have the health of a proxy's upstreams, by their dial addresses.
// They forget those that were not used for an hour: dynamic upstreams may have
// any number of addresses in the course of time.
type Addresses struct {
	// Forgotten is called for each address that is forgotten.
	Forgotten func(dial string)

	mu      sync.Mutex
	known   map[string]*address
	current []*address
	timer   *time.Timer
	closed  bool
}

// address is the state of one address.
type address struct {
	health *pool.Health
	// used is when it was last used. It is zero while it is in use.
	used time.Time
}

// Use returns the healths of the upstreams, which are in use from now on,
// instead of others. After Close, they are healths that nothing else has.
func (a *Addresses) Use(upstreams reverseproxy.UpstreamPool) (healths []*pool.Health) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.current) > 0 && a.timer == nil && !a.closed {
		a.timer = time.AfterFunc(forgetInterval, a.forget)
	}
	now := time.Now()
	for _, known := range a.current {
		known.used = now
	}
	a.current = a.current[:0]
	for _, upstream := range upstreams {
		known := a.of(upstream.Dial)
		known.used = time.Time{}
		a.current = append(a.current, known)
		healths = append(healths, known.health)
	}
	return healths
}

// of returns the state of an address. The caller holds the lock.
func (a *Addresses) of(dial string) *address {
	known, ok := a.known[dial]
	switch {
	case ok:
		return known
	case a.closed:
		return &address{health: new(pool.Health)}
	case a.known == nil:
		a.known = make(map[string]*address)
	}
	known = &address{health: LoadHealth(dial)}
	a.known[dial] = known
	return known
}

// forget removes the addresses that were not used for long, except for those
// with a cooldown in force: a throttle is a promise.
func (a *Addresses) forget() {
	a.mu.Lock()
	now := time.Now()
	var old []string
	a.timer = nil
	for dial, known := range a.known {
		if known.used.IsZero() {
			continue
		}
		if now.Sub(known.used) >= addressLifetime && !known.health.CoolingDown(now) {
			delete(a.known, dial)
			old = append(old, dial)
		} else if a.timer == nil {
			a.timer = time.AfterFunc(forgetInterval, a.forget)
		}
	}
	a.mu.Unlock()
	for _, dial := range old {
		_, _ = healths.Delete(dial) // it was loaded
		a.Forgotten(dial)
	}
}

// Close gives all healths back.
func (a *Addresses) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed = true; a.timer != nil {
		a.timer.Stop()
	}
	var errs []error
	for dial := range a.known {
		_, err := healths.Delete(dial)
		errs = append(errs, err)
	}
	a.known = nil
	return errors.Join(errs...)
}
