package metrics

import (
	"encoding/json"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Key identifies a group of counts. Backend is empty if no backend answered.
// Only requests have a Model, as clients name it, and a Class.
type Key struct {
	Pool    string `json:"-"`
	Backend string `json:"backend,omitempty"`
	Model   string `json:"model,omitempty"`
	Class   string `json:"class,omitempty"`
}

// OfBackend returns the key of all counts of the backend.
func (k Key) OfBackend() Key { return Key{Pool: k.Pool, Backend: k.Backend} }

// Counts are sums since the process started. Between two points in time, they
// are sums of that time.
type Counts struct {
	// Requests counts requests that got this backend's reply.
	Requests float64 `json:"requests,omitzero"`
	// Attempts counts attempts at the backend.
	Attempts float64 `json:"attempts,omitzero"`
	// Throttles and Failures count attempts that can start a cooldown.
	Throttles float64 `json:"throttles,omitzero"`
	Failures  float64 `json:"failures,omitzero"`
	// Failovers counts requests that failed over to another backend.
	Failovers float64 `json:"failovers,omitzero"`
	// Tokens counts the tokens of prompts and answers.
	Tokens float64 `json:"tokens,omitzero"`
	// FirstByte has the times to the first byte.
	FirstByte Histogram `json:"first_byte,omitzero"`
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

// largestCount is more than any process counts. The sum of very many such
// counts is still a number that JSON can hold.
const largestCount = 1e18

// IsPossible reports whether a process can have counted this.
func (c Counts) IsPossible() bool {
	return IsPossible(c.Requests, c.Attempts, c.Throttles, c.Failures, c.Failovers, c.Tokens) &&
		IsPossible(c.FirstByte.counts...)
}

// IsPossible reports whether a process can have counted these.
func IsPossible(counts ...float64) bool {
	return !slices.ContainsFunc(counts, func(n float64) bool { return n < 0 || n > largestCount })
}

func (c Counts) isZero() bool {
	return c.Requests == 0 && c.Attempts == 0 && c.Failovers == 0 && c.Tokens == 0 && c.FirstByte.total() == 0
}

// By adds up the counts whose keys have the same group.
func By[G comparable](counts map[Key]Counts, group func(Key) G) map[G]Counts {
	sums := make(map[G]Counts)
	for key, c := range counts {
		g := group(key)
		sums[g] = sums[g].Plus(c)
	}
	return sums
}

// sources are the metrics from which Counts are read.
type sources struct {
	requests, attempts, failovers, tokens *prometheus.CounterVec
	firstByte                             *prometheus.HistogramVec
}

var counted = sources{requestsTotal, attemptsTotal, failoversTotal, tokensTotal, timeToFirstByte}

// Totals returns the counts since the process started, for the admin API and
// the status page.
func Totals() map[Key]Counts { return counted.totals() }

func (s sources) totals() map[Key]Counts {
	totals := make(map[Key]Counts)
	add := func(key Key, c Counts) { totals[key] = totals[key].Plus(c) }
	each(s.requests, func(key Key, labels map[string]string, m *dto.Metric) {
		key.Model, key.Class = labels["model"], labels["class"]
		add(key, Counts{Requests: m.GetCounter().GetValue()})
	})
	each(s.attempts, func(key Key, labels map[string]string, m *dto.Metric) {
		c := Counts{Attempts: m.GetCounter().GetValue()}
		switch class := verdict.Class(labels["class"]); {
		case class == verdict.Throttled:
			c.Throttles = c.Attempts
		case class.Blames():
			c.Failures = c.Attempts
		}
		add(key, c)
	})
	each(s.failovers, func(key Key, _ map[string]string, m *dto.Metric) {
		add(key, Counts{Failovers: m.GetCounter().GetValue()})
	})
	each(s.tokens, func(key Key, labels map[string]string, m *dto.Metric) {
		// Input includes cached tokens, and output includes reasoning tokens.
		if kind := labels["type"]; kind == "input" || kind == "output" {
			add(key, Counts{Tokens: m.GetCounter().GetValue()})
		}
	})
	each(s.firstByte, func(key Key, _ map[string]string, m *dto.Metric) {
		add(key, Counts{FirstByte: histogramOf(m.GetHistogram())})
	})
	return totals
}

// each calls do for each series of a metric, with its backend and all of its
// labels.
func each(metric prometheus.Collector, do func(key Key, labels map[string]string, m *dto.Metric)) {
	all := make(chan prometheus.Metric)
	go func() {
		metric.Collect(all)
		close(all)
	}()
	for series := range all {
		var m dto.Metric
		if series.Write(&m) != nil {
			continue // it is missing in /metrics, too
		}
		labels := make(map[string]string)
		for _, pair := range m.GetLabel() {
			labels[pair.GetName()] = pair.GetValue()
		}
		do(Key{Pool: labels["pool"], Backend: labels["backend"]}, labels, &m)
	}
}

// Histogram counts durations. The zero Histogram is empty.
type Histogram struct {
	// bounds are the upper bounds of the buckets in seconds. The last bucket
	// has none. All histograms have the same bounds.
	bounds []float64
	// counts are cumulative: the number of durations in each bucket and the
	// earlier ones.
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

// MarshalJSON implements json.Marshaler.
func (h Histogram) MarshalJSON() ([]byte, error) { return json.Marshal(h.counts) }

// UnmarshalJSON implements json.Unmarshaler. The histogram is empty if it does
// not have this build's buckets.
func (h *Histogram) UnmarshalJSON(text []byte) error {
	var counts []float64
	*h = Histogram{}
	if err := json.Unmarshal(text, &counts); err != nil {
		return err
	}
	if len(counts) == len(firstByteBuckets)+1 {
		*h = Histogram{firstByteBuckets, counts}
	}
	return nil
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

// Quantile estimates the q-quantile of the durations in seconds, as Prometheus'
// histogram_quantile does. It reports false if the histogram is empty.
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
