package verdict

import (
	"os"
	"strings"
	"testing"
)

func TestWhoEndsAProblem(t *testing.T) {
	for problem, operator := range map[[2]string]bool{
		{"credential", "401"}:          true,
		{"not_permitted", ""}:          true,
		{"no_model", "x"}:              true,
		{"quota", "insufficient"}:      true,
		{"unreachable", "certificate"}: true,
		{"unreachable", "tls"}:         true,
		{"unreachable", "dns"}:         true,
		{"unreachable", "malformed"}:   true,
		{"unreachable", "refused"}:     false,
		{"unreachable", "timeout"}:     false,
		{"unreachable", "unroutable"}:  false,
		{"unreachable", "other"}:       false,
		{"timeout", "no_reply"}:        false,
		{"silent", ""}:                 false,
		{"failed", "certificate"}:      false,
		{"unclear", ""}:                false,
	} {
		got := RemedyOf(Class(problem[0]), problem[1])
		if got.NeedsOperator != operator {
			t.Errorf("%q: it needs an operator is %v, want %v", problem, got.NeedsOperator, operator)
		}
		if got.Meaning == "" || got.Next == "" {
			t.Errorf("%q is %+v", problem, got)
		}
	}
}

func TestEachRemedyCanBeFound(t *testing.T) {
	for _, r := range Remedies {
		if got := RemedyOf(r.Class, r.Cause); got != r {
			t.Errorf("%s %s is hidden by %+v", r.Class, r.Cause, got)
		}
	}
}

// TestTheAlertHasTheCausesOfTheTable compares the alert on backends that nobody
// reaches until a person acts.
func TestTheAlertHasTheCausesOfTheTable(t *testing.T) {
	var causes []string
	for _, r := range Remedies {
		if r.Class == Unreachable && r.NeedsOperator {
			causes = append(causes, r.Cause)
		}
	}
	rules, err := os.ReadFile("../../examples/prometheus/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	if want := `class="unreachable",cause=~"` + strings.Join(causes, "|") + `"`; !strings.Contains(string(rules), want) {
		t.Errorf("no alert has %s", want)
	}
}
