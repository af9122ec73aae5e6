package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

var installBrowser = sync.OnceValue(func() error {
	return install("browser", "package-lock.json", "node_modules", "npm ci --no-audit --no-fund")
})

// startQuickstart runs examples/quickstart on free ports, and returns the
// balancer's URL.
func startQuickstart(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../examples/quickstart/Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	addresses, err := freeAddresses(5)
	if err != nil {
		t.Fatal(err)
	}
	config := string(text)
	for i, port := range []string{"2019", "8080", "9001", "9002", "9003"} {
		_, free, _ := net.SplitHostPort(addresses[i])
		config = strings.ReplaceAll(config, ":"+port, ":"+free)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := launch(t, file, "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	if err != nil {
		t.Fatal(err)
	}
	url := strings.Replace(addresses[1], "127.0.0.1", "http://localhost", 1)
	if err := p.await(func() error { return answers(url + "/status") }); err != nil {
		t.Fatal(err)
	}
	return url
}

// keepAsking does what the README's loop does, until the test ends. If served
// is set, each request has to be served.
func keepAsking(t *testing.T, url string, served bool) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		for ; ctx.Err() == nil; time.Sleep(200 * time.Millisecond) {
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions",
				strings.NewReader(`{"model":"gpt-4o","messages":[{"role":"user","content":"Hello"}]}`))
			if err != nil {
				t.Error(err)
				return
			}
			r.Header.Set("Content-Type", "application/json")
			res, err := http.DefaultClient.Do(r)
			if err != nil {
				continue // the test is over
			}
			if _, err := io.Copy(io.Discard, res.Body); err == nil && served && res.StatusCode != http.StatusOK {
				t.Errorf("a request got %s", res.Status)
			}
			res.Body.Close()
		}
	}()
	t.Cleanup(func() {
		stop()
		<-over
	})
}

// watched is what a browser saw of the page.
type watched struct {
	Name string
	Seen []struct{ Badge, Left string }
	// Live is what the page says of itself.
	Live string
	// Errors are those of scripts, Elsewhere what was asked for besides the
	// page, and Problems what axe-core found.
	Errors, Elsewhere, Problems []string
	// Sideways is by how much the page, or a table in it, is too wide.
	Sideways int
}

// left matches the time that the page shows of an active cooldown.
var left = regexp.MustCompile(`^(\d+) s left$|^due now$`)

// TestTheStatusPageShowsACooldownAndItsEnd watches the quickstart in a browser.
// With E2E_SCREENSHOTS=<folder> it leaves what it saw there.
func TestTheStatusPageShowsACooldownAndItsEnd(t *testing.T) {
	node, chromium := lookPath(t, "node"), lookPath(t, "chromium")
	if err := installBrowser(); err != nil {
		t.Fatal(err)
	}
	folder := cmp.Or(os.Getenv("E2E_SCREENSHOTS"), t.TempDir())
	url := startQuickstart(t)
	keepAsking(t, url, true)
	if os.Getenv("E2E_SCREENSHOTS") != "" {
		time.Sleep(30 * time.Second) // a picture of the page is of some traffic
	}
	var got struct {
		Watched []watched
		Plain   []string
	}
	runBrowser(t, &got, node, "browser/status.mjs", chromium, url+"/status", "ptu", folder)
	if len(got.Watched) != 5 || strings.Join(got.Plain, ", ") != "ptuweight 1, paygo-eastweight 3, paygo-westweight 1" {
		t.Errorf("got %+v", got)
	}
	for _, w := range got.Watched {
		w.check(t)
	}
}

// runBrowser runs a script that drives the browser, and reads what it prints.
func runBrowser(t *testing.T, into any, command ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	if err := json.Unmarshal(stdout.Bytes(), into); err != nil {
		t.Fatalf("%v: %s", err, &stdout)
	}
}

// checkPage checks what holds for the page whatever it shows.
func (w watched) checkPage(t *testing.T) {
	t.Helper()
	if w.Live != "Updating" || len(w.Errors)+len(w.Elsewhere)+len(w.Problems) > 0 || w.Sideways > 0 {
		t.Errorf("%s: %+v", w.Name, w)
	}
}

