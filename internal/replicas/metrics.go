package replicas

import (
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	namespace = "caddy"
	subsystem = "openai_lb_state"
)

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: namespace, Subsystem: subsystem, Name: name, Help: help,
	}, labels)
}

func histogram(name, help string, buckets ...float64) prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Namespace: namespace, Subsystem: subsystem, Name: name, Help: help, Buckets: buckets,
	})
}

// The metrics belong to the process. Each config has a separate registry, in
// which they are registered again.
var (
	messagesIn   = counter("messages_received_total", "Messages of replicas, our own included, by what they tell.", "kind")
	messagesOut  = counter("messages_sent_total", "Messages that were sent to other replicas.").WithLabelValues()
	droppedTotal = counter("messages_dropped_total",
		"Messages that were not sent: the queue was full, or sending failed.", "reason")
	reconnectsTotal = counter("reconnects_total",
		"Times that listening to other replicas ended or did not begin.").WithLabelValues()
	claimsTotal = counter("claims_total",
		"Claims of the right to a probe, by how they ended: won, lost, late (lost, but known only after the cooldown had ended) or failed.",
		"outcome")
	ownersOut = counter("owners_sent_total",
		"Owners of ids that the other replicas can ask for since.").WithLabelValues()
	ownersDropped = counter("owners_dropped_total",
		"Owners of ids that were not sent, because the queue was full.").WithLabelValues()
	lookupsTotal = counter("lookups_total",
		"Times that a request named ids which the replica does not know, by what the engine knew: found, unknown, late, failed or skipped.",
		"outcome")

	cooldownDelay = histogram("cooldown_delay_seconds", "Time from the beginning of a cooldown to its arrival here, as far as the clocks of the replicas agree.",
		.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5)
	lookupDuration = histogram("lookup_duration_seconds", "Time that a request waited for owners that the engine keeps.",
		.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1)
)

// Register registers the metrics.
func Register(registry prometheus.Registerer) error {
	return metrics.RegisterAll(registry, messagesIn, messagesOut, droppedTotal, reconnectsTotal, claimsTotal,
		cooldownDelay,
		ownersOut, ownersDropped, lookupsTotal, lookupDuration, gauges{})
}

// running is the set of running replicas.
var running sync.Map

// Status is the state of a store, for operators.
type Status struct {
	// InTouch reports whether the store can be reached, with all its servers.
	InTouch bool `json:"in_touch"`
	// Near names the server that answers fastest, if the store has several.
	Near string `json:"near,omitempty"`
	// Queue is how many messages wait to be sent.
	Queue int `json:"queue"`
	// Self is the id of this one of them.
	Self string `json:"self"`
	// Peers are the replicas that share it, this one included.
	Peers []Peer `json:"replicas"`
	// Pools are the pools of this process that share it.
	Pools []string `json:"-"`
}

// Statuses returns the status of every store in use.
func Statuses() []Status {
	replicas := runningReplicas()
	statuses := make([]Status, len(replicas))
	for i, r := range replicas {
		statuses[i] = Status{InTouch: r.connectivity.isWhole(), Queue: r.queue.len(), Self: r.peers.self.ID,
			Peers: r.peers.list(time.Now()), Pools: r.shared().Pools}
		if spread, ok := r.store.(state.SpreadStore); ok {
			statuses[i].Near = spread.Near()
		}
	}
	return statuses
}

func runningReplicas() (replicas []*Replica) {
	for r := range running.Range {
		replicas = append(replicas, r.(*Replica))
	}
	slices.SortFunc(replicas, func(a, b *Replica) int { return strings.Compare(a.peers.self.ID, b.peers.self.ID) })
	return replicas
}

// gauges collects the gauges of the stores in use.
type gauges struct{}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, subsystem, name), help, labels, nil)
}

var differingDesc = desc("differing_replicas", "Replicas whose configuration of the pool differs from this one's.", "pool")

var gaugeDescs = []*prometheus.Desc{
	desc("in_touch", "Whether every engine of `state` can be reached: 1 or 0."),
	desc("queue_length", "Messages that wait to be sent."),
	desc("replicas", "Replicas that were heard of in the last 10 s, this one included."),
}

// Describe implements prometheus.Collector.
func (gauges) Describe(descs chan<- *prometheus.Desc) {
	descs <- differingDesc
	for _, d := range gaugeDescs {
		descs <- d
	}
}

// Collect implements prometheus.Collector.
func (gauges) Collect(ch chan<- prometheus.Metric) {
	statuses := Statuses()
	if len(statuses) == 0 {
		return
	}
	values, differing := []int{1, 0, 0}, make(map[string]int)
	for _, status := range statuses {
		if !status.InTouch {
			values[0] = 0
		}
		values[1] += status.Queue
		values[2] += len(status.Peers)
		for _, p := range status.Peers {
			for _, c := range p.Configs {
				if differing[c.Pool] += 0; c.DiffersSince != nil {
					differing[c.Pool]++
				}
			}
		}
	}
	for i, d := range gaugeDescs {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(values[i]))
	}
	for pool, n := range differing {
		ch <- prometheus.MustNewConstMetric(differingDesc, prometheus.GaugeValue, float64(n), pool)
	}
}
