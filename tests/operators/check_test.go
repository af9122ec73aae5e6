package operators

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/modules/tools"
	_ "github.com/openai-lb/caddy-openai-lb/simulator"
)

const rightKey, wrongKey = "sk-the-right-key-of-it", "sk-the-wrong-key-of-it"

// simulators serves simulators, each with these options below the path of its
// name, and returns their base.
func simulators(t *testing.T, options map[string]string) (base string) {
	t.Helper()
	var sites strings.Builder
	for name, o := range options {
		fmt.Fprintf(&sites, "handle_path /%s/* {\nopenai_simulator {\napi_key %s\n%s\n}\n}\n", name, rightKey, o)
	}
	return "http://" + lbtest.ServeAt(t, sites.String(), "order openai_simulator before respond")
}

// configWith writes a Caddyfile with these backends, one of each name.
func configWith(t *testing.T, options string, backends ...string) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "Caddyfile")
	lbtest.WriteFile(t, file, fmt.Sprintf("{\nadmin off\n}\n:%d {\nroute /ai/* {\nopenai_lb {\n%s\n%s\n}\n}\n}\n",
		lbtest.FreePort(t), strings.Join(backends, "\n"), options))
	return file
}

// backendAt writes a backend with a key.
func backendAt(name, url, key, options string) string {
	return fmt.Sprintf("backend %s {\nname %s\napi_key %s\n%s\n}", url, name, key, options)
}

// check runs `caddy openai-lb check --json`.
func check(t *testing.T, args ...string) (checked map[string]tools.Checked, all string, err error) {
	t.Helper()
	lbtest.ShowLog(t)
	var out bytes.Buffer
	err = runCommand(&out, append([]string{"check", "--json"}, args...)...)
	all = out.String()
	text, _, _ := strings.Cut(all, "Error: ")
	var list []tools.Checked
	if jsonErr := json.Unmarshal([]byte(text), &list); jsonErr != nil {
		t.Fatalf("%v, %v: %s", err, jsonErr, all)
	}
	checked = make(map[string]tools.Checked)
	for _, c := range list {
		checked[c.Backend] = c
	}
	return checked, all, err
}

// serveTLS serves an API by TLS with a certificate that is valid until then,
// and returns its URL.
func serveTLS(t *testing.T, until time.Time) (url string, certificate tls.Certificate) {
	t.Helper()
	certificate, err := lbtest.NewCertificate(until, "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status := http.StatusOK
		if r.Header.Get("Authorization") == "" {
			status = http.StatusUnauthorized
		}
		lbtest.Says(status, `{"data":[]}`)(w, r)
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}}
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.URL, certificate
}

// silent accepts connections, and answers nothing.
func silent(t *testing.T) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return "http://" + l.Addr().String()
}

