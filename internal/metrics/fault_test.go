package metrics

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestTheAlertsHaveTheSameFaults compares the callers' faults of the code with
// those of the alerts. In both, any other class is a fault of the service.
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
	code := find("fault.go", `(?s)return NoFault\s+case (.*?):\s+return CallersFault`)
	if n := strings.Count(code, ",") + 1; n != len(alerts) {
		t.Errorf("the code has %d faults of callers, and the alerts %q", n, alerts)
	}
}
