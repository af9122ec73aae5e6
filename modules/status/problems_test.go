package status

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

func TestAReplicaThatIsNotConnectedIsAProblemOfThePoolsThatShareItsEngine(t *testing.T) {
	for pool, want := range map[string][]string{"llm": {NotInTouch}, "alone": nil} {
		for connected, want := range map[bool][]string{false: want, true: nil} {
			var got []string
			for _, p := range (Pool{Name: pool}).Problems(time.Now(), nil, []seam.EngineStatus{{InTouch: connected, Pools: []string{"llm"}}}) {
				got = append(got, p.Class)
				if p.NeedsOperator || p.Models == nil || !strings.HasSuffix(p.RunbookURL, "#a-replica-is-not-connected") {
					t.Errorf("the problem is %+v", p)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("the pool %s of a replica that is connected, %t, has the problems %q, want %q", pool, connected, got, want)
			}
		}
	}
}

func TestEachProblemLeadsToASectionThatExists(t *testing.T) {
	page, err := os.ReadFile("../../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]bool{"many-requests-fail": false}
	for section := range maps.Values(runbooks) {
		sections[section] = false
	}
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(string(page), -1) {
		name := strings.ReplaceAll(strings.ToLower(heading[1]), " ", "-")
		sections[regexp.MustCompile(`[^\p{L}\p{N}_-]`).ReplaceAllString(name, "")] = true
	}
	for section, there := range sections {
		if !there {
			t.Errorf("docs/troubleshooting.md has no section %s", section)
		}
	}
	// What the page of docs says to do about a class is what the status page
	// leads to.
	rows := regexp.MustCompile("(?m)^\\| (`[a-z_`, ]+) \\| \\[[^\\]]*\\]\\(#([^)]+)\\)").FindAllStringSubmatch(string(page), -1)
	if len(rows) < 10 {
		t.Errorf("the table of classes has %d rows", len(rows))
	}
	for _, row := range rows {
		for class := range strings.SplitSeq(strings.ReplaceAll(row[1], "`", ""), ", ") {
			// a cooldown for a throttle does not mean that all backends
			// throttle
			if got := RunbookURL(class); got != Troubleshooting+"#"+row[2] && class != "throttled" {
				t.Errorf("%s leads to %s, want %s", class, got, row[2])
			}
		}
	}
	if got := RunbookURL("caller_limited"); got != Troubleshooting+"#callers-get-errors" {
		t.Errorf("caller_limited leads to %q", got)
	}
	for _, class := range []string{"served", "client_error"} {
		if url := RunbookURL(class); url != "" {
			t.Errorf("%s leads to %s", class, url)
		}
	}
}

// TestABackendHasOneProblemAtATimeWhileItRecovers has what is known of a
// backend that was silent, then gone, and comes back step by step.
func TestABackendHasOneProblemAtATimeWhileItRecovers(t *testing.T) {
	whole := func(class, cause string, needs bool) Cooldown {
		return Cooldown{Scope: BackendScope, Class: class, Cause: cause, NeedsOperator: needs}
	}
	ofModel := func(class, model string) Cooldown {
		return Cooldown{Scope: ModelScope, Class: class, Model: model, Deployment: model}
	}
	silent := []Silence{{Model: "gpt", Deployment: "gpt"}, {Model: "mini", Deployment: "mini", Slow: true}}
	for _, tt := range []struct {
		b    Backend
		want []string
	}{
		{Backend{Silences: silent, Cooldowns: []Cooldown{whole("unreachable", "refused", false)}}, []string{"unreachable []"}},
		{Backend{Silences: silent, Cooldowns: []Cooldown{whole("unreachable", "certificate", true)}}, []string{"unreachable []"}},
		{Backend{Silences: silent}, []string{"unhealthy []"}},
		{Backend{Cooldowns: []Cooldown{whole("unreachable", "refused", false)}}, []string{"unreachable []"}},
		{Backend{Healthy: true, Silences: silent}, []string{"silent [gpt]", "slow [mini]"}},
		{Backend{Healthy: true, Silences: silent, Cooldowns: []Cooldown{ofModel("timeout", "gpt"), ofModel("timeout", "other")}},
			[]string{"silent [gpt]", "slow [mini]", "timeout [other]"}},
		{Backend{Healthy: true, Silences: silent[:1], Due: []Cooldown{whole("credential", "401", true)}}, []string{"silent [gpt]", "credential []"}},
		{Backend{Due: []Cooldown{whole("credential", "401", true)}, Cooldowns: []Cooldown{whole("unreachable", "refused", false)}},
			[]string{"unreachable []", "credential []"}},
	} {
		var list problemList
		tt.b.Name = "a"
		list.addBackend(tt.b)
		var got []string
		for _, p := range list {
			got = append(got, fmt.Sprint(p.Class, " ", p.Models))
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%+v has the problems %q, want %q", tt.b, got, tt.want)
		}
		var lines problemLines
		if lines.addBackend(tt.b); slices.ContainsFunc(lines.others, func(line string) bool { return strings.Contains(line, "is silent since") }) != slices.Contains(got, "silent [gpt]") {
			t.Errorf("%+v has the lines %q", tt.b, lines.others)
		}
	}
}

func TestAProblemSaysWhyInWords(t *testing.T) {
	for want, p := range map[string]Problem{
		"has a certificate that is not accepted: it expired at 2026-03-01T03:04:05Z": {Backend: "a", Class: "unreachable", Cause: "certificate", Detail: "it expired at 2026-03-01T03:04:05Z"},
		"has a certificate that is not accepted":                                     {Backend: "a", Class: "unreachable", Cause: "certificate"},
		"not saved: the journal of the bill, in /data/caddy":                         {Class: NotWritten, Cause: "journal", Detail: "/data/caddy"},
		"not saved: the use of limits, in Caddy's storage":                           {Class: NotWritten, Cause: "limits"},
		"could not reload: client keys":                                              {Class: StaleSecret, Cause: "client keys"},
	} {
		var list problemList
		if list.add(p); list[0].Meaning != want || !list[0].NeedsOperator {
			t.Errorf("got %+v, want %q", list[0], want)
		}
	}
	// another replica may know more
	var list problemList
	list.add(Problem{Backend: "a", Class: "unreachable", Cause: "certificate"})
	list.add(Problem{Backend: "a", Class: "unreachable", Cause: "certificate", Detail: "it expired"})
	if len(list) != 1 || list[0].Meaning != "has a certificate that is not accepted: it expired" {
		t.Errorf("the problems are %+v", list)
	}
}

// TestEachProblemThatNeedsAPersonHasAnAlertThatLeadsToTheSameSection compares
// the table with the alerts.
func TestEachProblemThatNeedsAPersonHasAnAlertThatLeadsToTheSameSection(t *testing.T) {
	rules, err := os.ReadFile("../../examples/prometheus/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range slices.Concat(verdict.Remedies, verdict.PoolRemedies) {
		if r.Alert == "" {
			if r.NeedsOperator {
				t.Errorf("%s %s needs a person, and has no alert", r.Class, r.Cause)
			}
			continue
		}
		_, its, found := strings.Cut(string(rules), "- alert: "+r.Alert+"\n")
		its, _, _ = strings.Cut(its, "- alert: ")
		if !found || strings.Contains(its, "severity: info") || !strings.Contains(its, "runbook_url: "+RunbookURL(string(r.Class))+"\n") {
			t.Errorf("%s %s leads to %s, its alert %s is\n%s", r.Class, r.Cause, RunbookURL(string(r.Class)), r.Alert, its)
		}
	}
}
