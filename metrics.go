package openailb

import (
	"errors"
	"sync"

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

// callerLabels are those that requestsTotal has, which forgets none.
var callerLabels labels

const (
	// maxCallerLabels is how many callers metrics tell apart.
	maxCallerLabels = 1000
	// otherCallers is the label of those beyond.
	otherCallers = "other"
)

// labels gives out a limited number of labels.
type labels struct {
	mu    sync.Mutex
	given map[string]bool
}

// of is the label for a name.
func (l *labels) of(name string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.given == nil {
		l.given = make(map[string]bool)
	}
	if !l.given[name] && len(l.given) >= maxCallerLabels {
		return otherCallers
	}
	l.given[name] = true
	return name
}
