package statuspage

import (
	"fmt"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// chart is a curve over the last five minutes.
type chart struct {
	Title string
	// Now and Most are rates per second, as text.
	Now, Most string
	// Line has the points of the curve, and Area the points of the area below
	// it, in a box of chartWidth and chartHeight.
	Line, Area string
}

const (
	chartWidth  = 300
	chartHeight = 64
	// chartSpans is how many spans a chart has room for.
	chartSpans = 60
)

// Charts returns the charts of the pool.
func (s poolStatus) Charts() []chart {
	rates := func(of func(status.Span) float64) (rates []float64) {
		for _, span := range s.Spans {
			rates = append(rates, of(span)/span.Seconds)
		}
		return rates
	}
	return []chart{
		newChart("Requests", rates(func(s status.Span) float64 { return s.Requests })),
		newChart("Failovers", rates(func(s status.Span) float64 { return s.Failovers })),
		newChart("Tokens", rates(func(s status.Span) float64 { return s.Tokens })),
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