func (w watched) check(t *testing.T) {
	t.Helper()
	w.checkPage(t)
	coolingDown, back := false, false
	for _, s := range w.Seen {
		switch s.Badge {
		case "Cooling down":
			seconds := left.FindStringSubmatch(s.Left)
			if seconds == nil {
				t.Errorf("%s: a cooldown without a countdown: %q", w.Name, s.Left)
				continue
			}
			n, _ := strconv.Atoi(seconds[1])
			coolingDown = coolingDown || n >= 1
		case "Available":
			back = back || coolingDown
		}
	}
	if !coolingDown || !back {
		t.Errorf("%s: expected a cooldown with a countdown and its end, saw %+v", w.Name, w.Seen)
	}
}

// nights are what an operator may find at 3 am: the backends of a pool, what
// shows that the page knows of it, and what it then has to say.
var nights = []struct {
	name string
	// backends are the simulators. A backend without one is dead.
	simulators []string
	seen       string
	// notServed matches the first figure, and problems the list of problems.
	notServed string
	problems  []string
	sections  []string
}{
	{
		name:       "dead",
		simulators: []string{"", "", ""},
		seen:       "main:has(.figures .bad) .problems .bad",
		notServed:  `^100 % \d+ of \d+ requests$`,
		problems: []string{
			`^Needs action no backend is available: gpt-4o `,
			`^Retried ptu refuses connections unreachable: refused since `,
			`^Retried east refuses connections unreachable: refused since `,
			`^Retried west refuses connections unreachable: refused since `,
		},
		sections: []string{"no-backend-is-available", "502-upstream_unreachable", "502-upstream_unreachable", "502-upstream_unreachable"},
	},
	{
		name:       "throttled",
		simulators: []string{"api_key ptu-key\nptu 1\nbucket_seconds 0.1", "api_key east-key\nrequests_per_minute 6", "api_key west-key\nrequests_per_minute 6"},
		seen:       "main:has(.figures .bad) .problems .warn",
		notServed:  `^\d+(\.\d+)? % \d+ of \d+ requests$`,
		problems:   []string{`^Retried all backends throttle: gpt-4o `},
		sections:   []string{"all-backends-throttle"},
	},
	{
		name:       "refused",
		simulators: []string{"api_key another-key", "api_key east-key", "api_key west-key"},
		seen:       "main:has(.figures .good) .problems .bad",
		notServed:  `^0 % 0 of \d+ requests$`,
		problems:   []string{`^Needs action ptu refuses its key credential \(401\) since `},
		sections:   []string{"502-upstream_credentials_rejected"},
	},
}

