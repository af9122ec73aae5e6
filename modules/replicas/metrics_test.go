package replicas

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// described takes the descriptions of metrics.
type described struct {
	prometheus.Registerer
	metrics strings.Builder
}

func (d *described) Register(c prometheus.Collector) error {
	descs := make(chan *prometheus.Desc)
	go func() {
		c.Describe(descs)
		close(descs)
	}()
	for desc := range descs {
		d.metrics.WriteString(desc.String() + "\n")
	}
	return nil
}

// TestTheDashboardShowsEachMetric compares the names and labels, because no
// other test of the dashboard runs replicas.
func TestTheDashboardShowsEachMetric(t *testing.T) {
	var d described
	if err := Register(&d); err != nil {
		t.Fatal(err)
	}
	var there, shown []string
	for _, metric := range regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{(\w*)\}`).FindAllStringSubmatch(d.metrics.String(), -1) {
		there = append(there, metric[1]+" "+metric[2])
	}
	text, err := os.ReadFile("../../examples/grafana/openai-lb.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct{ Targets []struct{ Expr string } }
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			by := ""
			if label := regexp.MustCompile(`by \((kind|reason|outcome|pool)\)`).FindStringSubmatch(target.Expr); label != nil {
				by = label[1]
			}
			if metric := regexp.MustCompile(`caddy_openai_lb_state_\w+`).FindString(target.Expr); metric != "" {
				shown = append(shown, strings.TrimSuffix(metric, "_bucket")+" "+by)
			}
		}
	}
	slices.Sort(there)
	slices.Sort(shown)
	if shown = slices.Compact(shown); !slices.Equal(shown, there) || len(there) < 10 {
		t.Errorf("the dashboard shows\n%q\nand there are\n%q", shown, there)
	}
}
