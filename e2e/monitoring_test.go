package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/url"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

const dashboard = "../examples/grafana/openai-lb.json"

// board is what a test needs of a dashboard.
type board struct {
	SchemaVersion int     `json:"schemaVersion"`
	Panels        []panel `json:"panels"`
	Templating    struct {
		List []struct {
			Name       string `json:"name"`
			Type       string `json:"type"`
			Definition string `json:"definition"`
			AllValue   string `json:"allValue"`
		} `json:"list"`
	} `json:"templating"`
}

type panel struct {
	ID          int    `json:"id"`
	Type        string `json:"type"`
	Title       string `json:"title"`
	Description string `json:"description"`
	GridPos     struct{ H, W, X, Y int }
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
	Targets []struct {
		Expr       string         `json:"expr"`
		Datasource map[string]any `json:"datasource"`
	} `json:"targets"`
}

func readBoard(t *testing.T) (b board) {
	t.Helper()
	if err := json.Unmarshal(readFile(t, dashboard), &b); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEachPanelSaysWhatItShows(t *testing.T) {
	t.Parallel()
	ids := make(map[int]bool)
	taken := make(map[[2]int]string)
	for _, p := range readBoard(t).Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the id %d", p.ID)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("%q has the place of %q, or is outside", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Title == "" || !strings.HasSuffix(p.Description, ".") || p.FieldConfig.Defaults.Unit == "" || len(p.Targets) == 0 {
			t.Errorf("the panel %d %q has no title, description, unit or query", p.ID, p.Title)
		}
		for _, target := range p.Targets {
			if target.Datasource["uid"] != "${datasource}" {
				t.Errorf("%q asks %v, and not the chosen data source", p.Title, target.Datasource)
			}
			if !strings.Contains(target.Expr, `pool=~"$pool"`) && !strings.Contains(target.Expr, stateMetrics) {
				t.Errorf("%q does not mind the chosen pool: %s", p.Title, target.Expr)
			}
		}
	}
}

// stateMetrics begins the names of the metrics of replicas, which have no pool.
const stateMetrics = "caddy_openai_lb_state_"

// TestEachPanelShowsDataOfARealRun runs examples/compose without containers.
func TestEachPanelShowsDataOfARealRun(t *testing.T) {
	t.Parallel()
	tool(t, "prometheus")
	c := startComposed(t)
	c.send(t)
	b := readBoard(t)
	values := []string{"$__rate_interval", "5s", "$__range", "1m"}
	missing := make(map[string]func() bool)
	for _, v := range b.Templating.List {
		if v.Type != "query" {
			continue
		}
		values = append(values, "$"+v.Name, v.AllValue)
		query := regexp.MustCompile(`^label_values\((.+), (\w+)\)$`).FindStringSubmatch(v.Definition)
		if query == nil {
			t.Fatalf("the variable %s asks for %s", v.Name, v.Definition)
		}
		selector := strings.NewReplacer(values...).Replace(query[1])
		missing["the variable "+v.Name] = func() bool {
			var labels []string
			c.ask(t, "label/"+query[2]+"/values", url.Values{"match[]": {selector}}, &labels)
			return len(slices.DeleteFunc(labels, func(l string) bool { return l == "" })) > 0
		}
	}
	if len(values) != 12 {
		t.Errorf("the dashboard has other variables than expected: %q", values)
	}
	fill := strings.NewReplacer(values...)
	for _, p := range b.Panels {
		for _, target := range p.Targets {
			if strings.Contains(target.Expr, stateMetrics) {
				continue // a test of modules/replicas compares them with the code
			}
			query := fill.Replace(target.Expr)
			missing[fmt.Sprintf("the panel %q: %s", p.Title, query)] = func() bool { return c.hasData(t, query) }
		}
	}
	c.await(t, missing)
	c.wantMetricsThatPromtoolLikes(t)
	c.wantRules(t)
}

// await waits until all that is missing was there once.
func (c *composed) await(t *testing.T, missing map[string]func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); len(missing) > 0 && time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		maps.DeleteFunc(missing, func(_ string, isThere func() bool) bool { return isThere() })
	}
	for what := range missing {
		t.Errorf("Prometheus does not have %s", what)
	}
}

// ask asks Prometheus.
func (c *composed) ask(t *testing.T, what string, parameters url.Values, data any) {
	t.Helper()
	res, body := get(t, c.prometheus+"/api/v1/"+what+"?"+parameters.Encode())
	reply := struct{ Data any }{data}
	if err := json.Unmarshal([]byte(body), &reply); err != nil || res.StatusCode != 200 {
		t.Fatalf("%s %v: %d %s (%v)", what, parameters, res.StatusCode, body, err)
	}
}

// hasData reports whether a query has a result that is a number.
func (c *composed) hasData(t *testing.T, query string) bool {
	t.Helper()
	var data struct{ Result []struct{ Value [2]any } }
	c.ask(t, "query", url.Values{"query": {query}}, &data)
	for _, series := range data.Result {
		value, err := strconv.ParseFloat(series.Value[1].(string), 64)
		if err == nil && !math.IsNaN(value) && !math.IsInf(value, 0) {
			return true
		}
	}
	return false
}

// wantMetricsThatPromtoolLikes has promtool judge ours, not those of Go and
// Caddy.
func (c *composed) wantMetricsThatPromtoolLikes(t *testing.T) {
	t.Helper()
	_, page := get(t, c.metrics)
	cmd := exec.Command(tool(t, "promtool"), "check", "metrics")
	cmd.Stdin = strings.NewReader(page)
	output, err := cmd.CombinedOutput()
	if err != nil && !strings.Contains(err.Error(), "exit status 3") { // there is something to improve
		t.Fatalf("%v: %s", err, output)
	}
	for line := range strings.Lines(string(output)) {
		if strings.Contains(line, "openai_lb") {
			t.Errorf("promtool says: %s", line)
		}
	}
}

// wantRules checks that Prometheus evaluates all rules, and notices that the
// balancer is down.
func (c *composed) wantRules(t *testing.T) {
	t.Helper()
	states := func() map[string]string {
		var data struct {
			Groups []struct {
				Rules []struct{ Name, Type, Health, LastError, State string }
			}
		}
		c.ask(t, "rules", nil, &data)
		names := make(map[string]string)
		for _, group := range data.Groups {
			for _, rule := range group.Rules {
				if rule.LastError != "" {
					t.Errorf("the rule %s: %s", rule.Name, rule.LastError)
				}
				if rule.Health == "ok" {
					names[rule.Name] = rule.State
				}
			}
		}
		return names
	}
	rules := regexp.MustCompile(`- (?:alert|record): (\S+)`).FindAllSubmatch(readFile(t, alerts), -1)
	c.await(t, map[string]func() bool{"all rules": func() bool { return len(states()) == len(rules) }})
	if state := states()["OpenAILBDown"]; state != "inactive" {
		t.Errorf("OpenAILBDown is %s while the balancer runs", state)
	}
	c.balancer.stop(t)
	c.await(t, map[string]func() bool{"an alert that the balancer is down": func() bool { return states()["OpenAILBDown"] == "pending" }})
}
