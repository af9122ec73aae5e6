package metrics

import (
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// someSources are metrics that only this test counts.
func someSources() (s sources, add func(metric *prometheus.CounterVec, value float64, labels ...string)) {
	vector := func(labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "counter", Help: "."}, labels)
	}
	s = sources{
		requests:  vector("pool", "caller", "backend", "model", "class", "code"),
		attempts:  vector("pool", "backend", "deployment", "class"),
		failovers: vector("pool", "backend", "class"),
		tokens:    vector("pool", "backend", "model", "deployment", "type"),
		firstByte: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "histogram", Help: ".", Buckets: []float64{.1, .5, 1, 120},
		}, []string{"pool", "backend"}),
	}
	return s, func(metric *prometheus.CounterVec, value float64, labels ...string) {
		metric.WithLabelValues(labels...).Add(value)
	}
}

func TestCountsAreThoseOfTheMetrics(t *testing.T) {
	s, add := someSources()
	add(s.requests, 3, "p", "alice", "a", "gpt-4o", "served", "200")
	add(s.requests, 4, "p", "bob", "a", "gpt-4o", "served", "200")
	add(s.requests, 2, "p", "bob", "a", "gpt-4o", "client_error", "400")
	add(s.requests, 1, "p", "bob", "", "gpt-4o", "all_throttled", "429")
	add(s.requests, 9, "q", "bob", "a", "", "served", "200")
	for outcome, n := range map[string]float64{
		"served": 1, "client_error": 2, "too_large": 4, "client_left": 8, "throttled": 16, "failed": 32, "broken_stream": 64,
	} {
		add(s.attempts, n, "p", "a", "gpt-4o", outcome)
	}
	add(s.failovers, 5, "p", "a", "throttled")
	add(s.failovers, 6, "p", "a", "failed")
	for kind, n := range map[string]float64{"input": 1000, "cached": 900, "output": 50, "reasoning": 40} {
		add(s.tokens, n, "p", "a", "gpt-4o", "ptu-4o", kind)
	}

	got := s.totals()
	want := map[Key]Counts{
		{"p", "a", "", ""}:                   {Attempts: 127, Throttles: 16, Failures: 96, Failovers: 11, Tokens: 1050},
		{"p", "a", "gpt-4o", "served"}:       {Requests: 7},
		{"p", "a", "gpt-4o", "client_error"}: {Requests: 2},
		{"p", "", "gpt-4o", "all_throttled"}: {Requests: 1},
		{"q", "a", "", "served"}:             {Requests: 9},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if sum := By(got, Key.OfBackend)[Key{Pool: "p", Backend: "a"}]; sum.Requests != 9 || sum.Attempts != 127 {
		t.Errorf("together that is %v", sum)
	}
}

func TestAHistoryHasTheLastFiveMinutes(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s, add := someSources()
		request := func(n float64) { add(s.requests, n, "p", "", "a", "gpt-4o", "served", "200") }
		request(100) // before the first user
		h := &History{totals: s.totals}
		h.Use()
		request(1)
		time.Sleep(SpanLength + time.Millisecond)
		request(2)
		h.Use() // another config, which replaces the first one
		h.Leave()
		time.Sleep(SpanLength)
		if got := requests(h.Spans()); !reflect.DeepEqual(got, []float64{1, 2}) {
			t.Errorf("got %v", got)
		}
		for range 100 {
			request(3)
			time.Sleep(SpanLength)
		}
		spans := h.Spans()
		if got := requests(spans); len(got) != 60 || got[0] != 3 || got[59] != 3 {
			t.Errorf("got %v", got)
		}
		total, length := Sum(spans)
		if got := total[servedKey].Requests; got != 180 || length != 5*time.Minute {
			t.Errorf("in %s there were %v requests", length, got)
		}
		if spans[59].Length != SpanLength {
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

var servedKey = Key{"p", "a", "gpt-4o", "served"}

func requests(spans []Span) (requests []float64) {
	for _, span := range spans {
		requests = append(requests, span.Counts[servedKey].Requests)
	}
	return requests
}

func TestASpanHasOnlyWhatWasCountedInIt(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s, add := someSources()
		add(s.requests, 1, "p", "", "a", "gpt-4o", "served", "200")
		h := &History{totals: s.totals}
		h.Use()
		defer h.Leave()
		add(s.failovers, 2, "p", "b", "failed")
		time.Sleep(SpanLength + time.Millisecond)
		if got, want := h.Spans()[0].Counts, (map[Key]Counts{{Pool: "p", Backend: "b"}: {Failovers: 2}}); !reflect.DeepEqual(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

func TestQuantilesAreThoseOfTheTimesInAWindow(t *testing.T) {
	s, _ := someSources()
	for range 100 { // before the window
		s.firstByte.WithLabelValues("p", "a").Observe(100)
	}
	before := s.totals()
	for backend, seconds := range map[string][]float64{"a": {.05, .05, .3, .3, .3, .3, .3, .3, .3, .3}, "b": {.7, .7, 500}} {
		for _, second := range seconds {
			s.firstByte.WithLabelValues("p", backend).Observe(second)
		}
	}
	after := s.totals()
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

func TestFaultsAreTheCallersOrTheServicesOrUnknown(t *testing.T) {
	for want, classes := range map[Fault]string{
		NoFault:      "served ready not_ready models",
		CallersFault: "client_error too_large client_left unauthenticated invalid_request no_such_model caller_limited",
		PerhapsOurs:  "client_left_waiting",
		ServiceFault: "all_throttled all_busy retry_later throttled quota overloaded failed credential no_credential not_permitted no_model unreachable timeout broken_stream error unheard_of",
	} {
		for class := range strings.FieldsSeq(classes) {
			if got := FaultOf(class); got != want {
				t.Errorf("%s is %q, want %q", class, got, want)
			}
		}
	}
}
