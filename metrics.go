package openailb

import (
	"errors"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// requestsTotal keeps counting through config reloads. Each config has a
// registry of its own, with which it is registered again.
var requestsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
	Namespace: "caddy",
	Subsystem: "openai_lb",
	Name:      "requests_total",
	Help:      "Requests that were answered, by caller, backend that answered, and class of its reply.",
}, []string{"caller", "backend", "class"})

// registerMetrics registers the metrics, which all handlers share.
func registerMetrics(registry *prometheus.Registry) error {
	err := registry.Register(requestsTotal)
	if errors.As(err, new(prometheus.AlreadyRegisteredError)) {
		return nil
	}
	return err
}

// callerLabels are the labels of callers in requestsTotal, which keeps every
// label it ever had.
var callerLabels labels

const (
	// maxCallerLabels is how many callers have a label of their own.
	maxCallerLabels = 1000
	// otherCallers is the label of all other callers.
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
