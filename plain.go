package openailb

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// proxyAround returns the innermost reverse_proxy that the last of the modules is part
// of, or nil.
func proxyAround(modules []caddy.Module) *reverseproxy.Handler {
	for _, module := range slices.Backward(modules) {
		if proxy, ok := module.(*reverseproxy.Handler); ok {
			return proxy
		}
	}
	return nil
}

// checkUpstream refuses the dial address of an upstream that the proxy does not
// have. A proxy with dynamic upstreams may have any.
func checkUpstream(proxy *reverseproxy.Handler, dial string) error {
	if proxy == nil || proxy.DynamicUpstreamsRaw != nil || proxy.DynamicUpstreams != nil {
		return nil
	}
	var dials []string
	for _, u := range proxy.Upstreams {
		dials = append(dials, u.Dial)
	}
	if slices.Contains(dials, dial) {
		return nil
	}
	return fmt.Errorf("upstream '%s' is not one of reverse_proxy's upstreams: %s", dial, strings.Join(dials, ", "))
}

// hasSelection reports whether the proxy, which is being set up, has a Selection.
func hasSelection(proxy *reverseproxy.Handler) bool {
	if proxy == nil || proxy.LoadBalancing == nil {
		return false
	}
	var policy struct {
		Name string `json:"policy"`
	}
	return json.Unmarshal(proxy.LoadBalancing.SelectionPolicyRaw, &policy) == nil && policy.Name == "openai_lb"
}

// passiveOption returns the name of an option with which the proxy counts failures of
// its upstreams, or an empty string. unhealthy_request_count counts none.
func passiveOption(proxy *reverseproxy.Handler) string {
	if proxy.HealthChecks == nil || proxy.HealthChecks.Passive == nil {
		return ""
	}
	switch passive := proxy.HealthChecks.Passive; {
	case passive.FailDuration != 0:
		return "fail_duration"
	case passive.MaxFails != 0:
		return "max_fails"
	case passive.UnhealthyStatus != nil:
		return "unhealthy_status"
	case passive.UnhealthyLatency != 0:
		return "unhealthy_latency"
	}
	return ""
}

const (
	// addressLifetime is how long an address is remembered that is not used, as in Caddy.
	addressLifetime = time.Hour
	// forgetInterval is the time between two searches for addresses to be forgotten.
	forgetInterval = 10 * time.Minute
)

// addresses have the health of a proxy's upstreams, by their dial addresses. They
// forget those that were not used for an hour: dynamic upstreams may have any number
// of addresses in the course of time.
type addresses struct {
	pool string // its name

	mu      sync.Mutex
	known   map[string]*address
	current []*address
	timer   *time.Timer
	closed  bool
}

// address is what is known of one.
type address struct {
	health *pool.Health
	// used is when it was last used. It is zero while it is in use.
	used time.Time
}

// use returns the healths of the upstreams, which are in use from now on, instead of
// others. After close, they are healths that nothing else has.
func (a *addresses) use(upstreams reverseproxy.UpstreamPool) (healths []*pool.Health) {
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

// of returns what is known of an address. The caller holds the lock.
func (a *addresses) of(dial string) *address {
	known, ok := a.known[dial]
	switch {
	case ok:
		return known
	case a.closed:
		return &address{health: new(pool.Health)}
	case a.known == nil:
		a.known = make(map[string]*address)
	}
	known = &address{health: loadHealth(dial)}
	a.known[dial] = known
	return known
}

// forget forgets what was not used for long, except for benches that are in force: a
// throttle is a promise.
func (a *addresses) forget() {
	a.mu.Lock()
	now := time.Now()
	var old []string
	a.timer = nil
	for dial, known := range a.known {
		if known.used.IsZero() {
			continue
		}
		if now.Sub(known.used) >= addressLifetime && !known.health.Benched(now) {
			delete(a.known, dial)
			old = append(old, dial)
		} else if a.timer == nil {
			a.timer = time.AfterFunc(forgetInterval, a.forget)
		}
	}
	a.mu.Unlock()
	for _, dial := range old {
		_, _ = healths.Delete(dial) // it was loaded
		metrics.Forget(a.pool, dial)
	}
}

// close gives all healths back.
func (a *addresses) close() error {
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
