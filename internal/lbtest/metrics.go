package lbtest

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
)

// Registry is a registry with the metrics, as each config has one.
func Registry(t testing.TB) *prometheus.Registry {
	t.Helper()
	registry := prometheus.NewRegistry()
	if err := metrics.Register(registry); err != nil {
		t.Fatal(err)
	}
	return registry
}

// Metrics are the metrics of one scrape.
type Metrics []*dto.MetricFamily

// Scrape reads all metrics.
func Scrape(t testing.TB) Metrics {
	t.Helper()
	families, err := Registry(t).Gather()
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// Sum adds up the series of a metric that have these labels, among others. Of
// a histogram, it adds up how often something was observed.
func (m Metrics) Sum(name string, labels map[string]string) (sum float64) {
	for _, family := range m {
		if family.GetName() != "caddy_openai_lb_"+name {
			continue
		}
		for _, metric := range family.GetMetric() {
			if HasLabels(metric, labels) {
				sum += metric.GetCounter().GetValue() + metric.GetGauge().GetValue() +
					float64(metric.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// SumOf is the sum of one scrape.
func SumOf(t testing.TB, name string, labels map[string]string) float64 {
	t.Helper()
	return Scrape(t).Sum(name, labels)
}

// HasLabels reports whether a series has these labels, among others.
func HasLabels(metric *dto.Metric, labels map[string]string) bool {
	missing := len(labels)
	for _, label := range metric.GetLabel() {
		if want, ok := labels[label.GetName()]; ok {
			if want != label.GetValue() {
				return false
			}
			missing--
		}
	}
	return missing == 0
}

// WantSums takes lines of a metric with labels of this pool and their sum:
// `attempts_total backend=a class=served 3`. A * is any number above 0.
func WantSums(t testing.TB, pool string, lines ...string) {
	t.Helper()
	scraped := Scrape(t)
	for _, line := range lines {
		fields := strings.Fields(line)
		labels := map[string]string{"pool": pool}
		for _, field := range fields[1 : len(fields)-1] {
			name, value, _ := strings.Cut(field, "=")
			labels[name] = value
		}
		got := scraped.Sum(fields[0], labels)
		if want := fields[len(fields)-1]; want == "*" && got <= 0 || want != "*" && fmt.Sprint(got) != want {
			t.Errorf("%s is %v", line, got)
		}
	}
}

var runs atomic.Int64

// Unique makes a name that no other run of a test has: what is counted stays.
func Unique(name string) string { return fmt.Sprint(name, "-", runs.Add(1)) }
