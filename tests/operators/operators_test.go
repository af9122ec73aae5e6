package operators

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// everyBackend tells how all backends are.
func everyBackend() []status.Backend {
	return status.Backends(time.Now(), func(string) bool { return true })
}

// states are the backends by name, with their states and worst cooldowns.
func states() map[string]string {
	states := make(map[string]string)
	for _, b := range everyBackend() {
		states[b.Name] = strings.TrimSpace(fmt.Sprintf("%s %s %s %dms", b.State, b.Class, b.Model, b.RemainingMs))
	}
	return states
}

func TestAResetForgetsWhatABackendLacks(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Says(404, `{"detail":"Not Found"}`))
		for range 2 {
			w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
		}
		w.WantCalls(map[string]int{"a": 1, "b": 2})
		w.Backends["a"].Recovers()
		for _, route := range (status.API{}).Routes() {
			if strings.HasSuffix(route.Pattern, "/backends/{name}/{order}") {
				r := httptest.NewRequest(http.MethodPost, "/openai_lb/backends/a/reset", nil)
				r.SetPathValue("name", "a")
				r.SetPathValue("order", "reset")
				if err := route.Handler.ServeHTTP(httptest.NewRecorder(), r); err != nil {
					t.Fatal(err)
				}
			}
		}
		w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a")
	})
}

