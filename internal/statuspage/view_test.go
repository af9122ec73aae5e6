package statuspage

import (
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/overview"
	"github.com/openai-lb/caddy-openai-lb/internal/traffic"
)

func TestChartsAndSharesAreThoseOfThePool(t *testing.T) {
	counts := func(requests, failovers, tokens float64) traffic.Counts {
		return traffic.Counts{Requests: requests, Failovers: failovers, Tokens: tokens}
	}
	a, b, nobody, other := traffic.Key{Pool: "p", Backend: "a"}, traffic.Key{Pool: "p", Backend: "b"}, traffic.Key{Pool: "p"}, traffic.Key{Pool: "q", Backend: "a"}
	spans := []traffic.Span{
		{Length: 5 * time.Second, Counts: map[traffic.Key]traffic.Counts{a: counts(10, 5, 1000), nobody: counts(5, 0, 0), other: counts(999, 999, 999)}},
		{Length: 10 * time.Second, Counts: map[traffic.Key]traffic.Counts{a: counts(5, 0, 0), b: counts(10, 0, 30)}},
	}
	pool := overview.Pool{Name: "p", Backends: []overview.Backend{{Name: "a", Requests: 15}, {Name: "b", Requests: 10}, {Name: "c"}}}
	view := viewOf(pool, spans, time.Now())
	want := []chart{
		{"Requests", "1.5", "3", "294.9,3.0 300.0,33.0", "294.9,64 294.9,3.0 300.0,33.0 300,64"},
		{"Failovers", "0", "1", "294.9,3.0 300.0,63.0", "294.9,64 294.9,3.0 300.0,63.0 300,64"},
		{"Tokens", "3", "200", "294.9,3.0 300.0,62.1", "294.9,64 294.9,3.0 300.0,62.1 300,64"},
	}
	for i, got := range view.Charts {
		if got != want[i] {
			t.Errorf("got %+v, want %+v", got, want[i])
		}
	}
	for i, share := range []int{60, 40, 0} {
		if got := view.Priorities[0].Backends[i].Share; got != share {
			t.Errorf("backend %d has a share of %d, want %d", i, got, share)
		}
	}
}

func TestAChartHasRoomForFiveMinutes(t *testing.T) {
	points := strings.Fields(newChart("", make([]float64, chartSpans)).Line)
	if len(points) != chartSpans || points[0] != "0.0,63.0" || points[chartSpans-1] != "300.0,63.0" {
		t.Errorf("got %q", points)
	}
}

func TestTheSummaryNamesEachStateThatThereIs(t *testing.T) {
	for want, backends := range map[string][]overview.Backend{
		"1 of 1 backends available.": {{State: overview.Available, Healthy: true}},
		"0 of 6 backends available, 1 benched, 1 probing, 2 drained, 2 failing health checks.": {
			{State: overview.Benched, Healthy: true}, {State: overview.Probing, Healthy: true}, {State: overview.Drained, Healthy: true},
			{State: overview.Drained}, {State: overview.Available}, {State: overview.Benched},
		},
	} {
		if got := summaryOf(backends); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
