package main

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestSmoke runs a scenario of each kind, as -quick does, with the contenders
// that need nothing but Go. Its counts must be right; its times mean nothing.
func TestSmoke(t *testing.T) {
	if testing.Short() {
		t.Skip("it starts many processes")
	}
	b := &bench{
		only:   regexp.MustCompile(`prompt of 2 KB|200 KB|stream of 50|idle|failover: twice|PTU.*0.5|brown-out|silence, 20 s|first event|beside`),
		rounds: 1, slice: 200 * time.Millisecond, streams: []int{10, 20},
		worthRounds: 1, worthRound: time.Second,
	}
	names := []string{ours, plain, bestRest, "httputil"}
	if err := b.run(names); err != nil {
		t.Fatal(err)
	}
	for _, problem := range b.report.problems {
		if who, _, _ := strings.Cut(problem, ":"); slices.Contains([]string{ours, "cost", "failover", "worth", "beside"}, who) {
			t.Error(problem)
		}
	}

	var titles []string
	for _, table := range b.report.tables {
		titles = append(titles, table.Title)
		for _, r := range table.Rows {
			checkRow(t, table, r)
		}
	}
	want := []string{
		"Cost: chat, prompt of 2 KB", "Cost: chat, prompt of 200 KB", "Cost: stream of 50 events", "Cost: chat over TLS, prompt of 2 KB", "Cost: idle streams",
		"Failover: twice", "Worth: PTU with a bucket of 0.5 s", "Worth: brown-out", "Worth: silence, 20 s", "Worth: errors as first event",
		"Beside: large prompts", "Beside: wrong keys",
	}
	if got, want := fmt.Sprint(titles), fmt.Sprint(want); got != want {
		t.Errorf("got the tables\n%s\nwant\n%s", got, want)
	}
	for _, name := range names {
		if b.report.versions[name] == "" {
			t.Errorf("no version of %s", name)
		}
	}
}

// checkRow checks what must hold of a row however fast the machine is.
func checkRow(t *testing.T, table *table, r row) {
	value := func(column string) float64 {
		for i, c := range table.Columns {
			if c.Name == column && len(r.Cells[i].Runs) > 0 {
				return r.Cells[i].Value
			}
		}
		t.Errorf("%s: %s has no %s", table.Title, r.Contender, column)
		return math.NaN()
	}
	wants := func(column string, want float64) {
		if got := value(column); math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %s of %s is %v, want %v", table.Title, column, r.Contender, got, want)
		}
	}
	kind, what, _ := strings.Cut(table.Title, ": ")
	silence := strings.HasPrefix(what, "silence") // whose clients leave in a short run
	switch {
	case kind == "Beside":
		if value("p50, times") <= 0 || value("others a second") <= 0 {
			t.Errorf("%s: %s was not measured: %+v", table.Title, r.Contender, r.Cells)
		}
		// Those of the first 401 are new if none came before: as many as the
		// buckets of some histograms, for all keys.
		if what == "wrong keys" && value("new time series") > 150 {
			t.Errorf("%s: %s has %v new time series", table.Title, r.Contender, value("new time series"))
		}
	case kind == "Failover" && r.Contender == ours:
		wants("served", 100)
		// Fewer: who comes while another one asks whether a bench is over.
		if calls := value("calls a request"); calls > 3 || calls < 2.5 {
			t.Errorf("%s: %v calls a request, want 3", table.Title, calls)
		}
	case kind == "Worth":
		wants("not served", value("of these: 429")+value("other errors")+value("gave up"))
		// Some are under way when the calls are counted.
		if calls := value("calls for each served"); !silence && (r.Contender == plain || r.Contender == "httputil") && (calls < .8 || calls > 1.25) {
			t.Errorf("%s: %v calls of %s for each request served, want about 1", table.Title, calls, r.Contender)
		}
		if r.Contender == ours && what != "errors as first event" && !silence {
			wants("served", 100)
		}
	case kind == "Cost" && what != "idle streams" && r.Contender != direct:
		if value("requests a second") <= 0 || value("CPU a request") < 0 {
			t.Errorf("%s: %s was not measured: %+v", table.Title, r.Contender, r.Cells)
		}
	}
}

