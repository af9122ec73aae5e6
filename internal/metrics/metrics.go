// Package metrics has the balancer's metrics for Prometheus.
//
// Counters and histograms belong to the process: they continue across config
// reloads. Each config has its own registry, in which they are registered
// again. A [Backend] keeps the series of one backend of a pool, so that a
// request neither hashes labels nor allocates. Gauges of state are read from
// the pools in use at a scrape, and not kept in between. The admin API and the
// status page read [Totals] and the [History] of the last five minutes from the
// same metrics.
//
// The number of labels is limited: names of pools, backends and models come
// from configs, and callers after the first thousand share a label. The number
// of their combinations is limited, too: beyond some thousands, a metric first
// drops the model and then the caller. The metric series_merged_total counts
// this.
package metrics

import (
	"errors"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

const (
	namespace = "caddy"
	subsystem = "openai_lb"
)

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: name, Help: help,
	}, labels)
	collectors = append(collectors, c)
	return c
}

func histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: namespace, Subsystem: subsystem, Name: name, Help: help, Buckets: buckets}, labels)
	collectors = append(collectors, h)
	return h
}

func gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: namespace, Subsystem: subsystem, Name: name, Help: help,
	}, labels)
	collectors = append(collectors, g)
	return g
}

var (
	requestsTotal = counter("requests_total",
		"Requests that were answered, by the backend whose reply it was, the model that the client named, the class and the status.",
		"pool", "caller", "backend", "model", "class", "code")
	attemptsTotal = counter("attempts_total",
		"Attempts at a backend, by the class of what came back.", "pool", "backend", "deployment", "class")
	failoversTotal = counter("failovers_total",
		"Requests that went on to another backend, by the backend that did not serve and the class of its reply.",
		"pool", "backend", "class")
	allThrottledTotal = counter("all_throttled_total",
		"Requests that were answered with a 429 because every backend throttles.", "pool")
	ownerThrottledTotal = counter("owner_throttled_total",
		"Requests that were answered with a 429 because the account that stores what they name throttles, by its backend.",
		"pool", "backend")
	affinityTotal = counter("affinity_total",
		"Requests that belong together, by kind of affinity, and whether they got where they belong.", "pool", "kind", "result")
	silencesTotal = counter("silences_total", "Silences of a backend that began: requests wait, and it sends nothing.",
		"pool", "backend", "deployment")
	movedTotal = counter("moved_total", "Requests that waited at a silent backend and went on to one that answers.",
		"pool", "backend")
	steeredTotal = counter("steered_total",
		"Requests that passed a backend over because its limits have no room, while another backend's have.",
		"pool", "backend", "deployment")
	tierPassedOverTotal = counter("tier_passed_over_total",
		"Requests that a backend did not get because only shares of other tiers or callers are left of it.",
		"pool", "backend", "tier")
	overQuotaTotal = counter("quota_passed_over_total",
		"Requests, and responses in WebSockets, that a backend did not get because its quota has no room.", "pool", "backend")
	waitedTotal = counter("waited_total",
		"Requests that had to wait because of the option wait, by the result.", "pool", "result")
	waitedSeconds = histogram("waited_seconds",
		"How long requests have waited because of the option wait.",
		[]float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}, "pool")
	waitingGauge   = gauge("waiting", "Requests that wait because of the option wait.", "pool")
	cooldownsTotal = counter("cooldowns_total",
		"Cooldowns that started, and each further class, or cause of unreachable, that one got.",
		"pool", "backend", "deployment", "class")
	hintsTotal = counter("hints_total",
		"Throttles, by where the reply said how long.", "pool", "backend", "source")
	tokensTotal = counter("tokens_total",
		"Tokens that replies reported, by the model that the client named, the backend's deployment and the service tier.",
		"pool", "backend", "model", "deployment", "type", "tier_served")
	callerTokensTotal = counter("caller_tokens_total",
		"Tokens that replies reported, by who asked, the model that the client named and the service tier. The bill has the backends, too.",
		"pool", "caller", "model", "type", "tier_served")
	serviceTierRequestsTotal = counter("service_tier_requests_total",
		"Requests for the service tiers flex, fast (or priority) and ultrafast that were served, by the service tier that the reply names.",
		"pool", "backend", "tier_requested", "tier_served")
	spilloverTotal = counter("spillover_total",
		"Replies of another deployment than the backend's own, by Azure's spillover, by its error and whether the reply is a success.",
		"pool", "backend", "deployment", "error", "result")
	mergedTotal = counter("series_merged_total",
		"How often a metric counted with the label other, because it has as many series as it may.", "metric")
	tokensUnknownTotal = counter("tokens_unknown_total",
		"Requests for inference that were served without a report of tokens.", "pool", "backend", "deployment")

	requestDuration = histogram("request_duration_seconds",
		"Time from the arrival of a request to the end of its reply.",
		[]float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600}, "pool", "backend")
	timeToFirstByte = histogram("time_to_first_byte_seconds",
		"Time from the arrival of a request to the first byte of the body of a backend's reply.",
		firstByteBuckets, "pool", "backend")
	attemptsPerRequest = histogram("attempts_per_request",
		"Backends that were tried for a request.", []float64{0, 1, 2, 3, 4, 6, 8}, "pool")
)

// firstByteBuckets are the bounds of the buckets of timeToFirstByte, and so of
// each [Histogram].
var firstByteBuckets = []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 120}

// The limits of metrics whose labels depend on the request. A series of tokens
// has one counter of each type.
var (
	requestsBound     = newBound("requests_total", 10_000)
	attemptsBound     = newBound("attempts_total", 10_000)
	tokensBound       = newBound("tokens_total", 2500)
	callerTokensBound = newBound("caller_tokens_total", 2500)
)

// collectors are all metrics. counter, histogram and gauge add to it.
var collectors = []prometheus.Collector{build, &cooldowns, state{}}

// Register registers the metrics with the registry of a config.
func Register(registry prometheus.Registerer) error {
	if r, ok := registry.(*prometheus.Registry); ok {
		findLastReload(r)
	}
	return RegisterAll(registry, collectors...)
}

// RegisterAll registers collectors, which may be registered already.
func RegisterAll(registry prometheus.Registerer, collectors ...prometheus.Collector) error {
	for _, c := range collectors {
		if err := registry.Register(c); err != nil && !errors.As(err, new(prometheus.AlreadyRegisteredError)) {
			return err
		}
	}
	return nil
}

const (
	// maxLabels is how many callers, or backends, have their own label.
	maxLabels = 1000
	// Other is the shared label beyond maxLabels, and of models that no config
	// names.
	Other = "other"
)

// labels assigns a limited number of labels.
type labels struct {
	mu    sync.Mutex
	given map[string]bool
}

func (l *labels) forget(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.given, name)
}

func (l *labels) labelOf(name string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.given == nil {
		l.given = make(map[string]bool)
	}
	if !l.given[name] && len(l.given) >= maxLabels {
		return Other
	}
	l.given[name] = true
	return name
}

var callers labels

// Caller returns the label of a caller.
func Caller(name string) string { return callers.labelOf(clean(name)) }

// Models maps the names that clients use for models to labels: each name in the
// config has its own, and all other names share one.
type Models map[string]string

// ModelsOf returns the labels of these names.
func ModelsOf(names []string) Models {
	m := Models{"": ""}
	for _, name := range names {
		m[name] = clean(name)
	}
	return m
}

// Label returns the label of a name.
func (m Models) Label(name string) string {
	if label, ok := m[name]; ok {
		return label
	}
	return Other
}

// clean makes a name valid as the value of a label.
func clean(name string) string { return pool.ValidText(name) }