func TestOperatorsSeeTheStateOfEachBackend(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a {
			weight 3
			max_requests 7
		}
		backend http://b {
			priority 2
		}
	}`, func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("7"))
		w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
		time.Sleep(1500 * time.Microsecond)
		got := everyBackend()
		since, until := got[0].Cooldowns[0].Since, got[0].Cooldowns[0].Until
		if until.Sub(since) != 7*time.Second || got[0].Until == nil || !got[0].Until.Equal(until) || !got[0].LastError.Time.Equal(since) {
			t.Errorf("got %+v", got[0])
		}
		// what was counted is that of all tests of this process
		b := &got[0]
		b.Requests, b.Attempts, b.Throttles, b.Failures, b.Failovers, b.Tokens = 0, 0, 0, 0, 0, 0
		text, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		from, to := since.Format(time.RFC3339Nano), until.Format(time.RFC3339Nano)
		want := `{"pool":"openai_lb","name":"a","priority":1,"weight":3,"state":"cooling_down",` +
			`"class":"throttled","model":"gpt-4o","deployment":"gpt-4o","until":"` + to + `","remaining_ms":6999,` +
			`"in_flight":0,"max_requests":7,"healthy":true,"requests":0,"attempts":0,"throttles":0,"failures":0,"failovers":0,"tokens":0,"drain":null,` +
			`"last_error":{"class":"throttled","status":429,"cause":"","detail":"","model":"gpt-4o","deployment":"gpt-4o","time":"` + from + `"},` +
			`"cooldowns":[{"scope":"model","model":"gpt-4o","deployment":"gpt-4o","class":"throttled","status":429,"hint":"retry-after","cause":"","detail":"",` +
			`"since":"` + from + `","until":"` + to + `","remaining_ms":6999,"until_reached":false,"needs_operator":false}],"silences":[],"untried":[],"due":[]}`
		if string(text) != want {
			t.Errorf("got  %s\nwant %s", text, want)
		}
		if got[1].State != status.Available || got[1].Cooldowns == nil || got[1].Until != nil {
			t.Errorf("got %+v", got[1])
		}
	})
}

func TestOperatorsSeeWhatTheMetricsHaveCounted(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\npool "+lbtest.Unique("counted")+"\nbackend http://a\nbackend http://b {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Throttled("7"))
		w.Backends["b"].Replies(lbtest.Says(200, `{"usage":{"prompt_tokens":12,"completion_tokens":3}}`))
		for range 2 {
			w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
		}
		var got []string
		for _, b := range everyBackend() {
			got = append(got, fmt.Sprint(b.Name, b.Requests, b.Attempts, b.Throttles, b.Failures, b.Failovers, b.Tokens))
		}
		if want := []string{"a0 1 1 0 1 0", "b2 2 0 0 0 30"}; !reflect.DeepEqual(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

func TestABackendIsDrainedRatherThanCoolingDownRatherThanProbing(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		want := func(state string) {
			t.Helper()
			if got := states()["a"]; got != state {
				t.Errorf("a is %q, want %q", got, state)
			}
		}
		a := pools.Default.Entries()[0].Pool.Members[0]
		want("available   0ms")
		w.Backends["a"].Replies(status500("model-1"))
		w.Post(`{"model":"model-1"}`)
		want("cooling_down failed model-1 10000ms")
		time.Sleep(4 * time.Second)
		w.Post(`{"model":"model-2"}`).WantServed(t, "a")
		w.Backends["a"].Replies(lbtest.Throttled("8"))
		w.Post(`{"model":"model-2"}`)
		want("cooling_down throttled model-2 8000ms") // it ends last
		w.Backends["a"].Replies(lbtest.Status(401))
		w.Post(`{"model":"model-3"}`)
		want("cooling_down credential  60000ms") // for the whole backend
		a.Drain(pool.Order{})
		want("drained credential  60000ms")
		time.Sleep(time.Minute)
		want("drained   0ms")
		a.Resume(pool.Order{})
		want("probing   0ms")
		w.Backends["a"].Recovers()
		for n := range 3 {
			w.Post(fmt.Sprintf(`{"model":"model-%d"}`, n+1)).WantServed(t, "a")
		}
		want("available   0ms")
		w.Backends["a"].Replies(lbtest.Throttled("8"))
		w.Post(`{"model":"model-2"}`)
		want("cooling_down throttled model-2 8000ms")
		a.Reset(pool.Order{})
		want("available   0ms")
		if last := everyBackend()[0].LastError; last.Class != "throttled" || last.Status != 429 {
			t.Errorf("the last error is %+v", last)
		}
	})
}

// status500 fails the requests for a model and serves others.
func status500(model string) http.HandlerFunc {
	served := 0
	return func(w http.ResponseWriter, r *http.Request) {
		if served++; served == 1 {
			lbtest.Status(500)(w, r)
			return
		}
		lbtest.Says(200, `{"model":"`+model+`"}`)(w, r)
	}
}

// operated runs Caddy with an admin API and three backends in two pools.
type operated struct {
	t         *testing.T
	admin     string
	caddyfile string
	address   string
	client    *http.Client
	b         *lbtest.Backend
}

func newOperated(t *testing.T) *operated {
	t.Helper()
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	port, admin := lbtest.FreePort(t), lbtest.FreePort(t)
	o := &operated{t: t, admin: fmt.Sprintf("127.0.0.1:%d", admin), address: fmt.Sprintf("http://127.0.0.1:%d", port), client: lbtest.NewClient(t), b: b}
	o.caddyfile = fmt.Sprintf(`{
		admin %s
		auto_https off
		default_bind 127.0.0.1
	}
	:%d {
		header X-Config 1
		openai_lb /v1/* {
			backend %s {
				name "team/a b"
				api_key sk-of-a
				priority 2
			}
			backend %s {
				name b
				api_key sk-of-b
			}
		}
		openai_lb /other/* {
			pool other
			backend %s {
				name b
				api_key sk-of-another
			}
		}
	}`, o.admin, port, serverA.URL, serverB.URL, serverB.URL)
	a.Replies(lbtest.Throttled("60"))
	lbtest.Run(t, o.caddyfile)
	t.Cleanup(func() { // Caddy's admin API would outlive the test
		if err := caddy.Load([]byte(`{"admin":{"disabled":true}}`), true); err != nil {
			t.Error(err)
		}
	})
	return o
}

// call asks the admin API.
func (o *operated) call(method, path string) lbtest.Reply {
	o.t.Helper()
	r, err := http.NewRequestWithContext(o.t.Context(), method, "http://"+o.admin+path, http.NoBody)
	if err != nil {
		o.t.Fatal(err)
	}
	res, err := o.client.Do(r)
	if err != nil {
		o.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return lbtest.Reply{Status: res.StatusCode, Header: res.Header, Body: string(body), Err: err}
}

// backends are what it answers, as `pool/name state`.
func (o *operated) backends(method, path string) (backends []string) {
	o.t.Helper()
	got := o.call(method, path)
	var list []status.Backend
	if err := json.Unmarshal([]byte(got.Body), &list); err != nil || got.Status != http.StatusOK || got.Header.Get("Content-Type") != "application/json" {
		o.t.Fatalf("%s %s: got %d %v %s (%v, %v)", method, path, got.Status, got.Header, got.Body, got.Err, err)
	}
	for _, b := range list {
		backends = append(backends, b.Pool+" "+b.Name+" "+b.State)
	}
	return backends
}

// command runs `caddy openai-lb`.
func (o *operated) command(args ...string) (output string, err error) {
	var out bytes.Buffer
	err = runCommand(&out, append(args, "--address", o.admin)...)
	return out.String(), err
}

// runCommand runs `caddy openai-lb`, as Caddy does.
func runCommand(out io.Writer, args ...string) error {
	command := cobra.Command{SilenceUsage: true}
	caddycmd.Commands()["openai-lb"].CobraFunc(&command)
	command.SetOut(out)
	command.SetErr(out)
	command.SetArgs(args)
	return command.Execute()
}

func (o *operated) want(got []string, want ...string) {
	o.t.Helper()
	if !reflect.DeepEqual(got, want) {
		o.t.Errorf("got %q, want %q", got, want)
	}
}

const atBackends = "/openai_lb/backends"

func TestTheAdminAPIDrainsResumesAndResets(t *testing.T) {
	o := newOperated(t)
	o.want(o.backends("GET", atBackends), "other b available", "openai_lb b available", "openai_lb team/a b available")
	o.want(o.backends("POST", atBackends+"/b/drain"), "other b drained", "openai_lb b drained")
	lbtest.Ask(o.client, o.address+"/v1/chat/completions").WantServed(t, "b") // a throttles, and b is the last one left
	o.want(o.backends("GET", atBackends+"?pool=openai_lb"), "openai_lb b drained", "openai_lb team/a b cooling_down")
	o.want(o.backends("POST", atBackends+"/team%2Fa%20b/reset?pool=openai_lb"), "openai_lb team/a b available")
	o.want(o.backends("POST", atBackends+"/b/resume?pool=other"), "other b available")

	lbtest.Reload(t, strings.Replace(o.caddyfile, "X-Config 1", "X-Config 2", 1))
	o.want(o.backends("GET", atBackends), "other b available", "openai_lb b drained", "openai_lb team/a b available")
	o.want(o.backends("POST", atBackends+"/b/resume"), "other b available", "openai_lb b available")
}

func TestTheAdminAPIRefusesWhatItCannotDo(t *testing.T) {
	o := newOperated(t)
	for _, c := range []struct {
		method, path string
		status       int
		allow, says  string
	}{
		{"POST", "", 405, "GET, HEAD", "method POST is not allowed here, only GET, HEAD"},
		{"DELETE", "/b/drain", 405, "POST", "method DELETE is not allowed here, only POST"},
		{"GET", "/b/reset", 405, "POST", "method GET is not allowed here, only POST"},
		{"POST", "/b/stop", 404, "", "'stop' is not one of drain, resume, reset"},
		{"POST", "/c/drain", 404, "", "no backend is called 'c': there are b, team/a b"},
		{"POST", "/team%2Fa%20b/drain?pool=other", 404, "", "no backend is called 'team/a b' in the pool 'other': there are b"},
		{"POST", "/b/drain?pool=third", 404, "", "no pool is called 'third': there are other, openai_lb"},
		{"GET", "?pool=third", 404, "", "no pool is called 'third': there are other, openai_lb"},
		{"POST", "/b/drain?pol=other", 400, "", "query parameter 'pol': expected at most one of each of pool, by, reason"},
		{"POST", "/b/drain?pool=other&pool=openai_lb", 400, "", "query parameter 'pool': expected at most one of each of pool, by, reason"},
		{"POST", "/b/drain?reason=" + strings.Repeat("r", 257), 400, "", "query parameter reason is longer than 256 bytes"},
		{"POST", "/b/drain?by=a%0Ab", 400, "", "query parameter by must contain only printable characters"},
		{"GET", "?by=a", 400, "", "query parameter 'by': expected at most one of each of pool, replica"},
		{"GET", "?pool=%zz", 400, "", `the query cannot be read: invalid URL escape "%zz"`},
	} {
		got := o.call(c.method, atBackends+c.path)
		var said struct{ Error string }
		err := json.Unmarshal([]byte(got.Body), &said)
		if err != nil || got.Status != c.status || got.Header.Get("Allow") != c.allow || said.Error != c.says {
			t.Errorf("%s %s: got %d, Allow %q, %s", c.method, c.path, got.Status, got.Header.Get("Allow"), got.Body)
		}
	}
	o.want(o.backends("GET", atBackends), "other b available", "openai_lb b available", "openai_lb team/a b available")
	if got := o.call("HEAD", atBackends); got.Status != 200 || got.Body != "" {
		t.Errorf("HEAD gets %d %q", got.Status, got.Body)
	}
	if got := o.call("GET", atBackends); strings.Contains(got.Body, "sk-of") {
		t.Errorf("a key is in %s", got.Body)
	}
}

func TestTheCommandShowsBackendsAndGivesOrders(t *testing.T) {
	o := newOperated(t)
	for _, c := range []struct {
		args string
		want []string
	}{
		{"status", []string{"other b 1 1 available", "openai_lb b 1 1 available", "openai_lb team/a b 2 1 available"}},
		{"status --pool other", []string{"other b 1 1 available"}},
		{"drain b --pool other", []string{"other b 1 1 drained"}},
		{"drain b", []string{"other b 1 1 drained", "openai_lb b 1 1 drained"}},
		{"resume b", []string{"other b 1 1 available", "openai_lb b 1 1 available"}},
		{"reset b", []string{"other b 1 1 available", "openai_lb b 1 1 available"}},
		{"drain team/a_b", []string{"openai_lb team/a b 2 1 drained"}},
	} {
		var args []string
		for _, word := range strings.Fields(c.args) {
			args = append(args, strings.ReplaceAll(word, "a_b", "a b"))
		}
		output, err := o.command(args...)
		lines := strings.Split(strings.TrimSpace(output), "\n")
		lines = slices.DeleteFunc(lines, func(line string) bool { return strings.Contains(line, " was drained ") })
		if err != nil || len(lines) != 1+len(c.want) || !strings.HasPrefix(lines[0], "POOL ") {
			t.Errorf("%s: %v\n%s", c.args, err, output)
			continue
		}
		for i, want := range c.want {
			if got := strings.Join(strings.Fields(lines[i+1]), " "); !strings.HasPrefix(got, want+" - - - 0 ") {
				t.Errorf("%s: got %q, want %q", c.args, got, want)
			}
		}
	}
}

func TestTheCommandSaysInPlainTextWhatIsWrong(t *testing.T) {
	o := newOperated(t)
	for args, want := range map[string]string{
		"drain nobody":                 "no backend is called 'nobody': there are b, team/a b",
		"drain":                        "accepts 1 arg(s), received 0",
		"status b":                     "unknown command \"b\" for \"openai-lb status\"",
		"stop":                         "unknown command \"stop\" for \"openai-lb\"",
		"drain b --pool nowhere":       "no pool is called 'nowhere': there are other, openai_lb",
		"drain b --reason a\x07b":      "query parameter reason must contain only printable characters",
		"drain ..":                     "no backend is called '..': there are b, team/a b",
		"status --address localhost:1": "the admin API at localhost:1: performing request: Get \"http://localhost:1/openai_lb/backends?replica=%2A\": dial tcp ",
		"status --reason no":           "unknown flag: --reason",
		"status --config /dev/null/x":  "could not read the address of the admin API from /dev/null/x: open /dev/null/x: not a directory",
	} {
		var out bytes.Buffer
		err := runCommand(&out, append([]string{"--address", o.admin}, strings.Fields(args)...)...)
		if strings.Contains(args, "--config") {
			out.Reset()
			err = runCommand(&out, strings.Fields(args)...)
		}
		if err == nil || !strings.HasPrefix(out.String(), "Error: "+want) || strings.Contains(out.String(), "{") {
			t.Errorf("%s: %v\n%s\nwant %s", args, err, &out, want)
		}
	}
}

func TestTheCommandPrintsTheAnswerOfTheAdminAPI(t *testing.T) {
	o := newOperated(t)
	for _, args := range []string{"status", "drain b --pool other", "drain b --pool other --wait", "reset b", "resume b"} {
		output, err := o.command(append(strings.Fields(args), "--json")...)
		var backends []status.Backend
		if err != nil || json.Unmarshal([]byte(output), &backends) != nil || len(backends) == 0 || backends[0].Pool != "other" || backends[0].Name != "b" {
			t.Errorf("%s: %v\n%s", args, err, output)
		}
	}
	if output, err := o.command("callers", "--json"); err != nil || output != "[]\n" {
		t.Errorf("callers: %v\n%s", err, output)
	}
	if output, err := o.command("replicas", "--json"); err != nil || output != "[]\n" && output != "null\n" {
		t.Errorf("replicas: %v\n%s", err, output)
	}
}

func TestOperatorsSeeWhichVersionRuns(t *testing.T) {
	o := newOperated(t)
	version := o.call(http.MethodGet, "/openai_lb/version").Body
	var runs status.Build
	if err := json.Unmarshal([]byte(version), &runs); err != nil || runs != (status.Build{Version: metrics.Version(), Commit: metrics.Commit(), CaddyVersion: metrics.CaddyVersion()}) || runs.Version == "" {
		t.Errorf("the admin API answers %s (%v)", version, err)
	}
	if got := o.call(http.MethodPost, "/openai_lb/version"); got.Status != http.StatusMethodNotAllowed {
		t.Errorf("a POST is answered with %d", got.Status)
	}
	if output, err := o.command("version", "--json"); err != nil || output != version {
		t.Errorf("of the running Caddy the command shows %q (%v)", output, err)
	}
	var out bytes.Buffer
	if err := runCommand(&out, "version"); err != nil || out.String() != fmt.Sprintf("openai_lb %s, Caddy %s\n", runs.Version, runs.CaddyVersion) {
		t.Errorf("of its binary the command shows %q (%v)", out.String(), err)
	}
	if err := runCommand(&out, "version", "--address", "localhost:1"); err == nil {
		t.Error("the command shows the version of a Caddy that does not run")
	}
}

func TestOperatorsSeeWhoDrainedABackendAndWhy(t *testing.T) {
	o := newOperated(t)
	began := time.Now().Truncate(time.Millisecond)
	output, err := o.command("drain", "b", "--pool", "other", "--by", "alice", "--reason", "new PTU, back at noon")
	if err != nil || !strings.Contains(output, "\nother b was drained at "+began.UTC().Format("2006-01-02T")) || !strings.HasSuffix(output, " by alice: new PTU, back at noon\n") {
		t.Errorf("%v\n%s", err, output)
	}
	drain := everyBackend()[0].Drain
	if drain == nil || drain.By != "alice" || drain.Reason != "new PTU, back at noon" || drain.Since.Before(began) || drain.Since.After(time.Now()) {
		t.Errorf("the admin API has %+v", drain)
	}
	if _, err := o.command("resume", "b"); err != nil || everyBackend()[0].Drain != nil {
		t.Errorf("%v, it is still drained: %+v", err, everyBackend()[0])
	}
	if output, err := o.command("drain", "b"); err != nil || everyBackend()[0].Drain.By == "" || !strings.Contains(output, " by "+everyBackend()[0].Drain.By+"\n") {
		t.Errorf("%v, the user is unknown:\n%s", err, output)
	}
}

func TestNoNameOfAUserKeepsABackendFromBeingDrained(t *testing.T) {
	o := newOperated(t)
	for _, user := range []string{strings.Repeat("ä", 200), "bob\nroot", "CORP\\bob"} {
		t.Setenv("SUDO_USER", user)
		output, err := o.command("drain", "b", "--pool", "other")
		if by := everyBackend()[0].Drain; err != nil || by == nil || by.By == "" || !strings.HasPrefix(by.By, user[:3]) {
			t.Errorf("%q: %v, it is drained by %+v\n%s", user, err, by, output)
		}
	}
}

func TestTheLogSaysWhoDrainedABackendAndWhoPutItBack(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		a := pools.Default.Entries()[0].Pool.Members[0]
		a.Drain(pool.Order{By: "alice", Reason: "repairs"})
		a.Resume(pool.Order{By: "bob"})
		for message, want := range map[string]string{
			"backend drained": "map[backend:a by:alice pool:openai_lb reason:repairs]",
			"backend resumed": "map[backend:a by:bob pool:openai_lb]",
		} {
			logged := w.Logged(message)
			if len(logged) != 1 || logged[0].Level != zap.InfoLevel || fmt.Sprint(logged[0].ContextMap()) != want {
				t.Errorf("%s: %v", message, logged)
			}
		}
	})
}

func TestADrainWaitsUntilNoRequestIsInFlight(t *testing.T) {
	o := newOperated(t)
	arrived, over := make(chan struct{}), make(chan struct{})
	o.b.Replies(func(w http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-over
		lbtest.Says(200, "{}")(w, r)
	})
	served := make(chan lbtest.Reply, 1)
	go func() { served <- lbtest.Ask(o.client, o.address+"/v1/chat/completions") }()
	lbtest.Within(t, "the request arrives", arrived)

	from, to := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := runCommand(to, "drain", "b", "--pool", "openai_lb", "--wait", "--address", o.admin)
		to.Close()
		ended <- err
	}()
	lines := bufio.NewScanner(from)
	if !lines.Scan() || lines.Text() != "requests in flight: 1" {
		t.Fatalf("it begins with %q", lines.Text())
	}
	select {
	case err := <-ended:
		t.Fatalf("it did not wait: %v", err)
	default:
	}
	close(over)
	var rest []string
	for lines.Scan() {
		rest = append(rest, strings.Join(strings.Fields(lines.Text()), " "))
	}
	if err := <-ended; err != nil || len(rest) != 3 || !strings.HasPrefix(rest[1], "openai_lb b 1 1 drained - - - 0 ") {
		t.Errorf("%v, it ends with %q", err, rest)
	}
	if got := <-served; got.Status != 200 {
		t.Errorf("the request got %d", got.Status)
	}
}

func TestADrainDoesNotWaitForABackendThatIsBack(t *testing.T) {
	o := newOperated(t)
	arrived, over := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(over) })
	o.b.Replies(func(w http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-over
	})
	go lbtest.Ask(o.client, o.address+"/v1/chat/completions")
	lbtest.Within(t, "the request arrives", arrived)
	from, to := io.Pipe()
	go func() {
		_ = runCommand(to, "drain", "b", "--pool", "openai_lb", "--wait", "--address", o.admin)
		to.Close()
	}()
	lines := bufio.NewScanner(from)
	lines.Scan()
	if _, err := o.command("resume", "b"); err != nil {
		t.Fatal(err)
	}
	if !lines.Scan() || lines.Text() != "Error: backend 'b' of pool 'openai_lb' is no longer drained" {
		t.Errorf("got %q", lines.Text())
	}
}

func TestTheCommandFindsTheAdminAPIWithoutTheVariablesOfTheService(t *testing.T) {
	o := newOperated(t)
	for name, c := range map[string]struct{ file, text, want string }{
		"a Caddyfile":                      {"Caddyfile", "{\nemail {$OPENAI_LB_UNSET}\nadmin " + o.admin + "\n}\n:1 {\nopenai_lb {\nbackend http://a {\napi_key {$OPENAI_LB_UNSET}\n}\n}\n}\n", ""},
		"a Caddyfile without an admin API": {"lb.caddyfile", "{\nadmin off\n}\n", "turns the admin API off"},
		"JSON":                             {"lb.json", `{"admin":{"listen":"` + o.admin + `"},"apps":{"http":0}}`, ""},
		"JSON without an admin API":        {"Caddyfile.json", `{"admin":{"disabled":true}}`, "turns the admin API off"},
		"a Caddyfile with a mistake":       {"Caddyfile", "{\nadmin {\nport 1\n}\n}\n", "unrecognized parameter 'port'"},
	} {
		file := filepath.Join(t.TempDir(), c.file)
		lbtest.WriteFile(t, file, c.text)
		var out bytes.Buffer
		err := runCommand(&out, "status", "--config", file)
		switch {
		case c.want == "" && (err != nil || !strings.HasPrefix(out.String(), "POOL ")), c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v\n%s", name, err, &out)
		}
	}
}
