package metrics

import (
	"errors"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// lastReload has Caddy's gauges of its latest load of a configuration, of which
// a process has one each: whether it was successful, and when the latest
// successful one was.
var lastReload struct {
	successful, at atomic.Pointer[prometheus.Metric]
}

// findLastReload finds these gauges. Caddy registers them with the registry of
// each configuration, and shows them nowhere else.
func findLastReload(registry *prometheus.Registry) {
	find := func(name, help string, into *atomic.Pointer[prometheus.Metric]) {
		ours := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		err := registry.Register(ours)
		if there, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
			if its, ok := there.ExistingCollector.(prometheus.Metric); ok {
				into.Store(&its)
			}
		} else if err == nil {
			registry.Unregister(ours)
		}
	}
	find("caddy_config_last_reload_successful", "Whether the last configuration reload attempt was successful.", &lastReload.successful)
	find("caddy_config_last_reload_success_timestamp_seconds", "Timestamp of the last successful configuration reload.", &lastReload.at)
}

// ReloadFailed reports whether Caddy runs a configuration, and could not load
// the latest one. It is false if nothing was loaded yet.
func ReloadFailed() bool {
	return gaugeValue(&lastReload.at) > 0 && gaugeValue(&lastReload.successful) == 0
}

// gaugeValue returns the value of a gauge, or 0 if it was not found.
func gaugeValue(gauge *atomic.Pointer[prometheus.Metric]) float64 {
	its := gauge.Load()
	var value dto.Metric
	if its == nil || (*its).Write(&value) != nil {
		return 0
	}
	return value.GetGauge().GetValue()
}