func TestACheckReportsEachFault(t *testing.T) {
	at := simulators(t, map[string]string{
		"good":      "deployments gpt-4o gpt-4o-mini",
		"throttled": "fault status:429:7",
		"quota":     "error_body insufficient_quota\nfault status:429",
		"broken":    "fault status:500",
		"cut":       "fault reset",
	})
	expired, first := serveTLS(t, time.Now().Add(-time.Hour))
	ending, second := serveTLS(t, time.Now().Add(13*24*time.Hour))
	untrusted, _ := serveTLS(t, time.Now().Add(365*24*time.Hour))
	roots := make([]string, 2)
	for i, c := range []tls.Certificate{first, second} {
		roots[i] = filepath.Join(t.TempDir(), "root.pem")
		lbtest.WritePEM(t, roots[i], "CERTIFICATE", c.Certificate[0])
	}
	_, plain := lbtest.Listen(t, "plain")
	b, noList := lbtest.Listen(t, "no-list")
	b.Replies(lbtest.Status(http.StatusNotFound))
	file := configWith(t, "transport http {\ntls_trust_pool file "+strings.Join(roots, " ")+"\n}",
		backendAt("good", at+"/good/v1", rightKey, "model gpt-4o\nmodel mini gpt-4o-mini"),
		backendAt("any-model", at+"/good/v1", rightKey, ""),
		backendAt("wrong-key", at+"/good/v1", wrongKey, ""),
		backendAt("no-model", at+"/good/v1", rightKey, "model gpt-4o\nmodel other gpt-9"),
		backendAt("azure", at+"/good/openai", rightKey, "auth api_key\nmodel gpt-4o"),
		backendAt("no-deployment", at+"/good/openai", rightKey, "auth api_key\nmodel gpt-4o\ndeployment ptu"),
		backendAt("no-list", noList.URL, rightKey, "model gpt-4o"),
		backendAt("no-path", at+"/nowhere/v1", rightKey, "model gpt-4o"),
		"backend "+at+"/good/v1 {\nname no-key\n}",
		"backend "+at+"/good/v1 {\nname passes\nauth passthrough\n}",
		backendAt("expired", expired, rightKey, ""),
		backendAt("ending", ending, rightKey, ""),
		backendAt("untrusted", untrusted, rightKey, ""),
		backendAt("silent", silent(t), rightKey, ""),
		backendAt("refused", fmt.Sprintf("http://127.0.0.1:%d", lbtest.FreePort(t)), rightKey, ""),
		backendAt("unknown", "https://nowhere.invalid/v1", rightKey, ""),
		backendAt("plain", strings.Replace(plain.URL, "http:", "https:", 1), rightKey, ""),
		backendAt("throttled", at+"/throttled/v1", rightKey, ""),
		backendAt("quota", at+"/quota/v1", rightKey, ""),
		backendAt("broken", at+"/broken/v1", rightKey, ""),
		backendAt("cut", at+"/cut/v1", rightKey, ""),
	)
	checked, all, err := check(t, "--config", file, "--timeout", "2s")
	if err == nil || err.Error() != "13 of 21 backends cannot serve" {
		t.Errorf("got %v", err)
	}
	if strings.Contains(all, rightKey) || strings.Contains(all, wrongKey) {
		t.Errorf("a key is shown: %s", all)
	}
	for name, want := range map[string]struct {
		status     tools.CheckStatus
		credential string
		models     string
		problem    string
	}{
		"good":          {"ok", "accepted", "gpt-4o found, gpt-4o-mini found", ""},
		"any-model":     {"ok", "accepted", "", ""},
		"wrong-key":     {"failed", "refused", "", `failed: the credential is refused: status 401 \(invalid_api_key\)`},
		"no-model":      {"failed", "accepted", "gpt-4o found, gpt-9 missing", "failed: the backend does not have gpt-9"},
		"azure":         {"ok", "accepted", "gpt-4o unknown", ""},
		"no-deployment": {"failed", "accepted", "ptu missing", "failed: the backend does not have ptu"},
		"no-list":       {"warning", "unknown", "gpt-4o unknown", `warning: there is no list of models at /v1/models: status 404 \(test\)`},
		"no-path":       {"warning", "unknown", "gpt-4o unknown", `warning: the reply from /nowhere/v1/models is not a list of models: is this the API\?`},
		"no-key":        {"failed", "missing", "", `failed: a credential is required, and the options have none: status 401 \(\w+\)`},
		"passes":        {"ok", "caller's", "", ""},
		"expired":       {"failed", "unknown", "", `failed: the certificate expired on \d{4}-\d\d-\d\d`},
		"ending":        {"warning", "accepted", "", `warning: the certificate expires on \d{4}-\d\d-\d\d`},
		"untrusted":     {"failed", "unknown", "", "failed: the certificate is not trusted: .*x509: .*"},
		"silent":        {"failed", "unknown", "", "failed: no reply within 2s"},
		"refused":       {"failed", "unknown", "", `failed: 127.0.0.1:\d+ refuses connections`},
		"unknown":       {"failed", "unknown", "", "failed: the host nowhere.invalid could not be resolved: .*"},
		"plain":         {"failed", "unknown", "", `failed: 127.0.0.1:\d+ does not speak TLS: use http:// or another port`},
		"throttled":     {"warning", "unknown", "", `warning: throttled now: status 429.*`},
		"quota":         {"failed", "unknown", "", `failed: the account has no budget left: status 429 \(insufficient_quota\)`},
		"broken":        {"failed", "unknown", "", "failed: the backend fails: status 500.*"},
		"cut":           {"failed", "unknown", "", "failed: no reply: .*"},
	} {
		wantChecked(t, checked[name], want.status, want.credential, want.models, want.problem)
	}
	if n := checked["any-model"].Listed; n == nil || *n != 2 {
		t.Error("the models that a backend lists are not counted")
	}
	for _, name := range []string{"expired", "ending"} {
		if checked[name].CertificateUntil == nil {
			t.Errorf("%s: it is not known until when the certificate is valid", name)
		}
	}
	if got := checked["good"]; got.Milliseconds["reply"] < 0 || got.IP == "" || got.Address == "" {
		t.Errorf("got %+v", got)
	}
}

