package replicas

import (
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
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

// adminMetrics is an admin API module that keeps the metrics registered while a
// config is loaded. It has no routes. The admin API serves the registry of that
// config before its pools are set up, and goes on serving it if that fails.
type adminMetrics struct{}

func init() { caddy.RegisterModule(adminMetrics{}) }

// CaddyModule returns the Caddy module information.
func (adminMetrics) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.openai_lb_state_metrics",
		New: func() caddy.Module { return new(adminMetrics) },
	}
}

// Provision registers the metrics if a replica runs.
func (adminMetrics) Provision(ctx caddy.Context) error {
	if len(runningReplicas()) == 0 {
		return nil
	}
	return Register(ctx.GetMetricsRegistry())
}

// Routes implements caddy.AdminRouter.
func (adminMetrics) Routes() []caddy.AdminRoute { return nil }

// running is the set of running replicas.
var running sync.Map

// Statuses implements seam.ReplicationModule.
func (Module) Statuses() []seam.EngineStatus {
	replicas := runningReplicas()
	statuses := make([]seam.EngineStatus, len(replicas))
	for i, r := range replicas {
		peers := []seam.Peer{} // in JSON, none is an empty list
		for _, p := range r.peers.list(time.Now()) {
			peers = append(peers, p.Peer)
		}
		statuses[i] = seam.EngineStatus{InTouch: r.connectivity.isWhole(), Queue: r.queue.len(), Self: r.peers.self.ID,
			Peers: peers, Pools: r.shared().Pools}
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
	statuses := Module{}.Statuses()
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
