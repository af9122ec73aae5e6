// Package traffic reads what the metrics have counted, for the admin API and
// the status page. It counts nothing itself.
package traffic

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

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

// Key is what is counted. Backend is empty for what no backend answered. Only
// requests are counted by Model, as clients name it, and by Class.
type Key struct{ Pool, Backend, Model, Class string }

// OfBackend returns the key of all that is counted of the backend.
func (k Key) OfBackend() Key { return Key{Pool: k.Pool, Backend: k.Backend} }

// Counts are sums since the process started. Between two points in time, they
// are sums of that time.
type Counts struct {
	// Requests were answered with this backend's reply.
	Requests float64
	// Attempts were made at it.
	Attempts float64
	// Throttles and Failures are those attempts that speak against it.
	Throttles, Failures float64
	// Failovers are requests that went on to another backend.
	Failovers float64
	// Tokens are those of prompts and answers.
	Tokens float64
	// FirstByte are the times to the first byte.
	FirstByte Histogram
}

// Plus returns the sum of two counts.
func (c Counts) Plus(d Counts) Counts { return c.combine(d, 1) }

// Minus returns the difference of two counts.
func (c Counts) Minus(d Counts) Counts { return c.combine(d, -1) }

func (c Counts) combine(d Counts, sign float64) Counts {
	return Counts{
		Requests: c.Requests + sign*d.Requests, Attempts: c.Attempts + sign*d.Attempts,
		Throttles: c.Throttles + sign*d.Throttles, Failures: c.Failures + sign*d.Failures,
		Failovers: c.Failovers + sign*d.Failovers, Tokens: c.Tokens + sign*d.Tokens,
		FirstByte: c.FirstByte.combine(d.FirstByte, sign),
	}
}

// isZero reports whether nothing was counted.
func (c Counts) isZero() bool {
	return c.Requests == 0 && c.Attempts == 0 && c.Failovers == 0 && c.Tokens == 0 && c.FirstByte.total() == 0
}

// By adds up counts by what group returns for their keys.
func By[G comparable](counts map[Key]Counts, group func(Key) G) map[G]Counts {
	sums := make(map[G]Counts)
	for key, c := range counts {
		g := group(key)
		sums[g] = sums[g].Plus(c)
	}
	return sums
}

// prefix is that of the names of the metrics.
const prefix = "caddy_openai_lb_"

// Read returns what was counted. If a part of it cannot be read, it returns an
// error with the rest.
func Read(from prometheus.Gatherer) (map[Key]Counts, error) {
	families, err := from.Gather()
	counts := make(map[Key]Counts)
	labels := make(map[string]string)
	for _, family := range families {
		name, ours := strings.CutPrefix(family.GetName(), prefix)
		if !ours {
			continue
		}
		for _, metric := range family.GetMetric() {
			clear(labels)
			for _, pair := range metric.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			if c, ok := read(name, labels, metric); ok {
				key := Key{Pool: labels["pool"], Backend: labels["backend"]}
				if name == "requests_total" {
					key.Model, key.Class = labels["model"], labels["class"]
				}
				counts[key] = counts[key].Plus(c)
			}
		}
	}
	return counts, err
}

// read returns what a series has counted, and whether that is of use here.
func read(name string, labels map[string]string, metric *dto.Metric) (c Counts, ok bool) {
	value := metric.GetCounter().GetValue()
	switch name {
	case "requests_total":
		return Counts{Requests: value}, true
	case "attempts_total":
		c.Attempts = value
		switch class := verdict.Class(labels["class"]); {
		case class == verdict.Throttled:
			c.Throttles = value
		case class.Blames():
			c.Failures = value
		}
		return c, true
	case "failovers_total":
		return Counts{Failovers: value}, true
	case "tokens_total":
		// cached tokens are among those of the input, and reasoning ones among
		// those of the output
		return Counts{Tokens: value}, labels["type"] == "input" || labels["type"] == "output"
	case "time_to_first_byte_seconds":
		return Counts{FirstByte: histogramOf(metric.GetHistogram())}, true
	}
	return Counts{}, false
}

// Histogram counts durations. The zero Histogram is empty.
type Histogram struct {
	// bounds are the longest durations of the buckets in seconds, except for the
	// last bucket, which has no bound. They are the same for all histograms.
	bounds []float64
	// counts are how many durations are in each bucket or in one before it.
	counts []float64
}

func histogramOf(metric *dto.Histogram) (h Histogram) {
	for _, bucket := range metric.GetBucket() {
		h.bounds = append(h.bounds, bucket.GetUpperBound())
		h.counts = append(h.counts, float64(bucket.GetCumulativeCount()))
	}
	h.counts = append(h.counts, float64(metric.GetSampleCount()))
	return h
}

func (h Histogram) combine(other Histogram, sign float64) Histogram {
	switch {
	case other.counts == nil:
		return h
	case h.counts == nil:
		h = Histogram{other.bounds, make([]float64, len(other.counts))}
	}
	sum := slices.Clone(h.counts)
	for i, n := range other.counts {
		sum[i] += sign * n
	}
	return Histogram{h.bounds, sum}
}

func (h Histogram) total() float64 {
	if len(h.counts) == 0 {
		return 0
	}
	return h.counts[len(h.counts)-1]
}

// Quantile returns an estimate in seconds of the duration that a share q of all
// durations does not exceed, as Prometheus' histogram_quantile does. It reports
// false if the histogram is empty.
func (h Histogram) Quantile(q float64) (seconds float64, ok bool) {
	total := h.total()
	if total == 0 || len(h.bounds) == 0 {
		return 0, false
	}
	rank := q * total
	from, before := 0.0, 0.0
	for i, bound := range h.bounds {
		if n := h.counts[i]; n >= rank && n > before {
			return from + (bound-from)*(rank-before)/(n-before), true
		}
		from, before = bound, h.counts[i]
	}
	return from, true // or longer
}
