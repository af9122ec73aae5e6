package silence

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// recording has series as Prometheus would scrape them, by their names and labels.
type recording struct {
	series map[string][]string
	scrape int
}

const scrapeInterval = 15 * time.Second

// add scrapes the metrics of a pool. A series that begins later has no value before.
func (r *recording) add(t *testing.T, pool string) {
	for _, family := range lbtest.Scrape(t) {
		for _, m := range family.GetMetric() {
			if m.GetCounter() == nil && m.GetGauge() == nil || !lbtest.HasLabels(m, map[string]string{"pool": pool}) {
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

// at is how many scrapes are made in a time, as an evaluation time of promtool.
func at(d time.Duration) string { return fmt.Sprintf("%ds", int(d.Seconds())) }

// TestACriticalAlertFiresWithinTwoMinutesIfAllBackendsHang records the series of a run, and has promtool evaluate the
// alerts with them.
func TestACriticalAlertFiresWithinTwoMinutesIfAllBackendsHang(t *testing.T) {
	const healthy, hanging = 5 * time.Minute, 3 * time.Minute
	name := lbtest.Unique("all-hang")
	rec := recording{series: make(map[string][]string)}
	lbtest.InBubble(t, lbtest.PoolOf("a b", "pool "+name), func(t *testing.T, w *lbtest.World) {
		warm(w)
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		run := func(d time.Duration) {
			for range d / scrapeInterval {
				rec.add(t, name)
				for range 3 {
					all.Go(func() {
						w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(chat)).WithContext(ctx))
					})
					time.Sleep(scrapeInterval / 3)
				}
			}
		}
		run(healthy)
		for _, b := range w.Backends {
			b.Replies(lbtest.Hangs)
		}
		run(hanging)
		if n := lbtest.SumOf(t, "first_byte_waiting", map[string]string{"pool": name}); n < 30 {
			t.Errorf("%g requests wait", n)
		}
		for _, b := range w.Backends {
			b.Recovers()
		}
		leave() // of those that wait
		all.Wait()
		ctx, leave = context.WithCancel(t.Context())
		defer leave()
		run(6 * time.Minute)
		all.Wait()
	})
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip(err)
	}
	rules, err := filepath.Abs("../../examples/prometheus/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	file := new(strings.Builder)
	fmt.Fprintf(file, "rule_files: [%s]\nevaluation_interval: 15s\ntests:\n  - interval: 15s\n    input_series:\n", rules)
	for _, series := range slices.Sorted(maps.Keys(rec.series)) {
		fmt.Fprintf(file, "      - {series: '%s', values: '%s'}\n", series, strings.Join(rec.series[series], " "))
	}
	file.WriteString("    promql_expr_test:\n")
	for _, c := range []struct {
		after time.Duration
		want  []string
	}{
		{healthy, nil},
		{healthy + 2*time.Minute, []string{"OpenAILBModelNotServed", "OpenAILBNoFirstByte"}},
		{healthy + hanging + 6*time.Minute - scrapeInterval, nil},
	} {
		fmt.Fprintf(file, "      - expr: 'count by (alertname) (ALERTS{alertstate=\"firing\", severity=\"critical\", alertname!=\"OpenAILBDown\"})'\n        eval_time: %s\n        exp_samples:", at(c.after))
		if c.want == nil {
			file.WriteString(" []")
		}
		for _, alert := range c.want {
			fmt.Fprintf(file, "\n          - {labels: '{alertname=\"%s\"}', value: 1}", alert)
		}
		file.WriteString("\n")
	}
	path := filepath.Join(t.TempDir(), "recorded.yml")
	if err := os.WriteFile(path, []byte(file.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if output, err := exec.Command(promtool, "test", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, output)
	}
}
