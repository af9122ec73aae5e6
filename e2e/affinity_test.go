package e2e

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// objectCalls are the calls about what is stored, and what comes of them.
var objectCalls = []struct {
	name string
	want outcome
}{
	{"conversation", outcome{Deltas: 10}},
	{"stored response", outcome{Text: text, Finish: "cancelled"}},
	{"resumed stream", outcome{Text: text, Finish: "completed", Deltas: 2}},
	{"file", outcome{Text: "{}\n", Finish: "completed"}},
	{"batch", outcome{Text: "{}\n", Finish: "completed"}},
	{"vector store", outcome{Text: text, Finish: "completed"}},
}

// TestWhatBelongsTogetherStaysTogether has the SDKs use what is stored through
// three accounts, of which two throttle every third request. Not one reply is a
// 400 or a 404, also if the balancer is started anew in the middle of each
// call.
func TestWhatBelongsTogetherStaysTogether(t *testing.T) {
	var throttledInAll atomic.Int64 // by chance, one client may only meet the third account
	t.Cleanup(func() {
		if !t.Failed() && !t.Skipped() && throttledInAll.Load() == 0 {
			t.Error("no request was throttled")
		}
	})
	for _, restarts := range []bool{false, true} {
		for _, language := range languages {
			t.Run(fmt.Sprintf("restarts %t/%s", restarts, language.name), func(t *testing.T) {
				t.Parallel()
				s, balancer := startAccounts(t)
				o := order{Client: "OpenAI", URL: s.url + "/v1", Retries: new(5)}
				if restarts {
					control := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
						balancer.stop()
						balancer.start()
					}))
					defer control.Close()
					o.Pause = control.URL
				}
				for _, c := range objectCalls {
					o.Calls = append(o.Calls, orderedCall{c.name, "gpt-4o"})
				}
				for i, got := range language.run(t, s, o) {
					if got.Backend = ""; got != objectCalls[i].want {
						t.Errorf("%s:\n got %+v\nwant %+v", objectCalls[i].name, got, objectCalls[i].want)
					}
				}
				calls, missing, throttled := 0, 0, 0
				for i := range s.simulators {
					for _, request := range s.status(t, i).Last {
						calls++
						switch request.Status {
						case 400, 404:
							missing++
						case 429:
							throttled++
						}
					}
				}
				t.Logf("%d requests reached the accounts, %d throttled, %d asked in vain", calls, throttled, missing)
				throttledInAll.Add(int64(throttled))
				if missing > 0 {
					t.Errorf("%d requests named what was elsewhere", missing)
				}
			})
		}
	}
}

// balancer is a Caddy that can be stopped and started again.
type balancer struct {
	t      *testing.T
	s      *site
	config string
	home   string
	cmd    *exec.Cmd
	exited chan struct{}
}

func (b *balancer) start() {
	b.cmd = exec.Command(caddy, "run", "--adapter", "caddyfile", "--config", b.config)
	b.cmd.Env = append(os.Environ(), "HOME="+b.home, "XDG_DATA_HOME="+b.home, "XDG_CONFIG_HOME="+b.home)
	b.exited = make(chan struct{})
	p := &process{exited: b.exited}
	b.cmd.Stdout, b.cmd.Stderr = &p.log, &p.log
	if err := b.cmd.Start(); err != nil {
		b.t.Error(err)
		close(b.exited)
		return
	}
	go func(cmd *exec.Cmd, exited chan struct{}) {
		_ = cmd.Wait()
		close(exited)
	}(b.cmd, b.exited)
	if err := p.await(b.s.connect); err != nil {
		b.t.Error(err)
	}
}

// stop stops it as a service manager does.
func (b *balancer) stop() {
	if b.cmd.Process != nil {
		_ = b.cmd.Process.Signal(syscall.SIGTERM)
	}
	<-b.exited
}

// startAccounts runs three accounts and, as a process of its own, a balancer in
// front of them.
func startAccounts(t *testing.T) (*site, *balancer) {
	t.Helper()
	dir := t.TempDir()
	addresses, err := freeAddresses(4)
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := strings.Cut(addresses[0], ":")
	s := &site{url: "https://localhost:" + port, root: filepath.Join(dir, "caddy/pki/authorities/local/root.crt")}
	const global = "{\n admin off\n auto_https disable_redirects\n default_bind 127.0.0.1\n persist_config off\n skip_install_trust\n grace_period 5s\n}\n"
	var accounts, backends strings.Builder
	for i, address := range addresses[1:] {
		s.simulators = append(s.simulators, "http://"+address)
		fault := ""
		if i < 2 {
			fault = "fault status:429:1 3"
		}
		fmt.Fprintf(&accounts, "http://%s {\n openai_simulator {\n name %s\n api_key right\n output_tokens 5\n %s\n }\n}\n", address, names[i], fault)
		fmt.Fprintf(&backends, "backend http://%s/v1 {\n name %s\n api_key right\n}\n", address, names[i])
	}
	files := map[string]string{
		"accounts": global + accounts.String(),
		"balancer": global + s.url + " {\n tls internal\n openai_lb {\n" + backends.String() + "}\n}\n",
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	elsewhere := t.TempDir() // each Caddy has a CA of its own
	if _, err := launch(t, filepath.Join(dir, "accounts"), "HOME="+elsewhere, "XDG_DATA_HOME="+elsewhere, "XDG_CONFIG_HOME="+elsewhere); err != nil {
		t.Fatal(err)
	}
	b := &balancer{t: t, s: s, config: filepath.Join(dir, "balancer"), home: dir}
	b.start()
	t.Cleanup(b.stop)
	return s, b
}