func TestACheckSpendsATokenOnlyIfItIsTold(t *testing.T) {
	at := simulators(t, map[string]string{"a": "deployments gpt-4o\nrequests_per_minute 600\ntokens_per_minute 60000"})
	file := configWith(t, "",
		backendAt("openai", at+"/a/v1", rightKey, "model gpt-4o\nmodel gpt-9"),
		backendAt("azure", at+"/a/openai", rightKey, "auth api_key\nmodel gpt-4o\nmodel gpt-9"),
		backendAt("unnamed", at+"/a/v1", rightKey, ""))
	served := func() string { return lbtest.Get(lbtest.NewClient(t), at+"/a/_simulator/status").Body }
	for _, name := range []string{"", "--spend"} {
		before := served()
		checked, all, err := check(t, append([]string{"--config", file, "--pool", "openai_lb"}, strings.Fields(name)...)...)
		if err == nil || err.Error() != "2 of 3 backends cannot serve" {
			t.Errorf("%q: got %v", name, err)
		}
		spent := served() != before
		for backend, want := range map[string]string{"openai": "[{gpt-4o found} {gpt-9 missing}]", "azure": "[{gpt-4o unknown} {gpt-9 missing}]"} {
			if name != "" {
				want = "[{gpt-4o served} {gpt-9 missing}]"
			}
			if got := fmt.Sprint(checked[backend].Models); got != want {
				t.Errorf("%q: %s: got %s, want %s", name, backend, got, want)
			}
		}
		if _, known := checked["openai"].Remaining["tokens"]; known != (name != "") {
			t.Errorf("%q: what is left of the limit: got %v", name, checked["openai"].Remaining)
		}
		if name != "" && (checked["unnamed"].Status != tools.CheckWarning || !spent) {
			t.Errorf("got %s", all)
		}
	}
}