// startNight runs a balancer with three backends, of which the first has
// priority 1, and returns its URL.
func startNight(t *testing.T, simulators []string) string {
	t.Helper()
	addresses, err := freeAddresses(len(simulators) + 1)
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf("{\nadmin off\nauto_https off\n}\nhttp://%s {\nopenai_lb_status /status\nopenai_lb /v1/* {\n", addresses[0])
	servers := ""
	for i, name := range []string{"ptu", "east", "west"} {
		config += fmt.Sprintf("backend http://%s {\nname %s\npriority %d\nauth api_key\napi_key %s-key\nmodel gpt-4o gpt-4o-%s\n}\n", addresses[i+1], name, min(i+1, 2), name, name)
		if simulators[i] != "" {
			servers += fmt.Sprintf("http://%s {\nopenai_simulator {\nname %s\n%s\n}\n}\n", addresses[i+1], name, simulators[i])
		}
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(config+"}\n}\n"+servers), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := launch(t, file, "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.await(func() error { return answers("http://" + addresses[0] + "/status") }); err != nil {
		t.Fatal(err)
	}
	return "http://" + addresses[0]
}

// answers asks for something, and reports whether there is an answer.
func answers(url string) error {
	res, err := http.Get(url)
	if err == nil {
		res.Body.Close()
	}
	return err
}

// TestTheStatusPageSaysWhatIsWrong looks at the page while no backend can
// serve, and while one needs an operator. With E2E_SCREENSHOTS=<folder> it
// leaves what it saw there.
func TestTheStatusPageSaysWhatIsWrong(t *testing.T) {
	node, chromium := lookPath(t, "node"), lookPath(t, "chromium")
	if err := installBrowser(); err != nil {
		t.Fatal(err)
	}
	for _, night := range nights {
		t.Run(night.name, func(t *testing.T) {
			folder := cmp.Or(os.Getenv("E2E_SCREENSHOTS"), t.TempDir())
			url := startNight(t, night.simulators)
			keepAsking(t, url, false)
			var looked []struct {
				watched
				Shown struct{ Figures, Problems, Links []string }
			}
			runBrowser(t, &looked, node, "browser/night.mjs", chromium, url+"/status", night.seen, folder, night.name)
			if len(looked) != 5 {
				t.Fatalf("got %+v", looked)
			}
			for _, l := range looked {
				l.checkPage(t)
				if len(l.Shown.Figures) == 0 || !matches(t, "Not served "+night.notServed[1:], l.Shown.Figures[0]) {
					t.Errorf("%s: got %q", l.Name, l.Shown.Figures)
				}
				if len(l.Shown.Problems) != len(night.problems) || len(l.Shown.Links) != len(night.problems) {
					t.Errorf("%s: got %q, %q", l.Name, l.Shown.Problems, l.Shown.Links)
					continue
				}
				for i, problem := range l.Shown.Problems {
					if !matches(t, night.problems[i], problem) || !strings.HasSuffix(l.Shown.Links[i], "/docs/troubleshooting.md#"+night.sections[i]) {
						t.Errorf("%s: got %q, %s", l.Name, problem, l.Shown.Links[i])
					}
				}
			}
		})
	}
}

// matches reports whether a text with single spaces matches.
func matches(t *testing.T, pattern, text string) bool {
	t.Helper()
	return regexp.MustCompile(pattern).MatchString(strings.Join(strings.Fields(text), " "))
}

// TestCallersAreSearchedWhileTheStatusPageUpdatesItself with the keyboard, and
// without JavaScript. With E2E_SCREENSHOTS=<folder> it leaves what it saw
// there.
func TestCallersAreSearchedWhileTheStatusPageUpdatesItself(t *testing.T) {
	node, chromium := lookPath(t, "node"), lookPath(t, "chromium")
	if err := installBrowser(); err != nil {
		t.Fatal(err)
	}
	addresses, err := freeAddresses(2)
	if err != nil {
		t.Fatal(err)
	}
	var callers strings.Builder
	for i := range 130 {
		fmt.Fprintf(&callers, "client_key team-%d %s\n", i, teamKey(i))
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, fmt.Appendf(nil, `{
admin off
auto_https off
}
http://%s {
openai_lb_status /status
openai_lb /v1/* {
backend http://%s {
auth none
}
%scaller * {
requests 1000/hour
tokens 5M/day
}
caller team-7 {
requests 2/day
}
}
}
http://%[2]s {
openai_simulator
}`, addresses[0], addresses[1], &callers), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := launch(t, file, "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + addresses[0]
	if err := p.await(func() error { return answers(url + "/status") }); err != nil {
		t.Fatal(err)
	}
	chat := func(ctx context.Context, team int) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(`{"model":"gpt-4o","messages":[]}`))
		if err != nil {
			return err
		}
		r.Header.Set("Authorization", "Bearer "+teamKey(team))
		r.Header.Set("Content-Type", "application/json")
		res, err := http.DefaultClient.Do(r)
		if err == nil {
			res.Body.Close()
		}
		return err
	}
	for i := range 130 {
		if err := chat(t.Context(), i); err != nil {
			t.Fatal(err)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	asking.Go(func() {
		for ctx.Err() == nil {
			_, _ = chat(ctx, 7), chat(ctx, 70)
			time.Sleep(100 * time.Millisecond)
		}
	})
	t.Cleanup(func() { stop(); asking.Wait() })
	type report struct {
		watched
		All, Loads, Reloaded int
		Found                struct {
			Text, Address, Summary string
			Callers                []string
		}
	}
	var got struct {
		Watched []report
		Plain   int
	}
	folder := cmp.Or(os.Getenv("E2E_SCREENSHOTS"), t.TempDir())
	runBrowser(t, &got, node, "browser/callers.mjs", chromium, url+"/status", "TEAM-7", "11", "team-70", folder)
	if len(got.Watched) != 2 || got.Plain != 11 {
		t.Errorf("got %+v", got)
	}
	for _, w := range got.Watched {
		w.checkPage(t)
		f := w.Found
		if w.All != 100 || w.Reloaded != 11 || w.Loads != 1 || f.Text != "TEAM-7" || f.Address != "?callers&search=TEAM-7" || f.Callers[0] != "team-7" ||
			!strings.HasPrefix(f.Summary, "11 found of 130 callers. In the last hour, ") || !strings.HasSuffix(f.Summary, " requests of 1 of them were refused.") {
			t.Errorf("%s: %+v", w.Name, w)
		}
	}
}

func teamKey(i int) string { return fmt.Sprintf("client-key-of-team-%03d", i) }
