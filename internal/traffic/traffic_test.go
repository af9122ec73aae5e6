package traffic

import (
	"math"
	"reflect"
	"strings"
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
	add("caddy_openai_lb_requests_total", 4, "p", "bob", "a", "gpt-4o", "served", "200")
	add("caddy_openai_lb_requests_total", 2, "p", "bob", "a", "gpt-4o", "client_error", "400")
	add("caddy_openai_lb_requests_total", 1, "p", "bob", "", "gpt-4o", "all_throttled", "429")
	add("caddy_openai_lb_requests_total", 9, "q", "bob", "a", "", "served", "200")
	for outcome, n := range map[string]float64{
		"served": 1, "client_error": 2, "too_large": 4, "client_left": 8, "throttled": 16, "failed": 32, "broken_stream": 64,
	} {
		add("caddy_openai_lb_attempts_total", n, "p", "a", "gpt-4o", outcome)
	}
	add("caddy_openai_lb_failovers_total", 5, "p", "a", "throttled")
	add("caddy_openai_lb_failovers_total", 6, "p", "a", "failed")
	for kind, n := range map[string]float64{"input": 1000, "cached": 900, "output": 50, "reasoning": 40} {
		add("caddy_openai_lb_tokens_total", n, "p", "a", "gpt-4o", "ptu-4o", kind)
	}
	add("caddy_openai_lb_all_throttled_total", 1, "p")
	add("requests_total", 77, "p", "a")

	got, err := Read(registry)
	want := map[Key]Counts{
		{"p", "a", "", ""}:                   {Attempts: 127, Throttles: 16, Failures: 96, Failovers: 11, Tokens: 1050},
		{"p", "a", "gpt-4o", "served"}:       {Requests: 7},
		{"p", "a", "gpt-4o", "client_error"}: {Requests: 2},
		{"p", "", "gpt-4o", "all_throttled"}: {Requests: 1},
		{"q", "a", "", "served"}:             {Requests: 9},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	if sum := By(got, Key.OfBackend)[Key{Pool: "p", Backend: "a"}]; sum.Requests != 9 || sum.Attempts != 127 {
		t.Errorf("together that is %v", sum)
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
		total, length := Sum(spans)
		if got := total[served].Requests; got != 180 || length != 5*time.Minute {
			t.Errorf("in %s there were %v requests", length, got)
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

var served = Key{"p", "a", "gpt-4o", "served"}

func requests(spans []Span) (requests []float64) {
	for _, span := range spans {
		requests = append(requests, span.Counts[served].Requests)
	}
	return requests
}

func TestASpanHasOnlyWhatWasCountedInIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry, add := counted(t)
		add("caddy_openai_lb_requests_total", 1, "p", "", "a", "gpt-4o", "served", "200")
		h := NewHistory(registry)
		h.Use()
		defer h.Leave()
		add("caddy_openai_lb_failovers_total", 2, "p", "b", "failed")
		time.Sleep(Interval + time.Millisecond)
		if got, want := h.Spans()[0].Counts, (map[Key]Counts{{Pool: "p", Backend: "b"}: {Failovers: 2}}); !reflect.DeepEqual(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

func TestQuantilesAreThoseOfTheTimesInAWindow(t *testing.T) {
	registry := prometheus.NewRegistry()
	times := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "caddy_openai_lb_time_to_first_byte_seconds", Help: ".", Buckets: []float64{.1, .5, 1, 120},
	}, []string{"pool", "backend"})
	registry.MustRegister(times)
	read := func() map[Key]Counts {
		t.Helper()
		counts, err := Read(registry)
		if err != nil {
			t.Fatal(err)
		}
		return counts
	}
	for range 100 { // before the window
		times.WithLabelValues("p", "a").Observe(100)
	}
	before := read()
	for backend, seconds := range map[string][]float64{"a": {.05, .05, .3, .3, .3, .3, .3, .3, .3, .3}, "b": {.7, .7, 500}} {
		for _, s := range seconds {
			times.WithLabelValues("p", backend).Observe(s)
		}
	}
	after := read()
	var all Counts
	for backend, want := range map[string][2]float64{"a": {.25, .475}, "b": {.875, 120}} {
		key := Key{Pool: "p", Backend: backend}
		window := after[key].Minus(before[key])
		all = all.Plus(window)
		for i, q := range []float64{.5, .95} {
			if got, ok := window.FirstByte.Quantile(q); !ok || math.Abs(got-want[i]) > 1e-9 {
				t.Errorf("%s: %v of the times are up to %v, want %v", backend, q, got, want[i])
			}
		}
	}
	if got, _ := all.FirstByte.Quantile(.5); math.Abs(got-.325) > 1e-9 {
		t.Errorf("half of all times are up to %v", got)
	}
	for _, empty := range []Histogram{{}, after[Key{Pool: "p", Backend: "a"}].Minus(after[Key{Pool: "p", Backend: "a"}]).FirstByte} {
		if got, ok := empty.Quantile(.5); ok {
			t.Errorf("half of no times are up to %v", got)
		}
	}
}

func TestFaultsAreTheCallersOrTheServices(t *testing.T) {
	for want, classes := range map[Fault]string{
		NoFault:      "served ready not_ready models",
		CallersFault: "client_error too_large client_left unauthenticated invalid_request no_such_model",
		ServiceFault: "all_throttled all_busy retry_later throttled quota overloaded failed credential no_credential not_permitted no_model unreachable timeout broken_stream error unheard_of",
	} {
		for class := range strings.FieldsSeq(classes) {
			if got := FaultOf(class); got != want {
				t.Errorf("%s is %q, want %q", class, got, want)
			}
		}
	}
}