func TestACheckIsATableWithTheProblemsBelow(t *testing.T) {
	at := simulators(t, map[string]string{"a": "deployments gpt-4o"})
	file := configWith(t, "pool chat",
		backendAt("east", at+"/a/v1", rightKey, "model gpt-4o"), backendAt("west", at+"/a/v1", wrongKey, "model gpt-4o"))
	var out bytes.Buffer
	err := runCommand(&out, "check", "--config", file)
	lines := strings.Split(out.String(), "\n")
	address := strings.TrimPrefix(at, "http://")
	latency := regexp.MustCompile(`  \d+m?s  `)
	for i, want := range []string{
		"POOL BACKEND STATUS ADDRESS CERTIFICATE UNTIL CREDENTIAL MODELS LATENCY REMAINING",
		"chat east ok " + address + " - accepted 1 found * -",
		"chat west failed " + address + " - refused 1 unknown * -",
		"chat west: failed: the credential is refused: status 401 (invalid_api_key)",
		"Error: 1 of 2 backends cannot serve",
	} {
		if got := strings.Join(strings.Fields(latency.ReplaceAllString(lines[min(i, len(lines)-1)], " * ")), " "); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if err == nil || strings.Contains(out.String(), "\x1b") {
		t.Errorf("got %v, %q", err, &out)
	}
}

// TestACheckChangesNothing runs a check in the process of a Caddy that runs the
// same configuration.
func TestACheckChangesNothing(t *testing.T) {
	b, server := lbtest.Listen(t, "b")
	b.Replies(lbtest.Status(http.StatusTooManyRequests, "Retry-After", "60"))
	caddyfile := fmt.Sprintf("{\nadmin off\n}\nhttp://:%d {\nbind 127.0.0.1\nopenai_lb {\nbackend %s\n}\n}", lbtest.FreePort(t), server.URL)
	file := filepath.Join(t.TempDir(), "Caddyfile")
	lbtest.WriteFile(t, file, caddyfile)
	lbtest.Run(t, caddyfile)
	before := pools.Default.Entries()
	checked, _, err := check(t, "--config", file)
	if err != nil || len(checked) != 1 || len(b.Received()) != 1 {
		t.Errorf("got %v, %v and %d requests", err, checked, len(b.Received()))
	}
	after := pools.Default.Entries()
	if len(after) != 1 || after[0] != before[0] {
		t.Error("the pool that runs was replaced")
	}
	for _, s := range after[0].Pool.Snapshot(time.Now()) {
		if len(s.Cooldowns) > 0 {
			t.Errorf("a check started a cooldown: %+v", s)
		}
	}
}

// handlerOf returns a JSON config with an openai_lb of these fields.
func handlerOf(fields string) string {
	return `{"apps":{"http":{"servers":{"s":{"routes":[{"handle":[{"handler":"openai_lb",` + fields + `}]}]}}}}}`
}

func TestACheckNamesTheModelsThatAreShutDownSoon(t *testing.T) {
	date := func(days int) string { return time.Now().UTC().AddDate(0, 0, days).Format(time.DateOnly) }
	list := func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"data":[{"id":"a","shutdown_date":"%s"},{"id":"b","shutdown_date":"%[1]s"},{"id":"c","shutdown_date":"%s"},`+
			`{"id":"d","shutdown_date":"%s"},{"id":"e","shutdown_date":null},{"id":"f"},{"id":"g","shutdown_date":{}}]}`, date(59), date(-2), date(61))
	}
	at := serveAPI(t, list)
	checked, _, err := check(t, "--config", configWith(t, "",
		"backend "+at+"/v1 {\nname named\nmodel a\nmodel mine c\nmodel d\nmodel e\nmodel f\nmodel g\n}",
		"backend "+at+"/v1 {\nname any\n}", "backend "+at+"/v1 {\nname stays\nmodel d\nmodel e\n}"))
	if err != nil {
		t.Error(err)
	}
	past := "warning: the provider has shut down c on " + date(-2)
	wantChecked(t, checked["named"], "warning", "none", "a found, c found, d found, e found, f found, g found",
		past+"; warning: the provider shuts down a on "+date(59))
	wantChecked(t, checked["any"], "warning", "none", "", past+"; warning: the provider shuts down a, b on "+date(59))
	wantChecked(t, checked["stays"], "ok", "none", "d found, e found", "")
}

func TestWhatIsWrongWithACheckIsPlainText(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(folder, name)
		lbtest.WriteFile(t, file, text)
		return file
	}
	good := configWith(t, "", "backend http://127.0.0.1:1")
	for args, want := range map[string]string{
		"--config " + filepath.Join(folder, "none"):                                                                      "reading config from file: open " + folder,
		"--config " + write("a.Caddyfile", ":80 {\nopenai_lb {\n}\n}"):                                                   "adapting config using caddyfile: ",
		"--config " + write("b.Caddyfile", ":80 {\nrespond ok\n}"):                                                       "the configuration has no openai_lb",
		"--config " + write("c.json", "{"):                                                                               "config is not valid JSON",
		"--config " + write("d.Caddyfile", ":80 {\nopenai_lb {\nbackend http://a {\nweigth 1"):                           "adapting config using caddyfile: ",
		"--config " + good + " --pool other":                                                                             "the configuration has no pool 'other'",
		"--config " + good + " --timeout 6s":                                                                             "timeout '6s' is not a duration above 0 of 5s at most",
		"--config " + good + " --offline --spend":                                                                        "offline and spend cannot be combined",
		"--config " + good + " --envfile " + write("env", "A=1\nKEY= "+wrongKey+"\n"):                                    "envfile: line 2 is not KEY=VALUE",
		"--config " + good + " --envfile " + filepath.Join(folder, "no"):                                                 "loading additional environment variables: reading environment file: open ",
		"--config " + write("e.json", `{"apps":{"http":{"servers":{"s":{"rutes":[]}}}}}`):                                "loading http app module: ",
		"--config " + write("f.json", `{"aps":{}}`):                                                                      "decoding config: ",
		"--config " + write("g.Caddyfile", ":80 {\nopenai_lb {\nbackend http://a {\napi_key {env.CHECK_UNSET}\n}\n}\n}"): "backend 1 (a): api_key: evaluated placeholder {env.CHECK_UNSET} is empty, at " + folder + "/g.Caddyfile:4\n",
		"--config " + write("h.Caddyfile", ":80 {\nopenai_lb {\nbackend http://a\nclient_keys_file /no/such/file\n}\n}"): "client_keys_file: open /no/such/file: no such file or directory, at " + folder + "/h.Caddyfile:4\n",
		"--config " + write("j.Caddyfile", ":80 {\nrespond hello\nopenai_lb {\nbackend http://a\n}\n}") + " --offline":   "no request reaches an openai_lb: static_response in front of it answers every one\n",
		"--config " + write("k.Caddyfile", ":80 {\nopenai_lb {\nbackend http://a\n}\n}\n:81 {\nroute {\nopenai_lb_status\nopenai_lb {\npool b\nbackend http://a\n}\n}\n}") + " --offline": "no request reaches an openai_lb: openai_lb_status in front of it answers every one\n",
		"--config " + write("i.json", handlerOf(`"backends":[{"url":"ftp://a"}]`)):                                                                                                        "backend 1: url 'ftp://a' must begin with http:// or https://, at " + folder + "/i.json:1\n",
	} {
		var out bytes.Buffer
		err := runCommand(&out, append([]string{"check"}, strings.Fields(args)...)...)
		if err == nil || !strings.HasPrefix(out.String(), "Error: "+want) || strings.Contains(out.String(), wrongKey) {
			t.Errorf("%s: %v\n%s\nwant %s", args, err, &out, want)
		}
	}
}

func TestACheckReadsTheVariablesOfAFile(t *testing.T) {
	at := simulators(t, map[string]string{"a": ""})
	t.Setenv("CHECKED_KEY", "") // is removed after the test
	os.Unsetenv("CHECKED_KEY")
	env := filepath.Join(t.TempDir(), "env")
	lbtest.WriteFile(t, env, "# a comment\nexport CHECKED_KEY=\""+rightKey+"\"\n")
	file := configWith(t, "", backendAt("a", at+"/a/v1", "{env.CHECKED_KEY}", ""))
	if checked, _, err := check(t, "--config", file, "--envfile", env); err != nil || checked["a"].Credential != "accepted" {
		t.Errorf("got %v, %v", err, checked)
	}
}

func TestOfflineACheckNeedsNoSecretAndNoVariable(t *testing.T) {
	options := `
		client_keys_file /nonexistent/client-keys
		client_key alice {env.UNSET_ALICE}
		client_key bob {file./nonexistent/bob}
		transport http {
			tls_server_name {env.UNSET_SERVER}
			tls_client_auth /nonexistent/cert.pem /nonexistent/key.pem
			tls_trust_pool file /nonexistent/ca.pem
		}
		backends_from_env UNSET`
	file := configWith(t, options,
		"backend {env.UNSET_URL} {\napi_key {env.UNSET_KEY}\nname {env.UNSET_NAME}\n}",
		"backend https://{env.UNSET_RESOURCE}.openai.azure.com {\napi_key {file./nonexistent/key}\nmodel gpt-4o {env.UNSET_DEPLOYMENT}\n}",
		"backend http://localhost:{env.UNSET_PORT} {\nheader x-api-key {env.UNSET_HEADER}\n}")
	var out bytes.Buffer
	if err := runCommand(&out, "check", "--offline", "--config", file); err != nil || out.String() != "Valid configuration\n" {
		t.Errorf("got %v, %s", err, &out)
	}
	for option, want := range map[string]string{
		"lb_retries -1":                       "lb_retries",
		"client_key alice short":              "client_key",
		"backends_from_env UNSET_":            "is not a prefix of environment variables",
		"backend http://a/v1?x={env.UNSET_A}": "must not contain a query",
	} {
		out.Reset()
		err := runCommand(&out, "check", "--offline", "--config", configWith(t, option, "backend http://a {\napi_key {env.UNSET_KEY}\n}"))
		if err == nil || !strings.Contains(out.String(), want) {
			t.Errorf("%s: got %v, %s, want %s", option, err, &out, want)
		}
	}
	if err := runCommand(&out, "check", "--config", file); err == nil {
		t.Error("a check that is not offline needs no variable")
	}
}

func TestTheExamplesAreValidOffline(t *testing.T) {
	for _, name := range []string{"openai.Caddyfile", "azure.Caddyfile", "azure.json", "mixed.Caddyfile", "agents.Caddyfile", "flex.Caddyfile", "selfhosted.Caddyfile", "edge.Caddyfile", "systemd/Caddyfile", "compose/Caddyfile", "container/Caddyfile"} {
		var out bytes.Buffer
		if err := runCommand(&out, "check", "--offline", "--config", "../../examples/"+name); err != nil {
			t.Errorf("%s: %s", name, &out)
		}
	}
}

// serveAPI serves an API by a function, and returns its URL.
func serveAPI(t *testing.T, serve http.HandlerFunc) (url string) {
	t.Helper()
	server := httptest.NewServer(serve)
	t.Cleanup(server.Close)
	return server.URL
}

// wantChecked compares the status of a backend, its credential, its models and
// its problems.
func wantChecked(t *testing.T, got tools.Checked, status tools.CheckStatus, credential, models, problems string) {
	t.Helper()
	var states, texts []string
	for _, m := range got.Models {
		states = append(states, m.Name+" "+m.State)
	}
	for _, p := range got.Problems {
		texts = append(texts, string(p.Status)+": "+p.Text)
	}
	if got.Status != status || got.Credential != credential || strings.Join(states, ", ") != models ||
		!regexp.MustCompile("^"+problems+"$").MatchString(strings.Join(texts, "; ")) {
		t.Errorf("%s: got %s, credential %s, %q, %q", got.Backend, got.Status, got.Credential, states, texts)
	}
}

// TestARequestToAModelShowsWhetherTheCredentialServes also where there is no
// list of models, as behind a gateway that has only the paths of deployments,
// or where anyone may read it.
func TestARequestToAModelShowsWhetherTheCredentialServes(t *testing.T) {
	azure := func(list, chat http.HandlerFunc) string {
		return serveAPI(t, func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/models") {
				list(w, r)
			} else {
				chat(w, r)
			}
		})
	}
	lists, has := lbtest.Says(http.StatusOK, `{"data":[]}`), lbtest.Says(http.StatusBadRequest, `{}`)
	noPath := lbtest.Says(http.StatusNotFound, `{"statusCode":404,"message":"Resource not found"}`)
	denied := lbtest.Says(http.StatusUnauthorized, `{"statusCode":401,"message":"Access denied due to invalid subscription key."}`)
	noRole := lbtest.Says(http.StatusUnauthorized, `{"error":{"code":"PermissionDenied","message":"The principal lacks the required data action."}}`)
	backends := map[string]string{
		"gateway":    azure(noPath, has),
		"wrong-key":  azure(noPath, denied),
		"no-role":    azure(lists, noRole),
		"no-budget":  azure(noPath, lbtest.Says(http.StatusTooManyRequests, `{"error":{"code":"insufficient_quota"}}`)),
		"throttled":  azure(noPath, lbtest.Says(http.StatusTooManyRequests, `{"error":{"code":"429"}}`)),
		"careless":   azure(noPath, lbtest.Says(http.StatusInternalServerError, `{}`)),
		"no-network": azure(lbtest.Says(http.StatusForbidden, `{"error":{"code":"403","message":"Public access is disabled."}}`), has),
	}
	var blocks []string
	for name, url := range backends {
		blocks = append(blocks, backendAt(name, url, rightKey, "auth api_key\nmodel gpt-4o\nmodel gpt-5"))
	}
	checked, _, _ := check(t, "--config", configWith(t, "", blocks...))
	const none, noList = "gpt-4o unknown, gpt-5 unknown", "warning: there is no list of models at /openai/models: status 404"
	wantChecked(t, checked["gateway"], "warning", "unknown", none, noList)
	wantChecked(t, checked["wrong-key"], "failed", "refused", none, noList+"; failed: the credential is refused: status 401")
	wantChecked(t, checked["no-role"], "failed", "unknown", "gpt-4o refused, gpt-5 refused", "warning: .*needs no credential.*; "+
		`failed: the credential does not permit requests to model gpt-4o: status 401 \(PermissionDenied\); failed: .*gpt-5.*`)
	wantChecked(t, checked["no-budget"], "failed", "unknown", none, noList+`; failed: the account has no budget left: status 429 \(insufficient_quota\)`)
	wantChecked(t, checked["throttled"], "warning", "unknown", none, noList+"; warning: model gpt-4o is throttled now: status 429; warning: .*gpt-5.*")
	wantChecked(t, checked["careless"], "warning", "unknown", none, noList+"; warning: model gpt-4o fails at a request without messages: status 500; warning: .*gpt-5.*")
	wantChecked(t, checked["no-network"], "failed", "refused", none, "failed: access is denied to the credential, or from this network: status 403")
}

func TestAPublicListOfModelsDoesNotProveTheCredential(t *testing.T) {
	const list, chat = `{"data":[{"id":"gpt-4o"}]}`, `{"choices":[{}]}`
	at := serveAPI(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/v1/models":
			fmt.Fprint(w, list)
		case r.Header.Get("Authorization") != "Bearer "+rightKey:
			lbtest.Says(http.StatusUnauthorized, `{"error":{"message":"User not found.","code":401}}`)(w, r)
		default:
			fmt.Fprint(w, chat)
		}
	})
	file := configWith(t, "", backendAt("right", at+"/v1", rightKey, "model gpt-4o"), backendAt("wrong", at+"/v1", wrongKey, "model gpt-4o"),
		"backend "+at+"/v1 {\nname none\nmodel gpt-4o\n}")
	checked, _, err := check(t, "--config", file)
	const public = "warning: the list of models needs no credential, so it does not prove that the credential is accepted: use --spend"
	wantChecked(t, checked["right"], "warning", "unknown", "gpt-4o found", public)
	wantChecked(t, checked["wrong"], "warning", "unknown", "gpt-4o found", public)
	wantChecked(t, checked["none"], "ok", "none", "gpt-4o found", "")
	if err != nil {
		t.Error(err)
	}
	checked, _, _ = check(t, "--config", file, "--spend")
	wantChecked(t, checked["right"], "ok", "accepted", "gpt-4o served", "")
	wantChecked(t, checked["wrong"], "failed", "refused", "gpt-4o found", "failed: the credential is refused: status 401")
	wantChecked(t, checked["none"], "failed", "missing", "gpt-4o found", "failed: a credential is required, and the options have none: status 401")
}

// TestAModelServesIfItAnswersAsModelsDo has servers that answer a chat with
// something else, and models that do something else than chats.
func TestAModelServesIfItAnswersAsModelsDo(t *testing.T) {
	to := func(chat, embed http.HandlerFunc) string {
		return serveAPI(t, func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.Header.Get("Authorization") == "":
				lbtest.Says(http.StatusUnauthorized, `{}`)(w, r)
			case r.URL.Path == "/v1/models":
				fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
			case r.URL.Path == "/v1/embeddings":
				embed(w, r)
			default:
				chat(w, r)
			}
		})
	}
	no := lbtest.Says(http.StatusBadRequest, `{}`)
	notChat := lbtest.Says(http.StatusNotFound, `{"error":{"message":"This is not a chat model.","type":"invalid_request_error","param":"model","code":null}}`)
	strict := func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		if strings.Contains(string(text), "max_completion_tokens") {
			lbtest.Says(http.StatusUnprocessableEntity, `{"detail":[{"type":"extra_forbidden","loc":["body","max_completion_tokens"]}]}`)(w, r)
		} else {
			fmt.Fprint(w, `{"choices":[{}]}`)
		}
	}
	backends := map[string]string{
		"chats":    to(lbtest.Says(http.StatusOK, `{"choices":[{}]}`), no),
		"embeds":   to(no, lbtest.Says(http.StatusOK, `{"data":[{}]}`)),
		"short":    to(lbtest.Says(http.StatusBadRequest, `{"error":{"message":"Could not finish the message because max_tokens or model output limit was reached."}}`), no),
		"strict":   to(strict, no),
		"speaks":   to(notChat, lbtest.Says(http.StatusForbidden, `{}`)),
		"page":     to(lbtest.Says(http.StatusOK, `<html></html>`), no),
		"empty":    to(lbtest.Says(http.StatusOK, ``), no),
		"redirect": to(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/login", http.StatusFound) }, no),
	}
	var blocks []string
	for name, url := range backends {
		blocks = append(blocks, backendAt(name, url+"/v1", rightKey, "model m"))
	}
	checked, _, _ := check(t, "--spend", "--config", configWith(t, "", blocks...))
	for _, name := range []string{"chats", "embeds", "short", "strict"} {
		wantChecked(t, checked[name], "ok", "accepted", "m served", "")
	}
	wantChecked(t, checked["speaks"], "warning", "accepted", "m refused", "warning: model m answers, but serves neither chat nor embeddings: status 404.*")
	for name, status := range map[string]int{"page": 200, "empty": 200, "redirect": 302} {
		wantChecked(t, checked[name], "failed", "accepted", "m refused",
			fmt.Sprintf("failed: model m is not served: the reply is neither a chat nor an embedding: status %d", status))
	}
}

func TestAModelIsFoundUnderTheNameThatTheListHas(t *testing.T) {
	serve := func(list string) string {
		return serveAPI(t, lbtest.Says(http.StatusOK, list))
	}
	checked, _, err := check(t, "--config", configWith(t, "",
		"backend "+serve(`{"data":[{"id":"llama3:latest"},{"id":"llama3:8b"}]}`)+"/v1 {\nname ollama\nmodel llama3\nmodel llama3:8b\n}",
		"backend "+serve(`{"data":[{"id":"models/gemini"}]}`)+"/v1 {\nname gemini\nmodel gemini\n}",
		"backend "+serve(`{"data":[{"id":"a"}],"has_more":true}`)+"/v1 {\nname pages\nmodel a\nmodel b\n}"))
	wantChecked(t, checked["ollama"], "ok", "none", "llama3 found, llama3:8b found", "")
	wantChecked(t, checked["gemini"], "ok", "none", "gemini found", "")
	wantChecked(t, checked["pages"], "ok", "none", "a found, b unknown", "")
	if err != nil {
		t.Error(err)
	}
}

func TestACheckSendsTheBackendsHeaders(t *testing.T) {
	const gatewayKey = "key-of-the-gateway"
	at := serveAPI(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Gateway-Key") == gatewayKey && r.Header.Get("Authorization") == "Bearer "+rightKey {
			fmt.Fprint(w, `{"data":[]}`)
		} else {
			lbtest.Says(http.StatusUnauthorized, `{"error":{"code":"`+r.Header.Get("X-Gateway-Key")+`"}}`)(w, r)
		}
	})
	const header = "header X-Gateway-Key " + gatewayKey
	file := configWith(t, "", backendAt("right", at+"/v1", rightKey, header), backendAt("wrong", at+"/v1", wrongKey, header))
	checked, all, _ := check(t, "--config", file)
	wantChecked(t, checked["right"], "ok", "accepted", "", "")
	wantChecked(t, checked["wrong"], "failed", "refused", "", "failed: the credential is refused: status 401")
	if strings.Contains(all, gatewayKey) {
		t.Errorf("a key is shown: %s", all)
	}
}

// TestACheckSaysWhereItStopped has servers that are silent at a step, and a
// proxy that is not there.
func TestACheckSaysWhereItStopped(t *testing.T) {
	checked, _, _ := check(t, "--timeout", "1s", "--config", configWith(t, "",
		backendAt("tls", strings.Replace(silent(t), "http:", "https:", 1), rightKey, ""),
		backendAt("body", serveAPI(t, func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, `{"data":[`)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}), rightKey, "")))
	wantChecked(t, checked["tls"], "failed", "unknown", "", `failed: 127\.0\.0\.1:\d+ accepts connections, but did not answer the TLS handshake within 1s`)
	wantChecked(t, checked["body"], "failed", "unknown", "", "failed: no reply within 1s")
	proxy := fmt.Sprintf("http://user:%s@127.0.0.1:%d", wrongKey, lbtest.FreePort(t))
	checked, all, _ := check(t, "--config", configWith(t, "transport http {\nnetwork_proxy url "+proxy+"\n}",
		backendAt("behind", "https://backend.example", rightKey, "")))
	wantChecked(t, checked["behind"], "failed", "unknown", "", "failed: the proxy cannot be reached, see HTTPS_PROXY: .*connection refused")
	if strings.Contains(all, wrongKey) {
		t.Errorf("a password is shown: %s", all)
	}
}

// TestACheckSaysThatTwoRegionsOfOpenAIHaveOneKey since they may then have one
// limit. The proxy does not exist, so that nothing is sent to OpenAI.
func TestACheckSaysThatTwoRegionsOfOpenAIHaveOneKey(t *testing.T) {
	const key, other = "sk-proj-0123456789-one", "sk-proj-0123456789-other"
	checked, all, _ := check(t, "--config", configWith(t, "transport http {\nnetwork_proxy url http://127.0.0.1:1\n}",
		backendAt("us", "https://api.openai.com", key, ""),
		backendAt("us-again", "https://api.openai.com/v1", key, "service_tier flex"),
		backendAt("eu", "https://eu.api.openai.com", key, ""),
		backendAt("eu-own", "https://eu.api.openai.com", other, ""),
		backendAt("elsewhere", "https://notopenai.com", key, "")))
	for name, want := range map[string]bool{"us": false, "us-again": false, "eu": true, "eu-own": false, "elsewhere": false} {
		warns := slices.ContainsFunc(checked[name].Problems, func(p tools.CheckedProblem) bool {
			return p.Status == tools.CheckWarning && strings.Contains(p.Text, "the same key as us at another host of OpenAI")
		})
		if warns != want {
			t.Errorf("%s: a warning %t, want %t\n%s", name, warns, want, all)
		}
	}
}

func TestAnExpiredCertificateThatIsNotVerifiedIsAWarning(t *testing.T) {
	url, _ := serveTLS(t, time.Now().Add(-time.Hour))
	file := configWith(t, "transport http {\ntls_insecure_skip_verify\n}", backendAt("a", url, rightKey, ""))
	checked, _, err := check(t, "--config", file)
	wantChecked(t, checked["a"], "warning", "accepted", "", `warning: the certificate expired on \d{4}-\d\d-\d\d, but is not verified`)
	if err != nil {
		t.Error(err)
	}
}
