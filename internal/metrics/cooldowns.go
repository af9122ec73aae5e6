package metrics

import (
	"maps"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// Happened implements pool.Listener. It counts cooldowns and silences.
func (p *Pool) Happened(e pool.Event) {
	if e.Happening == pool.FellSilent {
		silencesTotal.WithLabelValues(p.name, clean(e.Member.Name), Deployment(e.Member, e.Silence.Model)).Inc()
	}
	if e.Member.Spares(e.Cooldown) {
		return // other requests are served
	}
	labels := cooldownLabels{p.name, clean(e.Member.Name), Deployment(e.Member, e.Cooldown.Model), e.Cooldown.Class}
	key := cooldownKey{p.name, e.Member.Name, e.Cooldown.Model, "", e.Cooldown.Throttle, e.Cooldown.Whole,
		e.Cooldown.Unreachable}
	if labels.deployment == Other {
		key.model, key.class = Other, labels.class
	}
	// a sum over replicas has each cooldown once
	if counts := e.Happening == pool.Began || e.Happening == pool.Turned; counts && !e.Remote {
		cooldownsTotal.WithLabelValues(labels.pool, labels.backend, labels.deployment, labels.class).Inc()
	}
	switch now := time.Now(); e.Happening {
	case pool.Began, pool.Grew, pool.Turned:
		cooldowns.open(key, labels, e.Cooldown, now)
	case pool.Ended:
		cooldowns.end(key, now)
	}
}

// cooldowns counts the seconds that backends spent in cooldowns.
var cooldowns cooldownSeconds

// cooldownSeconds counts the seconds of a cooldown while it lasts, and not only
// when it ends. So the counter's rate is the share of time that a backend
// spends in cooldowns. It listens to the pools' events instead of reading the
// pools at a scrape, because a counter must never go back: neither when a
// cooldown ends early, nor when its pool is removed.
type cooldownSeconds struct {
	mu      sync.Mutex
	settled map[cooldownLabels]float64
	inForce map[cooldownKey]openCooldown
}

type cooldownLabels struct{ pool, backend, deployment, class string }

// cooldownKey identifies an active cooldown. All models that the config does
// not name share one key, because clients can make up any number of them. Such
// a key has a class, and counts as active for as long as any of its cooldowns
// is active.
type cooldownKey struct {
	pool, backend, model, class string
	throttle, whole, lost       bool
}

// isOfMany reports whether several cooldowns may share this key.
func (k cooldownKey) isOfMany() bool { return k.class != "" }

type openCooldown struct {
	cooldownLabels
	since, until time.Time
}

func (c openCooldown) seconds(now time.Time) float64 {
	if now.After(c.until) {
		now = c.until
	}
	return max(0, now.Sub(c.since).Seconds())
}

// open counts a cooldown that has started, grown or changed its class.
func (s *cooldownSeconds) open(key cooldownKey, labels cooldownLabels, c pool.Cooldown, now time.Time) {
	until := c.Until // unless an event ends it before
	if c.Unreachable {
		until = now.AddDate(100, 0, 0) // it lasts until the backend is reached
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inForce == nil {
		s.inForce, s.settled = make(map[cooldownKey]openCooldown), make(map[cooldownLabels]float64)
	}
	if before := s.inForce[key].until; key.isOfMany() && before.After(until) {
		until = before
	}
	s.settle(key, now)
	s.inForce[key] = openCooldown{labels, now, until}
}

// end ends a cooldown, unless other cooldowns with the same key may be active.
// Such cooldowns end when their time has passed.
func (s *cooldownSeconds) end(key cooldownKey, now time.Time) {
	if key.isOfMany() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settle(key, now)
}

// membersInUse returns the set of backends in use, each as the label of its
// pool and its name.
func membersInUse() map[[2]string]bool {
	names := make(map[[2]string]bool)
	for _, entry := range pools.Default.Entries() {
		for _, m := range entry.Pool.Members {
			names[[2]string{Of(entry.Name).name, m.Name}] = true
		}
	}
	return names
}

// Left ends the cooldowns of backends that are in no used pool any more, and
// removes the counts of pools that are in no config any more. It is called when
// a pool is no longer used.
func Left() {
	forgetPools()
	used, now := membersInUse(), time.Now()
	cooldowns.mu.Lock()
	defer cooldowns.mu.Unlock()
	for key := range cooldowns.inForce {
		if !used[[2]string{key.pool, key.backend}] {
			cooldowns.settle(key, now)
		}
	}
}

// forget removes the counts with these labels. None of them may have an active
// cooldown that should count.
func (s *cooldownSeconds) forget(matches func(cooldownLabels) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.inForce, func(_ cooldownKey, c openCooldown) bool { return matches(c.cooldownLabels) })
	maps.DeleteFunc(s.settled, func(labels cooldownLabels, _ float64) bool { return matches(labels) })
}

func (s *cooldownSeconds) settle(key cooldownKey, now time.Time) {
	if c, ok := s.inForce[key]; ok {
		s.settled[c.cooldownLabels] += c.seconds(now)
		delete(s.inForce, key)
	}
}

var cooldownSecondsDesc = desc("cooldown_seconds_total",
	"Time that a backend spent in cooldowns, including active ones.", "pool", "backend", "deployment", "class")

// Describe implements prometheus.Collector.
func (s *cooldownSeconds) Describe(descs chan<- *prometheus.Desc) { descs <- cooldownSecondsDesc }

// Collect implements prometheus.Collector.
func (s *cooldownSeconds) Collect(metrics chan<- prometheus.Metric) {
	for labels, seconds := range s.sums(time.Now()) {
		metrics <- prometheus.MustNewConstMetric(cooldownSecondsDesc, prometheus.CounterValue, seconds, labels.pool,
			labels.backend, labels.deployment, labels.class)
	}
}

// sums settles the cooldowns that have ended, and returns the seconds of all,
// including the active ones.
func (s *cooldownSeconds) sums(now time.Time) map[cooldownLabels]float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	sums := make(map[cooldownLabels]float64, len(s.settled)+len(s.inForce))
	for key, c := range s.inForce {
		if !now.Before(c.until) {
			s.settle(key, now) // no event has reported its end
			continue
		}
		sums[c.cooldownLabels] += c.seconds(now)
	}
	for labels, seconds := range s.settled {
		sums[labels] += seconds
	}
	return sums
}
