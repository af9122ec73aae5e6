package status

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

func TestAReplicaThatIsNotConnectedIsAProblemOfThePoolsThatShareItsEngine(t *testing.T) {
	for pool, want := range map[string][]string{"llm": {NotInTouch}, "alone": nil} {
		for connected, want := range map[bool][]string{false: want, true: nil} {
			var got []string
			for _, p := range (Pool{Name: pool}).Problems(time.Now(), nil, []replicas.Status{{InTouch: connected, Pools: []string{"llm"}}}) {
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
