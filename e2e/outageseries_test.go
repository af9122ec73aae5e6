package e2e

import (
	"bytes"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// scrapeInterval is how often metrics are recorded.
const scrapeInterval = 5 * time.Second

// scrape has the values of series by their names and labels.
type scrape map[string]float64

// scraped returns the metrics of all replicas that alerts can be about, and
// which of them are counters.
func (s *outageSite) scraped() (scrape, map[string]bool) {
	s.Helper()
	values, counters := make(scrape), make(map[string]bool)
	for i, r := range s.replicas {
		text, err := getText(r.url + "/metrics")
		if err != nil {
			s.Error(err)
			continue
		}
		instance := fmt.Sprintf(`job="openai-lb",instance="%c"`, 'a'+i)
		values["up{"+instance+"}"] = 1
		kinds := make(map[string]string)
		for line := range strings.Lines(text) {
			if words := strings.Fields(line); strings.HasPrefix(line, "# TYPE ") {
				kinds[words[2]] = words[3]
			}
			if !strings.HasPrefix(line, "caddy_openai_lb_") && !strings.HasPrefix(line, "caddy_config_") {
				continue
			}
			series, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
			if !strings.Contains(line, "{") {
				series, value, _ = strings.Cut(strings.TrimSpace(line), " ")
				series += "{"
			} else {
				series += ","
			}
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				s.Errorf("%s: %v", line, err)
			}
			name, _, _ := strings.Cut(series, "{")
			series += instance + "}"
			values[series] = n
			its := kinds[regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(name, "")]
			counters[series] = kinds[name] == "counter" || its == "histogram"
		}
	}
	return values, counters
}

// record records metrics until it is stopped, as a further phase, and once more
// then.
func (s *outageSite) record() (stop func()) {
	s.scrapes = append(s.scrapes, nil)
	phase := &s.scrapes[len(s.scrapes)-1]
	add := func() {
		values, counters := s.scraped()
		*phase = append(*phase, values)
		maps.Copy(s.counters, counters)
	}
	stopped, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		tick := time.NewTicker(scrapeInterval)
		defer tick.Stop()
		for {
			add()
			select {
			case <-stopped:
				add()
				return
			case <-tick.C:
			}
		}
	}()
	stop = sync.OnceFunc(func() {
		close(stopped)
		<-over
	})
	s.Cleanup(stop)
	return stop
}

// phaseLength is how long each phase is for the alerts: what was recorded of it
// goes on as it was at last.
const phaseLength = 7 * time.Minute

// continued returns the phases as series in promtool's notation.
func (s *outageSite) continued() map[string]string {
	const length = int(phaseLength / scrapeInterval)
	lasts := make(map[string]float64)
	series := make(map[string]*strings.Builder)
	for phase, scrapes := range s.scrapes {
		scrapes = scrapes[:min(len(scrapes), length)]
		// of the phase, the second half is how it goes on
		begin, end := scrapes[len(scrapes)/2], scrapes[len(scrapes)-1]
		steps := max(1, len(scrapes)-1-len(scrapes)/2)
		for name := range allNames(s.scrapes) {
			if series[name] == nil {
				series[name] = new(strings.Builder)
			}
			b := series[name]
			// a counter goes on from where the phase before has ended
			offset := 0.0
			if s.counters[name] && phase > 0 {
				before := s.scrapes[phase-1]
				offset = lasts[name] - before[len(before)-1][name]
			}
			for _, values := range scrapes {
				if value, ok := values[name]; ok {
					fmt.Fprintf(b, "%g ", value+offset)
				} else {
					b.WriteString("_ ")
				}
			}
			value, ok := end[name]
			left := length - len(scrapes)
			if !ok {
				fmt.Fprintf(b, "_x%d ", left)
				continue
			}
			growth := 0.0
			if s.counters[name] {
				growth = max(0, (end[name]-begin[name])/float64(steps))
			}
			if lasts[name] = value + offset + growth*float64(left); left > 0 {
				fmt.Fprintf(b, "%.9g+%.9gx%d ", value+offset+growth, growth, left-1)
			}
		}
	}
	texts := make(map[string]string)
	for name, b := range series {
		texts[name] = b.String()
	}
	return texts
}

func allNames(phases [][]scrape) map[string]bool {
	names := make(map[string]bool)
	for _, scrapes := range phases {
		for _, values := range scrapes {
			for name := range values {
				names[name] = true
			}
		}
	}
	return names
}

// alertsWithin is how long alerts have to fire after an outage has begun, and
// to end after it is over.
const alertsWithin = 6 * time.Minute

// wantAlerts has promtool evaluate the rules with what was recorded before,
// during and after an outage. These alerts, and no others, fire in time, and
// then end in time.
func (s *outageSite) wantAlerts(promtool string, alertnames []string) {
	s.Helper()
	rules, err := filepath.Abs(alerts)
	if err != nil {
		s.Fatal(err)
	}
	var file bytes.Buffer
	fmt.Fprintf(&file, "rule_files: [%s]\nevaluation_interval: 15s\ntests:\n  - interval: %s\n    input_series:\n", rules, scrapeInterval)
	series := s.continued()
	for _, name := range slices.Sorted(maps.Keys(series)) {
		fmt.Fprintf(&file, "      - {series: '%s', values: '%s'}\n", name, series[name])
	}
	file.WriteString("    promql_expr_test:\n")
	for _, want := range []struct {
		at   time.Duration
		when string
		fire []string
	}{{phaseLength - scrapeInterval, "before", nil}, {phaseLength + alertsWithin, "during", alertnames}, {2*phaseLength + alertsWithin, "after", nil}} {
		fmt.Fprintf(&file, "      - expr: 'group by (alertname) (ALERTS{alertstate=\"firing\"}) # %s the outage'\n        eval_time: %ds\n        exp_samples: [", want.when, int(want.at.Seconds()))
		for i, alert := range want.fire {
			if i > 0 {
				file.WriteString(", ")
			}
			fmt.Fprintf(&file, `{labels: '{alertname="%s"}', value: 1}`, alert)
		}
		file.WriteString("]\n")
	}
	name := filepath.Join(s.dir, "outage.yml")
	writeFile(s.T, name, file.String())
	if output, err := exec.CommandContext(s.Context(), promtool, "test", "rules", name).CombinedOutput(); err != nil {
		s.Errorf("%v\n%s", err, output)
	}
}

// documentedOutages returns the alerts of each outage in the table of
// docs/operations.md.
func documentedOutages(t *testing.T) map[string][]string {
	t.Helper()
	_, table, found := strings.Cut(string(readFile(t, "../docs/operations.md")), "\n## Outages\n")
	if !found {
		t.Fatal("docs/operations.md has no section Outages")
	}
	rows := make(map[string][]string)
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, "## ") {
			break
		}
		cells := strings.Split(line, "|")
		if len(cells) < 4 || strings.HasPrefix(cells[1], "---") || strings.TrimSpace(cells[1]) == "outage" {
			continue
		}
		rows[strings.TrimSpace(cells[1])] = regexp.MustCompile(`OpenAILB\w+`).FindAllString(line, -1)
	}
	return rows
}
