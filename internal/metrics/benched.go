package metrics

import (
	"maps"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// Happened implements pool.Listener. It counts benches and silences.
func (p *Pool) Happened(e pool.Event) {
	if e.Happening == pool.FellSilent {
		silencesTotal.WithLabelValues(p.name, clean(e.Member.Name), Deployment(e.Member, e.Silence.Model)).Inc()
	}
	if e.Member.Spares(e.Bench) {
		return // other requests are served
	}
	its := benchLabels{p.name, clean(e.Member.Name), Deployment(e.Member, e.Bench.Model), e.Bench.Class}
	which := benchKey{p.name, e.Member.Name, e.Bench.Model, "", e.Bench.Throttle, e.Bench.Whole, e.Bench.Unreachable}
	if its.deployment == Other {
		which.model, which.class = Other, its.class
	}
	if counts := e.Happening == pool.Began || e.Happening == pool.Turned; counts && !e.Remote { // a sum over replicas has each bench once
		benchesTotal.WithLabelValues(its.pool, its.backend, its.deployment, its.class).Inc()
	}
	switch now := time.Now(); e.Happening {
	case pool.Began, pool.Grew, pool.Turned:
		benched.open(which, its, e.Bench, now)
	case pool.Ended:
		benched.end(which, now)
	}
}

// benched counts the seconds in which backends were benched.
var benched benchedSeconds

// benchedSeconds counts a bench while it lasts, and not only when it ends: a
// rate of it is the share of the time in which a backend is benched. It listens
// to benches instead of reading the pools at a scrape, because a counter must
// never go back: neither when a bench ends early, nor when its pool is gone.
type benchedSeconds struct {
	mu      sync.Mutex
	settled map[benchLabels]float64
	inForce map[benchKey]openBench
}

type benchLabels struct{ pool, backend, deployment, class string }

// benchKey identifies a bench in force. Models that the config does not name
// are one: clients can make up any number of them. Their benches have a class,
// and count as one for as long as any of them is in force.
type benchKey struct {
	pool, backend, model, class string
	throttle, whole, lost       bool
}

// isOfMany reports whether there may be several benches with this key.
func (k benchKey) isOfMany() bool { return k.class != "" }

type openBench struct {
	benchLabels
	since, until time.Time
}

func (b openBench) seconds(now time.Time) float64 {
	if now.After(b.until) {
		now = b.until
	}
	return max(0, now.Sub(b.since).Seconds())
}

// open counts a bench that has begun, grown or changed its class.
func (s *benchedSeconds) open(which benchKey, its benchLabels, b pool.Bench, now time.Time) {
	until := b.Until // unless an event ends it before
	if b.Unreachable {
		until = now.AddDate(100, 0, 0) // it lasts until the backend is reached
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inForce == nil {
		s.inForce, s.settled = make(map[benchKey]openBench), make(map[benchLabels]float64)
	}
	if before := s.inForce[which].until; which.isOfMany() && before.After(until) {
		until = before
	}
	s.settle(which, now)
	s.inForce[which] = openBench{its, now, until}
}

// end ends a bench, unless others with the same key may be in force. Their time
// passes.
func (s *benchedSeconds) end(which benchKey, now time.Time) {
	if which.isOfMany() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settle(which, now)
}

// membersInUse returns the labels of the pools in use, with the names of their
// backends.
func membersInUse() map[[2]string]bool {
	names := make(map[[2]string]bool)
	for _, entry := range pools.Default.Entries() {
		for _, m := range entry.Pool.Members {
			names[[2]string{Of(entry.Name).name, m.Name}] = true
		}
	}
	return names
}

// Left ends the benches of backends that are no longer in a pool in use, and
// removes the counts of pools that no config has any more. It is called when a
// pool is no longer in use.
func Left() {
	forgetPools()
	used, now := membersInUse(), time.Now()
	benched.mu.Lock()
	defer benched.mu.Unlock()
	for which := range benched.inForce {
		if !used[[2]string{which.pool, which.backend}] {
			benched.settle(which, now)
		}
	}
}

// forget removes the counts with these labels, none of which has a bench in
// force that counts.
func (s *benchedSeconds) forget(these func(benchLabels) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.inForce, func(_ benchKey, b openBench) bool { return these(b.benchLabels) })
	maps.DeleteFunc(s.settled, func(its benchLabels, _ float64) bool { return these(its) })
}

func (s *benchedSeconds) settle(which benchKey, now time.Time) {
	if b, ok := s.inForce[which]; ok {
		s.settled[b.benchLabels] += b.seconds(now)
		delete(s.inForce, which)
	}
}

var benchedDesc = desc("benched_seconds_total",
	"Time in which a backend was benched, the benches in force included.", "pool", "backend", "deployment", "class")

// Describe implements prometheus.Collector.
func (s *benchedSeconds) Describe(descs chan<- *prometheus.Desc) { descs <- benchedDesc }

// Collect implements prometheus.Collector.
func (s *benchedSeconds) Collect(metrics chan<- prometheus.Metric) {
	for its, seconds := range s.sums(time.Now()) {
		metrics <- prometheus.MustNewConstMetric(benchedDesc, prometheus.CounterValue, seconds, its.pool, its.backend, its.deployment, its.class)
	}
}

// sums settles the benches that have ended, and adds those in force.
func (s *benchedSeconds) sums(now time.Time) map[benchLabels]float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	sums := make(map[benchLabels]float64, len(s.settled)+len(s.inForce))
	for which, b := range s.inForce {
		if !now.Before(b.until) {
			s.settle(which, now) // no event has reported its end
			continue
		}
		sums[b.benchLabels] += b.seconds(now)
	}
	for its, seconds := range s.settled {
		sums[its] += seconds
	}
	return sums
}
