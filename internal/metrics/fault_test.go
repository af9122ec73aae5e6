package metrics

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// TestTheAlertsHaveTheSameFaults compares the callers' faults of the code with
// those of the alerts. In both, any other class is a fault of the service. The
// dashboard leaves out the faults of callers, too.
func TestTheAlertsHaveTheSameFaults(t *testing.T) {
	find := func(file, pattern string) string {
		t.Helper()
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		found := regexp.MustCompile(pattern).FindSubmatch(text)
		if found == nil {
			t.Fatalf("%s has no %s", file, pattern)
		}
		return string(found[1])
	}
	alerts := strings.Split(find("../../examples/prometheus/alerts.yml", `class=~"(client_error[^"]*)"`), "|")
	for _, class := range alerts {
		if FaultOf(class) != CallersFault {
			t.Errorf("%s is a fault of the caller in the alerts, and %q in the code", class, FaultOf(class))
		}
	}
	code := slices.Clone(callersMistakes)
	text, err := os.ReadFile("../verdict/class.go")
	if err != nil {
		t.Fatal(err)
	}
	classes := regexp.MustCompile(`(?m)^\t\w+ +Class = "(\w+)"$`).FindAllStringSubmatch(string(text), -1)
	if len(classes) < 20 {
		t.Errorf("found %d classes", len(classes))
	}
	for _, found := range classes {
		if class := verdict.Class(found[1]); class.OfClient() {
			code = append(code, string(class))
		}
	}
	slices.Sort(code)
	slices.Sort(alerts)
	if !slices.Equal(code, alerts) {
		t.Errorf("callers' faults are %q in the code, and %q in the alerts", code, alerts)
	}
	dashboard := strings.Split(find("../../examples/grafana/openai-lb.json", `class!~\\"(ready[^"\\]*client_error[^"\\]*)`), "|")
	for _, class := range code {
		if !slices.Contains(dashboard, class) {
			t.Errorf("the share that is served in the dashboard counts %s, which is a fault of the caller", class)
		}
	}
	for _, class := range dashboard {
		if FaultOf(class) == ServiceFault {
			t.Errorf("the share that is served in the dashboard leaves out %s, which is a fault of the service", class)
		}
	}
}
