package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

var (
	callerLimitedTotal = counter("caller_limited_total",
		"Requests that a limit of their caller refused, by the limit.", "pool", "caller", "kind", "window", "model")
	callerDemotedTotal = counter("caller_demoted_total",
		"Requests that a limit of their caller gave another tier, by the limit.", "pool", "caller", "kind", "window", "model")

	limitUsedDesc = desc("caller_limit_used_ratio",
		"Which part of a caller's limit is used, 0 to 1 and above. Of callers that share a label: the largest part.",
		"pool", "caller", "kind", "window", "model")
	estimateDesc = desc("caller_estimate_ratio",
		"The estimated tokens of a caller's last requests, divided by the tokens that replies reported.", "pool", "caller")
	forgottenDesc = desc("callers_forgotten_total",
		"Callers that were forgotten although what they have used counts, because there were too many.", "pool")
)

// Limited counts a request that a limit of its caller refused. The caller is a
// label, see Caller.
func (p *Pool) Limited(caller string, r *ratelimit.Refusal) {
	kind, window := r.Names()
	callerLimitedTotal.WithLabelValues(p.name, caller, kind, window, r.Limit.Model).Inc()
}

// Demoted counts a request that a limit of its caller gave another tier. The
// caller is a label, see Caller.
func (p *Pool) Demoted(caller string, l ratelimit.Limit) {
	callerDemotedTotal.WithLabelValues(p.name, caller, l.Kind.String(), l.Unit.String(), l.Model).Inc()
}

// callerGauges has the values of the gauges of callers by their labels. Several
// callers, and several pools, may share a label.
type callerGauges struct {
	// used has the largest used part of each limit.
	used map[limitLabels]float64
	// estimates has the sums of estimated and of reported tokens.
	estimates map[callerLabels]struct{ estimated, reported float64 }
	// forgotten has the number of forgotten callers of each pool.
	forgotten map[string]float64
}

type callerLabels struct{ pool, caller string }

type limitLabels struct {
	callerLabels
	kind, window, model string
}

func newCallerGauges() *callerGauges {
	return &callerGauges{make(map[limitLabels]float64), make(map[callerLabels]struct{ estimated, reported float64 }),
		make(map[string]float64)}
}

// add adds the values of a pool's callers. callers may be nil.
func (g *callerGauges) add(pool string, callers pools.Callers, now time.Time) {
	if callers == nil {
		return
	}
	g.forgotten[pool] += float64(callers.Forgotten())
	for _, s := range callers.Snapshots(now) {
		labels := callerLabels{pool, Caller(s.Name)}
		for _, u := range s.Limits {
			limit := limitLabels{labels, u.Limit.Kind.String(), u.Limit.Unit.String(), u.Limit.Model}
			g.used[limit] = max(g.used[limit], u.Ratio())
		}
		if s.Reported > 0 {
			sum := g.estimates[labels]
			sum.estimated, sum.reported = sum.estimated+s.Estimated, sum.reported+s.Reported
			g.estimates[labels] = sum
		}
	}
}

func (g *callerGauges) collect(metrics chan<- prometheus.Metric) {
	for labels, used := range g.used {
		metrics <- prometheus.MustNewConstMetric(limitUsedDesc, prometheus.GaugeValue, used, labels.pool, labels.caller,
			labels.kind, labels.window, labels.model)
	}
	for pool, n := range g.forgotten {
		metrics <- prometheus.MustNewConstMetric(forgottenDesc, prometheus.CounterValue, n, pool)
	}
	for labels, sum := range g.estimates {
		metrics <- prometheus.MustNewConstMetric(estimateDesc, prometheus.GaugeValue, sum.estimated/sum.reported,
			labels.pool, labels.caller)
	}
}
