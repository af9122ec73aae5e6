package metrics

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/fleet"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// state collects the gauges of the pools in use.
type state struct{}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, subsystem, name), help, labels, nil)
}

var (
	availableDesc = desc("backend_available",
		"Whether a backend is neither benched nor fails active health checks: 1 or 0. Without a model: for every one.",
		"pool", "backend", "model")
	remainingDesc = desc("bench_remaining_seconds",
		"How long a backend is still benched. Without a model: for every one.", "pool", "backend", "model")
	drainedDesc = desc("backend_drained",
		"Whether a backend is used only when no other is left: 1 or 0.", "pool", "backend")
	inFlightDesc  = desc("requests_in_flight", "Requests that a backend serves.", "pool", "backend")
	ratelimitDesc = desc("ratelimit_remaining",
		"What a backend last said is left of its rate limit.", "pool", "backend", "model", "type")
	utilizationDesc = desc("deployment_utilization_ratio",
		"What a provisioned Azure deployment last said of its utilization, 0 to 1 and above.", "pool", "backend", "model")
)

// Describe implements prometheus.Collector.
func (state) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{availableDesc, remainingDesc, drainedDesc, inFlightDesc, ratelimitDesc, utilizationDesc} {
		descs <- d
	}
}

// Collect implements prometheus.Collector.
func (state) Collect(metrics chan<- prometheus.Metric) {
	now := time.Now()
	seen := make(map[[2]string]bool)
	for _, entry := range fleet.Default.Entries() {
		p := Of(entry.Name)
		for _, s := range entry.Pool.Snapshot(now) {
			b := p.Backend(s.Member.Name)
			if key := [2]string{p.name, b.name}; !seen[key] { // a plain reverse_proxy may have an upstream twice
				seen[key] = true
				b.collect(s, now, metrics)
			}
		}
	}
}

func (b *Backend) collect(s pool.State, now time.Time, metrics chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, append([]string{b.pool.name, b.name}, labels...)...)
	}
	gauge(drainedDesc, bit(s.Drained))
	gauge(inFlightDesc, float64(s.InFlight))
	for _, model := range modelsOf(s.Member) {
		left := remaining(s, model, now)
		gauge(availableDesc, bit(left == 0 && s.Healthy), model)
		gauge(remainingDesc, left.Seconds(), model)
		last := b.last.of(model)
		for _, number := range []struct {
			*number
			kind string
		}{{&last.requests, "requests"}, {&last.tokens, "tokens"}} {
			if number.known.Load() {
				gauge(ratelimitDesc, number.value(), model, number.kind)
			}
		}
		if last.utilization.known.Load() {
			gauge(utilizationDesc, last.utilization.value(), model)
		}
	}
}

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// modelsOf are the labels of a member's models: none, for what concerns all of
// them, each one that the config names, and another for those that it does not.
func modelsOf(m *pool.Member) []string {
	models := []string{""}
	for _, model := range m.Models {
		if model = clean(model); !slices.Contains(models, model) {
			models = append(models, model)
		}
	}
	if m.AnyModel && !slices.Contains(models, Other) {
		models = append(models, Other)
	}
	return models
}

// Model is the label of a model, by its name at the member.
func Model(m *pool.Member, name string) string {
	switch {
	case name == "":
		return ""
	case slices.Contains(m.Models, name):
		return clean(name)
	}
	return Other
}

// remaining is how long the member is still benched for a model, or without one,
// for every model.
func remaining(s pool.State, model string, now time.Time) (left time.Duration) {
	for _, b := range s.Benches {
		if b.Whole || model != "" && Model(s.Member, b.Model) == model {
			left = max(left, b.Until.Sub(now))
		}
	}
	return left
}
