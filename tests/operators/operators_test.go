package operators

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/fleet"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/overview"
)

// everyBackend tells how all backends are.
func everyBackend() []overview.Backend {
	return overview.Backends(time.Now(), func(_, _ string) bool { return true })
}

// states are the backends by name, with their states and what benches them.
func states() map[string]string {
	states := make(map[string]string)
	for _, b := range everyBackend() {
		states[b.Name] = strings.TrimSpace(fmt.Sprintf("%s %s %s %dms", b.State, b.Class, b.Model, b.RemainingMs))
	}
	return states
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
		since, until := got[0].Benches[0].Since, got[0].Benches[0].Until
		if until.Sub(since) != 7*time.Second || got[0].Until == nil || !got[0].Until.Equal(until) || !got[0].LastError.Time.Equal(since) {
			t.Errorf("got %+v", got[0])
		}
		// what was counted is that of all tests of this process
		b := &got[0]
		b.Requests, b.Attempts, b.Failures, b.Failovers, b.Tokens = 0, 0, 0, 0, 0
		text, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		from, to := since.Format(time.RFC3339Nano), until.Format(time.RFC3339Nano)
		want := `{"pool":"openai_lb","name":"a","priority":1,"weight":3,"state":"benched",` +
			`"class":"throttled","model":"gpt-4o","until":"` + to + `","remaining_ms":6999,` +
			`"in_flight":0,"max_requests":7,"healthy":true,"requests":0,"attempts":0,"failures":0,"failovers":0,"tokens":0,` +
			`"last_error":{"class":"throttled","status":429,"cause":"","model":"gpt-4o","time":"` + from + `"},` +
			`"benches":[{"scope":"model","model":"gpt-4o","class":"throttled","status":429,"hint":"retry-after","cause":"",` +
			`"since":"` + from + `","until":"` + to + `","remaining_ms":6999}]}`
		if string(text) != want {
			t.Errorf("got  %s\nwant %s", text, want)
		}
		if got[1].State != overview.Available || got[1].Benches == nil || got[1].Until != nil {
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
			got = append(got, fmt.Sprint(b.Name, b.Requests, b.Attempts, b.Failures, b.Failovers, b.Tokens))
		}
		if want := []string{"a0 1 1 1 0", "b2 2 0 0 30"}; !reflect.DeepEqual(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

func TestABackendIsDrainedRatherThanBenchedRatherThanProbing(t *testing.T) {
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		want := func(state string) {
			t.Helper()
			if got := states()["a"]; got != state {
				t.Errorf("a is %q, want %q", got, state)
			}
		}
		a := fleet.Default.Entries()[0].Pool.Members[0]
		want("available   0ms")
		w.Backends["a"].Replies(status500("model-1"))
		w.Post(`{"model":"model-1"}`)
		want("benched failed model-1 10000ms")
		time.Sleep(4 * time.Second)
		w.Post(`{"model":"model-2"}`).WantServed(t, "a")
		w.Backends["a"].Replies(lbtest.Throttled("8"))
		w.Post(`{"model":"model-2"}`)
		want("benched throttled model-2 8000ms") // it ends last
		w.Backends["a"].Replies(lbtest.Status(401))
		w.Post(`{"model":"model-3"}`)
		want("benched credential  60000ms") // for the whole backend
		a.Drain()
		want("drained credential  60000ms")
		time.Sleep(time.Minute)
		want("drained   0ms")
		a.Resume()
		want("probing   0ms")
		w.Backends["a"].Recovers()
		for n := range 3 {
			w.Post(fmt.Sprintf(`{"model":"model-%d"}`, n+1)).WantServed(t, "a")
		}
		want("available   0ms")
		w.Backends["a"].Replies(lbtest.Throttled("8"))
		w.Post(`{"model":"model-2"}`)
		want("benched throttled model-2 8000ms")
		a.Reset()
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
}

func newOperated(t *testing.T) *operated {
	t.Helper()
	a, serverA := lbtest.Listen(t, "a")
	_, serverB := lbtest.Listen(t, "b")
	port, admin := lbtest.FreePort(t), lbtest.FreePort(t)
	o := &operated{t: t, admin: fmt.Sprintf("127.0.0.1:%d", admin), address: fmt.Sprintf("http://127.0.0.1:%d", port), client: lbtest.NewClient(t)}
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
	var list []overview.Backend
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
	var command cobra.Command
	caddycmd.Commands()["openai-lb"].CobraFunc(&command)
	var out bytes.Buffer
	command.SetOut(&out)
	command.SetErr(&out)
	command.SetArgs(append(args, "--address", o.admin))
	err = command.Execute()
	return out.String(), err
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
	o.want(o.backends("GET", atBackends+"?pool=openai_lb"), "openai_lb b drained", "openai_lb team/a b benched")
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
		{"POST", "/b/drain?pol=other", 400, "", "query parameter 'pol': only one `pool` is allowed"},
		{"POST", "/b/drain?pool=other&pool=openai_lb", 400, "", "query parameter 'pool': only one `pool` is allowed"},
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
	for _, args := range []string{"drain nobody", "drain", "status b", "stop", "drain b --pool nowhere", "drain .."} {
		if output, err := o.command(strings.Fields(args)...); err == nil {
			t.Errorf("%s: no error, but\n%s", args, output)
		}
	}
}
