package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const alerts = "../examples/prometheus/alerts.yml"

func TestPromtoolLikesTheRules(t *testing.T) {
	t.Parallel()
	promtool := tool(t, "promtool")
	for _, arguments := range [][]string{
		{"check", "rules", filepath.Base(alerts)},
		{"test", "rules", "alerts_test.yml"},
	} {
		cmd := exec.Command(promtool, arguments...)
		cmd.Dir = filepath.Dir(alerts)
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", arguments, err, output)
		}
	}
	tests := readFile(t, filepath.Join(filepath.Dir(alerts), "alerts_test.yml"))
	for _, alert := range regexp.MustCompile(`- alert: (\S+)`).FindAllSubmatch(readFile(t, alerts), -1) {
		if fires := bytes.Contains(tests, fmt.Appendf(nil, "alertname: %s\n        exp_alerts:", alert[1])); !fires {
			t.Errorf("no test has %s fire", alert[1])
		}
		if quiet := bytes.Contains(tests, fmt.Appendf(nil, "alertname: %s}", alert[1])); !quiet {
			t.Errorf("no test has %s not fire", alert[1])
		}
	}
}

func TestEachAlertHasARunbook(t *testing.T) {
	t.Parallel()
	var anchors []string
	for _, heading := range regexp.MustCompile(`(?m)^## (.+)$`).FindAllSubmatch(readFile(t, "../docs/troubleshooting.md"), -1) {
		anchor := strings.ReplaceAll(strings.ToLower(string(heading[1])), " ", "-")
		anchors = append(anchors, regexp.MustCompile(`[^\w-]`).ReplaceAllString(anchor, ""))
	}
	text := readFile(t, alerts)
	named := regexp.MustCompile(`runbook_url: \S+/docs/troubleshooting\.md#(\S+)`).FindAllSubmatch(text, -1)
	if alerts := bytes.Count(text, []byte("- alert: ")); len(named) != alerts {
		t.Errorf("%d alerts have %d runbooks", alerts, len(named))
	}
	for _, anchor := range named {
		if !slices.Contains(anchors, string(anchor[1])) {
			t.Errorf("docs/troubleshooting.md has no #%s", anchor[1])
		}
	}
}

// tool is a program of Debian's package prometheus.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
		return path
	case os.Getenv("CI") == "true":
		t.Fatal(err)
	}
	t.Skipf("no %s: install Debian's package prometheus", name)
	return ""
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
