package statuspage

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/overview"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
	"github.com/openai-lb/caddy-openai-lb/internal/traffic"
)

// stateView is what the page shows.
type stateView struct {
	Pools  []poolView
	Shares []shareView
}

// poolView is what the page shows of a pool.
type poolView struct {
	Name       string
	Summary    string
	Charts     []chart
	Priorities []priorityView
	Episodes   []episodeView
}

// priorityView has the backends of a priority.
type priorityView struct {
	Priority int
	Backends []backendView
}

// backendView is what the page shows of a backend.
type backendView struct {
	overview.Backend
	// Share is its part of the requests of the pool in percent, or -1 if there
	// were none.
	Share int
	// Served, Failed and Used count what it answered, what it failed at, and
	// the tokens, all of the last minutes.
	Served, Failed, Used string
}

// episodeView is a recent bench, or several.
type episodeView struct {
	overview.Episode
	Over bool
}

// maxEpisodes is how many recent benches are shown of a pool.
const maxEpisodes = 8

// maxBenches is how many benches of a backend are shown.
const maxBenches = 3

// renderState returns the part of the page that changes.
func renderState(now time.Time) ([]byte, error) {
	spans := traffic.Recent.Spans()
	var pools []poolView
	for _, p := range overview.Pools(now, sum(spans)) {
		pools = append(pools, viewOf(p, spans, now))
	}
	var fragment bytes.Buffer
	err := templates.ExecuteTemplate(&fragment, "state", stateView{pools, sharesOf(replicas.Statuses(), now)})
	return fragment.Bytes(), err
}

// sum adds up what was counted in all spans.
func sum(spans []traffic.Span) map[traffic.Key]traffic.Counts {
	total := make(map[traffic.Key]traffic.Counts)
	for _, span := range spans {
		for key, counts := range span.Counts {
			total[key] = total[key].Plus(counts)
		}
	}
	return total
}

func viewOf(p overview.Pool, spans []traffic.Span, now time.Time) poolView {
	view := poolView{Name: p.Name, Summary: summaryOf(p.Backends), Charts: chartsOf(p.Name, spans)}
	var all int64
	for _, b := range p.Backends {
		all += b.Requests
	}
	for _, b := range p.Backends {
		if n := len(view.Priorities); n == 0 || view.Priorities[n-1].Priority != b.Priority {
			view.Priorities = append(view.Priorities, priorityView{Priority: b.Priority})
		}
		last := &view.Priorities[len(view.Priorities)-1]
		share := -1
		if all > 0 {
			share = int(math.Round(100 * float64(b.Requests) / float64(all)))
		}
		last.Backends = append(last.Backends, backendView{
			b, share, short(float64(b.Requests)), short(float64(b.Failures)), short(float64(b.Tokens)),
		})
	}
	for _, e := range overview.Episodes(p.Name, maxEpisodes) {
		view.Episodes = append(view.Episodes, episodeView{e, !now.Before(e.Until)})
	}
	return view
}

// failing is the state of a backend that active health checks keep out of use.
const failing = "failing health checks"

// summaryOf says in a sentence how the backends are.
func summaryOf(backends []overview.Backend) string {
	in := make(map[string]int)
	for _, b := range backends {
		if !b.Healthy && b.State != overview.Drained {
			b.State = failing
		}
		in[b.State]++
	}
	sentence := fmt.Sprintf("%d of %d backends available", in[overview.Available], len(backends))
	for _, state := range []string{overview.Benched, overview.Probing, overview.Drained, failing} {
		if in[state] > 0 {
			sentence += fmt.Sprintf(", %d %s", in[state], state)
		}
	}
	return sentence + "."
}

// Shown are the benches that are shown, and Hidden is how many are not.
func (b backendView) Shown() []overview.Bench { return b.Benches[:min(maxBenches, len(b.Benches))] }

func (b backendView) Hidden() int { return len(b.Benches) - len(b.Shown()) }

// chart is a curve over the last five minutes.
type chart struct {
	Title string
	// Now and Most are rates per second, as text.
	Now, Most string
	// Line are the points of the curve, and Area those of the area below it, in
	// a box of chartWidth and chartHeight.
	Line, Area string
}

const (
	chartWidth  = 300
	chartHeight = 64
	// chartSpans is how many spans a chart has room for.
	chartSpans = 60
)

func chartsOf(pool string, spans []traffic.Span) []chart {
	requests, failovers, tokens := make([]float64, len(spans)), make([]float64, len(spans)), make([]float64, len(spans))
	for i, span := range spans {
		var total traffic.Counts
		for key, counts := range span.Counts {
			if key.Pool == pool {
				total = total.Plus(counts)
			}
		}
		seconds := span.Length.Seconds()
		requests[i], failovers[i], tokens[i] = total.Requests/seconds, total.Failovers/seconds, total.Tokens/seconds
	}
	return []chart{
		newChart("Requests", requests),
		newChart("Failovers", failovers),
		newChart("Tokens", tokens),
	}
}

func newChart(title string, rates []float64) chart {
	var now, most float64
	for _, rate := range rates {
		now, most = rate, max(most, rate)
	}
	const step = float64(chartWidth) / (chartSpans - 1)
	var line strings.Builder
	first := float64(chartWidth)
	for i, rate := range rates {
		x, y := chartWidth-float64(len(rates)-1-i)*step, float64(chartHeight-1)
		if most > 0 {
			y -= rate / most * (chartHeight - 4)
		}
		first = min(first, x)
		fmt.Fprintf(&line, "%.1f,%.1f ", x, y)
	}
	points := strings.TrimSpace(line.String())
	area := ""
	if points != "" {
		area = fmt.Sprintf("%.1f,%d %s %d,%d", first, chartHeight, points, chartWidth, chartHeight)
	}
	return chart{title, short(now), short(most), points, area}
}

// short writes a number with three digits at most.
func short(n float64) string {
	for _, scale := range []struct {
		size float64
		unit string
	}{{1e9, " G"}, {1e6, " M"}, {1e3, " k"}} {
		if n >= scale.size {
			return digits(n/scale.size) + scale.unit
		}
	}
	return digits(n)
}

func digits(n float64) string {
	switch {
	case n == math.Trunc(n) || n >= 99.95:
		return fmt.Sprintf("%.0f", n)
	case n >= 9.995:
		return fmt.Sprintf("%.1f", n)
	}
	return fmt.Sprintf("%.2g", n)
}
