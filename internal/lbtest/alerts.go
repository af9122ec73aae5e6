package lbtest

import (
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// ScrapeInterval is how often a Recording is to be added to.
const ScrapeInterval = 15 * time.Second

// Recording has series as Prometheus would scrape them, by their names and
// labels. The zero Recording is empty.
type Recording struct {
	series map[string][]string
	scrape int
}

// Add scrapes the counters and gauges of a pool. A series that begins later has
// no value before.
func (r *Recording) Add(t *testing.T, pool string) {
	t.Helper()
	if r.series == nil {
		r.series = make(map[string][]string)
	}
	for _, family := range Scrape(t) {
		for _, m := range family.GetMetric() {
			if m.GetCounter() == nil && m.GetGauge() == nil || !HasLabels(m, map[string]string{"pool": pool}) {
				continue
			}
			labels := []string{`job="openai-lb"`, `instance="a"`}
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			name := family.GetName() + "{" + strings.Join(labels, ", ") + "}"
			for len(r.series[name]) < r.scrape {
				r.series[name] = append(r.series[name], "_")
			}
			r.series[name] = append(r.series[name], fmt.Sprint(m.GetCounter().GetValue()+m.GetGauge().GetValue()))
		}
	}
	r.scrape++
}

// Firing are the alerts of a severity that fire at a time of a Recording.
// OpenAILBDown is not among them.
type Firing struct {
	At     time.Duration
	Alerts []string
}

// WantAlerts has promtool evaluate the alerts of examples/prometheus, from a
// folder two below the repository's.
func (r *Recording) WantAlerts(t *testing.T, severity string, want ...Firing) {
	t.Helper()
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not here: it is in Debian's package prometheus")
	}
	rules, err := filepath.Abs("../../examples/prometheus/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	file := new(strings.Builder)
	fmt.Fprintf(file,
		"rule_files: [%s]\nevaluation_interval: 15s\ntests:\n  - interval: 15s\n    input_series:\n", rules)
	for _, series := range slices.Sorted(maps.Keys(r.series)) {
		fmt.Fprintf(file, "      - {series: '%s', values: '%s'}\n", series, strings.Join(r.series[series], " "))
	}
	file.WriteString("    promql_expr_test:\n")
	for _, w := range want {
		fmt.Fprintf(file, "      - expr: 'group by (alertname) (ALERTS{alertstate=\"firing\", severity=\"%s\", alertname!=\"OpenAILBDown\"})'\n"+
			"        eval_time: %ds\n        exp_samples:", severity, int(w.At.Seconds()))
		if w.Alerts == nil {
			file.WriteString(" []")
		}
		for _, alert := range w.Alerts {
			fmt.Fprintf(file, "\n          - {labels: '{alertname=\"%s\"}', value: 1}", alert)
		}
		file.WriteString("\n")
	}
	path := filepath.Join(t.TempDir(), "recorded.yml")
	WriteFile(t, path, file.String())
	if output, err := exec.CommandContext(t.Context(), promtool, "test", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, output)
	}
}
