package openailb_test

import (
	"bytes"
	"os"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestTheChartCannotHaveOtherAlertsThanTheExamples checks that what the chart
// shares with the examples is a link: Helm puts the file that it leads to into
// the package.
func TestTheChartCannotHaveOtherAlertsThanTheExamples(t *testing.T) {
	const files = "charts/caddy-openai-lb/files/"
	for file, example := range map[string]string{
		"alerts.yml":     "examples/prometheus/alerts.yml",
		"dashboard.json": "examples/grafana/openai-lb.json",
	} {
		if target, err := os.Readlink(files + file); err != nil || target != "../../../"+example {
			t.Errorf("%s leads to %q (%v), expected %s", file, target, err, example)
		}
		if !bytes.Equal(lbtest.ReadFile(t, files+file), lbtest.ReadFile(t, example)) {
			t.Errorf("%s is not %s", file, example)
		}
	}
}
