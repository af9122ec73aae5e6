package openailb

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// requestsTotal counts on through config reloads, each of which has a registry
// of its own.
var requestsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
	Namespace: "caddy",
	Subsystem: "openai_lb",
	Name:      "requests_total",
	Help:      "Requests that were answered, by caller, the backend that answered, and what its reply was taken for.",
}, []string{"caller", "backend", "class"})

// registerMetrics makes the metrics part of a registry. Several handlers share
// them.
func registerMetrics(registry *prometheus.Registry) error {
	err := registry.Register(requestsTotal)
	if errors.As(err, new(prometheus.AlreadyRegisteredError)) {
		return nil
	}
	return err
}
