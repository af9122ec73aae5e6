package traffic

import (
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// counted is a registry with some metrics of openai_lb, and one of somebody else.
func counted(t *testing.T) (registry *prometheus.Registry, add func(name string, value float64, labels ...string)) {
	t.Helper()
	registry = prometheus.NewRegistry()
	vectors := make(map[string]*prometheus.CounterVec)
	for name, labels := range map[string][]string{
		"caddy_openai_lb_requests_total":      {"pool", "caller", "backend", "model", "class", "code"},
		"caddy_openai_lb_attempts_total":      {"pool", "backend", "deployment", "class"},
		"caddy_openai_lb_failovers_total":     {"pool", "backend", "class"},
		"caddy_openai_lb_tokens_total":        {"pool", "backend", "model", "deployment", "type"},
		"caddy_openai_lb_all_throttled_total": {"pool"},
		"requests_total":                      {"pool", "backend"},
	} {
		vectors[name] = prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: "."}, labels)
		registry.MustRegister(vectors[name])
	}
	return registry, func(name string, value float64, labels ...string) {
		vectors[name].WithLabelValues(labels...).Add(value)
	}
}

func TestCountsAreThoseOfTheMetrics(t *testing.T) {
	registry, add := counted(t)
	add("caddy_openai_lb_requests_total", 3, "p", "alice", "a", "gpt-4o", "served", "200")
	add("caddy_openai_lb_requests_total", 2, "p", "bob", "a", "gpt-4o", "client_error", "400")
	add("caddy_openai_lb_requests_total", 1, "p", "bob", "", "gpt-4o", "all_throttled", "429")
	add("caddy_openai_lb_requests_total", 9, "q", "bob", "a", "gpt-4o", "served", "200")
	for class, n := range map[string]float64{
		"served": 1, "client_error": 2, "too_large": 4, "client_left": 8, "throttled": 16, "failed": 32, "broken_stream": 64,
	} {
		add("caddy_openai_lb_attempts_total", n, "p", "a", "gpt-4o", class)
	}
	add("caddy_openai_lb_failovers_total", 5, "p", "a", "throttled")
	add("caddy_openai_lb_failovers_total", 6, "p", "a", "failed")
	for kind, n := range map[string]float64{"input": 1000, "cached": 900, "output": 50, "reasoning": 40} {
		add("caddy_openai_lb_tokens_total", n, "p", "a", "gpt-4o", "gpt-4o-ptu", kind)
	}
	add("caddy_openai_lb_all_throttled_total", 1, "p")
	add("requests_total", 77, "p", "a")

	got, err := Read(registry)
	want := map[Key]Counts{
		{"p", "a"}: {Requests: 5, Attempts: 127, Failures: 112, Failovers: 11, Tokens: 1050},
		{"p", ""}:  {Requests: 1},
		{"q", "a"}: {Requests: 9},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

func TestAHistoryHasTheLastFiveMinutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry, add := counted(t)
		request := func(n float64) { add("caddy_openai_lb_requests_total", n, "p", "", "a", "gpt-4o", "served", "200") }
		request(100) // before anybody looks
		h := NewHistory(registry)
		h.Use()
		request(1)
		time.Sleep(Interval + time.Millisecond)
		request(2)
		h.Use() // another config, which replaces the first one
		h.Leave()
		time.Sleep(Interval)
		if got := requests(h.Spans()); !reflect.DeepEqual(got, []float64{1, 2}) {
			t.Errorf("got %v", got)
		}
		for range 100 {
			request(3)
			time.Sleep(Interval)
		}
		spans := h.Spans()
		if got := requests(spans); len(got) != 60 || got[0] != 3 || got[59] != 3 {
			t.Errorf("got %v", got)
		}
		if spans[59].Length != Interval {
			t.Errorf("a span is %s long", spans[59].Length)
		}
		h.Leave()
		if got := h.Spans(); got != nil {
			t.Errorf("after the last user there is %v", got)
		}
		time.Sleep(time.Hour) // and no timer
		h.Use()
		if got := h.Spans(); got != nil {
			t.Errorf("the next user finds %v", got)
		}
		h.Leave()
	})
}

func requests(spans []Span) (requests []float64) {
	for _, span := range spans {
		requests = append(requests, span.Counts[Key{"p", "a"}].Requests)
	}
	return requests
}
