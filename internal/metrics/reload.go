package metrics

import (
	"errors"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// lastReload has Caddy's two gauges about loading a config: whether the last
// load was successful, and when the last successful load was. A process has one
// of each.
var lastReload struct {
	successful, at atomic.Pointer[prometheus.Metric]
}

// findLastReload finds these gauges. Caddy registers them with the registry of
// each config, and exposes them nowhere else.
func findLastReload(registry *prometheus.Registry) {
	find := func(name, help string, found *atomic.Pointer[prometheus.Metric]) {
		gauge := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		err := registry.Register(gauge)
		if registered, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
			if metric, ok := registered.ExistingCollector.(prometheus.Metric); ok {
				found.Store(&metric)
			}
		} else if err == nil {
			registry.Unregister(gauge)
		}
	}
	find("caddy_config_last_reload_successful",
		"Whether the last configuration reload attempt was successful.", &lastReload.successful)
	find("caddy_config_last_reload_success_timestamp_seconds",
		"Timestamp of the last successful configuration reload.", &lastReload.at)
}

// ReloadFailed reports whether Caddy runs a config, but could not load the
// latest one. It is false if nothing was loaded yet.
func ReloadFailed() bool {
	return gaugeValue(&lastReload.at) > 0 && gaugeValue(&lastReload.successful) == 0
}

// gaugeValue returns the value of a gauge, or 0 if it was not found.
func gaugeValue(gauge *atomic.Pointer[prometheus.Metric]) float64 {
	metric := gauge.Load()
	var value dto.Metric
	if metric == nil || (*metric).Write(&value) != nil {
		return 0
	}
	return value.GetGauge().GetValue()
}