func TestATableHasMediansAndRatiosOfTheSameRun(t *testing.T) {
	table := &table{
		Title: "Cost: nothing", Base: plain,
		Columns: []column{{Name: cpuColumn, Unit: "µs", Ratio: true, Better: "lower"}, {Name: "memory", Unit: "MB"}},
	}
	// The machine was slow in the second run.
	for _, cpu := range []float64{100, 300, 110} {
		table.add(plain, cpu, 5)
		table.add(ours, cpu*1.5, math.NaN())
	}
	table.finish()
	got := table.markdown()
	for _, want := range []string{
		"| caddy     |        110 (1.00) |", "| openai_lb |        165 (1.50) |          – |", "Not the best here is `openai_lb` in CPU a request (caddy: 110).",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

func TestTheIdealServesWhatIsPaidForAndNoMore(t *testing.T) {
	every := func(step, length time.Duration) (all []arrival) {
		for at := time.Duration(0); at < length; at += step {
			all = append(all, arrival{at: at})
		}
		return all
	}
	for _, c := range []struct {
		name        string
		deployments []deployment
		schedule    []arrival
		want        int
	}{
		{"three windows of 20 requests", []deployment{payg(15), payg(5)}, every(100*time.Millisecond, 30*time.Second), 60},
		{"fewer than the quota", []deployment{payg(15)}, every(time.Second, 10*time.Second), 10},
		// A bucket of two requests that is not full takes another one.
		{"a bucket and what leaks", []deployment{provisioned(1, 2), behind}, every(500*time.Millisecond, 10*time.Second), 12},
	} {
		got := 0
		for _, could := range (worthScenario{deployments: c.deployments}).ideal(c.schedule) {
			if could {
				got++
			}
		}
		if got != c.want {
			t.Errorf("%s: got %d, want %d", c.name, got, c.want)
		}
	}
}

func TestArrivalsAreTheSameForAll(t *testing.T) {
	one, other := arrivals(40, 1, time.Minute), arrivals(40, 1, time.Minute)
	for n, from := 0, time.Duration(0); from < time.Minute; from += window {
		before := n
		for n < len(one) && one[n].at < from+window {
			n++
		}
		if n-before != 400 {
			t.Errorf("got %d arrivals in the 10 s after %s, want 400", n-before, from)
		}
	}
	if fmt.Sprint(one) != fmt.Sprint(other) {
		t.Error("the second schedule differs from the first")
	}
	if bursts := arrivals(10, 25, time.Minute); len(bursts)%25 != 0 || bursts[0].at != bursts[24].at {
		t.Errorf("got %d arrivals, want bursts of 25", len(bursts))
	}
}

func TestAGapIsTheTimeFromA429ToAnotherBackend(t *testing.T) {
	b := new(backends)
	b.behaviour.Store(&behaviour{Reply: replyChat, Refusing: 2, Refusal: refuseThrottle})
	call := func(n int) {
		w := httptest.NewRecorder()
		b.answer(n, w, httptest.NewRequest("POST", "/", strings.NewReader(`{"model":"m"}`)))
		if want := map[bool]int{true: 429, false: 200}[n < 2]; w.Code != want {
			t.Fatalf("backend %d: got %d, want %d", n, w.Code, want)
		}
	}
	for _, c := range []struct {
		about string
		calls []int
		gaps  int
	}{
		{"a request that fails over twice", []int{0, 1, 2}, 2},
		{"one that its client sends again", []int{0, 0}, 0},
		{"one that another one follows", []int{0, 2, 2}, 1},
	} {
		b.refused, b.gaps = time.Time{}, nil
		for _, n := range c.calls {
			call(n)
		}
		if len(b.gaps) != c.gaps || slices.ContainsFunc(b.gaps, func(gap time.Duration) bool { return gap < 0 }) {
			t.Errorf("%s: got the gaps %v, want %d", c.about, b.gaps, c.gaps)
		}
	}
	if got := *b.model.Load(); got != "m" {
		t.Errorf("got the model %q", got)
	}
}

// Others of its fields are those of Bifrost's schema,
// transports/config.schema.json.
func TestBifrostHasAKeyForEachBackendAndNamesItsProvider(t *testing.T) {
	n := slices.IndexFunc(contenders, func(c contender) bool { return c.name == "bifrost" })
	bifrost := contenders[n]
	t.Setenv(bifrostHTTP, "")
	if _, err := bifrost.ready(tools{}); err == nil || !strings.Contains(err.Error(), bifrostHTTP) {
		t.Errorf("without the program: %v", err)
	}
	s := setup{Dir: t.TempDir(), Address: "127.0.0.1:1234", Key: backendKey, HeaderTimeout: 30,
		Backends: []upstream{newUpstream("127.0.1.1", 80, 1), newUpstream("127.0.1.2", 80, 1)}}
	if err := bifrost.configure(s); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(s.Dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Providers struct {
			Azure struct {
				Keys []struct {
					Name, Value string
					Azure       struct{ Endpoint string } `json:"azure_key_config"`
				}
			}
		}
	}
	if err := json.Unmarshal(text, &config); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	keys := config.Providers.Azure.Keys
	if len(keys) != 2 || keys[0].Name == keys[1].Name || keys[1].Value != backendKey || keys[1].Azure.Endpoint != "http://127.0.1.2:80" {
		t.Errorf("got %+v", keys)
	}
	r := &running{contender: bifrost, setup: s}
	if body := (closedLoop{body: chatRequest(10, false)}).of(r).body; !strings.HasPrefix(body, `{"model":"azure/gpt-4o",`) {
		t.Errorf("got %s", body)
	}
}

// Each of these is a key that no cache has.
func TestEachRequestOfAFloodHasAnotherKey(t *testing.T) {
	var mu sync.Mutex
	keys := make(map[string]int)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		keys[r.Header.Get("Authorization")]++
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer server.Close()
	load := closedLoop{address: server.Listener.Addr().String(), clients: 2, varies: wrongKey, headers: map[string]string{"Authorization": "Bearer sk-" + wrongKey}}
	result := load.run(50 * time.Millisecond)
	if result.failed < 2 || len(keys) != result.failed || keys["Bearer sk-"+wrongKey] > 0 {
		t.Errorf("%d refusals of %d keys", result.failed, len(keys))
	}
}

func TestAReportIsThereAfterEachTable(t *testing.T) {
	b := &bench{report: newReport(t.TempDir())}
	b.report.print(&table{Title: "Cost: something"})
	b.problem("cost: another thing: it broke")
	b.report.print(&table{Title: "Cost: a third thing"})
	text, err := os.ReadFile(filepath.Join(b.report.dir, "cost.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"# Cost\n", "## Cost: something", "- Note: cost: another thing: it broke", "## Cost: a third thing"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestARunOfOneSectionLeavesTheFilesOfTheOthers(t *testing.T) {
	dir := t.TempDir()
	for _, run := range [][]string{{"Cost: one", "Worth: one"}, {"Worth: two"}} {
		r := newReport(dir)
		for _, title := range run {
			r.print(&table{Title: title})
		}
	}
	for file, want := range map[string]string{"cost.md": "## Cost: one", "worth.md": "## Worth: two"} {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil || !strings.Contains(string(text), want) || strings.Contains(string(text), "Worth: one") {
			t.Errorf("%s: %v\n%s", file, err, text)
		}
	}
}

// The table of the README has figures of the files that its rows link to.
func TestTheReadmeHasTheFiguresOfTheResults(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	rows := 0
	for line := range strings.Lines(string(readme)) {
		cells := strings.Split(strings.Trim(line, "| \n"), " | ")
		link := regexp.MustCompile(`\(results/(\w+\.md)#([\w-]+)\)`).FindStringSubmatch(cells[0])
		switch {
		case cells[0] == "question":
			names = cells[1:]
		case len(cells) > 1 && link != nil:
			rows++
			got := resultsOf(t, link[1], link[2])
			for i, figure := range cells[1:] {
				if figure != "–" && !slices.Contains(got[names[i]], figure) {
					t.Errorf("%s: %s of %s is not in %s: %v", cells[0], figure, names[i], link[1], got[names[i]])
				}
			}
		}
	}
	if rows < 10 {
		t.Errorf("found %d rows with figures", rows)
	}
}

// resultsOf returns the figures of each contender in a table of a file, without
// ratios.
func resultsOf(t *testing.T, file, anchor string) map[string][]string {
	text, err := os.ReadFile(filepath.Join("results", file))
	if err != nil {
		t.Fatal(err)
	}
	figures := make(map[string][]string)
	for section := range strings.SplitSeq(string(text), "\n## ") {
		title, rest, _ := strings.Cut(section, "\n")
		slug := strings.ReplaceAll(strings.ToLower(regexp.MustCompile(`[^\w -]`).ReplaceAllString(title, "")), " ", "-")
		for line := range strings.Lines(rest) {
			if cells := strings.Split(line, "|"); slug == anchor && len(cells) > 2 {
				for _, cell := range cells[2:] {
					figure, _, _ := strings.Cut(strings.TrimSpace(cell), " ")
					name := strings.TrimSpace(cells[1])
					figures[name] = append(figures[name], figure)
				}
			}
		}
	}
	return figures
}
