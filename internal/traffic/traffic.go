// Package traffic reads what the metrics have counted, for the admin API and
// the status page. It counts nothing itself.
package traffic

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Registry has the metrics of openai_lb and no others. Unlike the registry of a
// config, it is never replaced.
var Registry = prometheus.NewRegistry()

func init() {
	if err := metrics.Register(Registry); err != nil {
		panic(err)
	}
}

// Key is a backend of a pool. Backend is empty for what no backend answered.
type Key struct{ Pool, Backend string }

// Counts are sums since the process started. Between two points in time, they
// are sums of that time.
type Counts struct {
	// Requests were answered with this backend's reply.
	Requests float64
	// Attempts were made at it.
	Attempts float64
	// Failures are those attempts that speak against it.
	Failures float64
	// Failovers are requests that went on to another backend.
	Failovers float64
	// Tokens are those of prompts and answers.
	Tokens float64
}

// Minus returns the difference of two counts.
func (c Counts) Minus(d Counts) Counts {
	return Counts{c.Requests - d.Requests, c.Attempts - d.Attempts, c.Failures - d.Failures, c.Failovers - d.Failovers, c.Tokens - d.Tokens}
}

// Plus returns the sum of two counts.
func (c Counts) Plus(d Counts) Counts {
	return Counts{c.Requests + d.Requests, c.Attempts + d.Attempts, c.Failures + d.Failures, c.Failovers + d.Failovers, c.Tokens + d.Tokens}
}

const prefix = "caddy_openai_lb_"

// Read returns the counts of every backend. An error concerns some metrics, and
// the others are read nevertheless.
func Read(from prometheus.Gatherer) (map[Key]Counts, error) {
	families, err := from.Gather()
	counts := make(map[Key]Counts)
	for _, family := range families {
		name, ours := strings.CutPrefix(family.GetName(), prefix)
		if !ours {
			continue
		}
		for _, metric := range family.GetMetric() {
			labels := make(map[string]string)
			for _, pair := range metric.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			key := Key{labels["pool"], labels["backend"]}
			c := counts[key]
			if c.add(name, labels, metric.GetCounter().GetValue()) {
				counts[key] = c
			}
		}
	}
	return counts, err
}

// add takes in a metric, and reports whether it is one of those that count.
func (c *Counts) add(name string, labels map[string]string, value float64) bool {
	switch name {
	case "requests_total":
		c.Requests += value
	case "attempts_total":
		c.Attempts += value
		if verdict.Class(labels["class"]).Blames() {
			c.Failures += value
		}
	case "failovers_total":
		c.Failovers += value
	case "tokens_total":
		// cached tokens are among those of the input, and reasoning ones among
		// those of the output
		if labels["type"] != "input" && labels["type"] != "output" {
			return false
		}
		c.Tokens += value
	default:
		return false
	}
	return true
}
