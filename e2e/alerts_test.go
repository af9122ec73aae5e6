package e2e

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	alerts = "../examples/prometheus/alerts.yml"
	// operatorRules has the same rules for the Prometheus Operator.
	operatorRules = "../examples/prometheus/prometheusrule.yaml"
)

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

// TestThePrometheusOperatorHasTheSameRules compares the files. UPDATE_GOLDEN=1
// writes the second one anew.
func TestThePrometheusOperatorHasTheSameRules(t *testing.T) {
	t.Parallel()
	_, groups, found := strings.Cut(string(readFile(t, alerts)), "\ngroups:\n")
	if !found {
		t.Fatalf("%s has no groups", alerts)
	}
	want := `# The rules of alerts.yml, as a resource of the Prometheus Operator. Give it the
# labels that the ruleSelector of your Prometheus asks for.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: openai-lb
spec:
  groups:
` + regexp.MustCompile(`(?m)^(.)`).ReplaceAllString(groups, "  $1")
	if os.Getenv("UPDATE_GOLDEN") != "" {
		writeFile(t, operatorRules, want)
	}
	if got := string(readFile(t, operatorRules)); got != want {
		t.Errorf("%s has other rules than %s: run this test with UPDATE_GOLDEN=1", operatorRules, alerts)
	}
}

// TestEachClassThatIsNotServedFiresAnAlert has promtool evaluate half an hour
// in which all requests have one class, for each class that the code has.
func TestEachClassThatIsNotServedFiresAnAlert(t *testing.T) {
	t.Parallel()
	promtool := tool(t, "promtool")
	rules, err := filepath.Abs(alerts)
	if err != nil {
		t.Fatal(err)
	}
	listed := regexp.MustCompile(`class=~"(client_error[^"]*)"`).FindSubmatch(readFile(t, alerts))
	if listed == nil {
		t.Fatalf("%s has no list of callers' faults", alerts)
	}
	callersFaults := strings.Split(string(listed[1]), "|")
	classes := classesOfTheCode(t)
	for _, class := range callersFaults {
		if !slices.Contains(classes, class) {
			t.Errorf("%s has the class %q, which the code does not have", alerts, class)
		}
	}
	file := new(strings.Builder)
	fmt.Fprintf(file, "rule_files: [%s]\nevaluation_interval: 1m\ntests:\n", rules)
	for _, class := range classes {
		fires := "NotServed"
		switch {
		case slices.Contains([]string{"served", "ready", "models", "usage"}, class):
			fires = "" // a healthy hour
		case slices.Contains(callersFaults, class):
			fires = "CallersFail"
		case class == "not_ready":
			fires = "NoBackendAvailable"
		case class == "client_left_waiting":
			fires = "ClientsLeaveWaiting"
		}
		fmt.Fprintf(file, `  - name: %[1]s
    interval: 1m
    input_series:
      - {series: 'up{job="openai-lb"}', values: 1x60}
      - {series: 'caddy_openai_lb_backend_available{job="openai-lb", pool="llm", backend="a", deployment=""}', values: 1x60}
      - {series: 'caddy_openai_lb_requests_total{job="openai-lb", pool="llm", class="%[1]s"}', values: 0+10x60}
    promql_expr_test:
      - expr: 'count by (alertname) (ALERTS{alertstate="firing"}) # %[1]s'
        eval_time: 1h
        exp_samples: [`, class)
		if fires != "" {
			fmt.Fprintf(file, `{labels: '{alertname="OpenAILB%s"}', value: 1}`, fires)
		}
		file.WriteString("]\n")
	}
	name := filepath.Join(t.TempDir(), "classes.yml")
	writeFile(t, name, file.String())
	if output, err := exec.Command(promtool, "test", "rules", name).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, output)
	}
}

// classesOfTheCode returns the classes of answers: those of replies, and those
// of the balancer's own answers.
func classesOfTheCode(t *testing.T) (classes []string) {
	t.Helper()
	for _, file := range []string{"../internal/verdict/class.go", "../internal/apierror/apierror.go"} {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		before := len(classes)
		for _, declaration := range parsed.Decls {
			constants, ok := declaration.(*ast.GenDecl)
			if !ok || constants.Tok != token.CONST || len(constants.Specs) < 2 { // a single one is another text
				continue
			}
			for _, spec := range constants.Specs {
				class, err := strconv.Unquote(spec.(*ast.ValueSpec).Values[0].(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				classes = append(classes, class)
			}
		}
		if found := len(classes) - before; found < 10 {
			t.Errorf("%s has %d classes, expected more", file, found)
		}
	}
	return classes
}

// tool returns where a program is, and skips the test if this machine does not
// have it.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
		return path
	case os.Getenv("CI") == "true":
		t.Fatal(err)
	}
	t.Skipf("%v: README.md says where it comes from", err)
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
