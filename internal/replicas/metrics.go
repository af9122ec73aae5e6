package replicas

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
)

const (
	namespace = "caddy"
	subsystem = "openai_lb_state"
)

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help}, labels)
}

// The metrics are of the process. Each config has a registry of its own, with
// which they are registered again.
var (
	messagesIn      = counter("messages_received_total", "Messages of replicas, our own included, by what they tell.", "kind")
	messagesOut     = counter("messages_sent_total", "Messages that were sent to other replicas.").WithLabelValues()
	droppedTotal    = counter("messages_dropped_total", "Messages that were not sent: the queue was full, or sending failed.", "reason")
	reconnectsTotal = counter("reconnects_total", "Times that listening to other replicas ended or did not begin.").WithLabelValues()
	claimsTotal     = counter("claims_total", "Claims of the right to a probe, by how they ended: won, lost, late (lost, but known only after the bench had ended) or failed.", "outcome")
	benchDelay      = prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Subsystem: subsystem,
		Name: "bench_delay_seconds", Help: "Time from the beginning of a bench to its arrival here, as far as the clocks of the replicas agree.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}})
)

// Register registers the metrics.
func Register(registry prometheus.Registerer) error {
	return metrics.RegisterAll(registry, messagesIn, messagesOut, droppedTotal, reconnectsTotal, claimsTotal, benchDelay,
		ownersOut, ownersDropped, lookupsTotal, lookupDuration, gauges{})
}

var (
	runningMu sync.Mutex
	running   = make(map[*Replica]bool)
)

// inUse takes in that a replica runs, or does so no more.
func inUse(r *Replica, is bool) {
	runningMu.Lock()
	defer runningMu.Unlock()
	if is {
		running[r] = true
	} else {
		delete(running, r)
	}
}

// Status is what operators see of a store.
type Status struct {
	// InTouch tells that the store can be reached.
	InTouch bool `json:"in_touch"`
	// Queue is how many messages wait to be sent.
	Queue int `json:"queue"`
	// Peers are the replicas that share it, this one included.
	Peers []Peer `json:"replicas"`
}

// Statuses returns that of every store in use.
func Statuses() []Status {
	runningMu.Lock()
	defer runningMu.Unlock()
	statuses := make([]Status, 0, len(running))
	for _, r := range slices.SortedFunc(maps.Keys(running), func(a, b *Replica) int { return strings.Compare(a.id, b.id) }) {
		statuses = append(statuses, Status{InTouch: r.touch.is(), Queue: r.queue.len(), Peers: r.Peers(time.Now())})
	}
	return statuses
}

// gauges collects the gauges of the stores in use.
type gauges struct{}

func desc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, subsystem, name), help, nil, nil)
}

var (
	inTouchDesc  = desc("in_touch", "Whether every engine of `state` can be reached: 1 or 0.")
	queueDesc    = desc("queue_length", "Messages that wait to be sent.")
	replicasDesc = desc("replicas", "Replicas that were heard of in the last 10 s, this one included.")
)

// Describe implements prometheus.Collector.
func (gauges) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{inTouchDesc, queueDesc, replicasDesc} {
		descs <- d
	}
}

// Collect implements prometheus.Collector.
func (gauges) Collect(ch chan<- prometheus.Metric) {
	statuses := Statuses()
	if len(statuses) == 0 {
		return
	}
	touch, queue, replicas := 1, 0, 0
	for _, s := range statuses {
		if !s.InTouch {
			touch = 0
		}
		queue, replicas = queue+s.Queue, replicas+len(s.Peers)
	}
	for d, value := range map[*prometheus.Desc]int{inTouchDesc: touch, queueDesc: queue, replicasDesc: replicas} {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value))
	}
}
