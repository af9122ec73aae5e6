package openailb_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// run has Caddy run a config, and validate as `caddy validate` does.
func run(t *testing.T, config string) { lbtest.Run(t, config) }

func validate(t *testing.T, config string) {
	if err := lbtest.ValidateCaddyfile(t, config); err != nil {
		t.Fatal(err)
	}
}

// warnings loads a site of these directives, and returns the warnings of
// openai_lb.
func warnings(t *testing.T, load func(*testing.T, string), directives string) (lines []string) {
	t.Helper()
	port := lbtest.FreePort(t)
	file := t.TempDir() + "/log"
	load(t, fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\nlog {\noutput file %s\n}\n}\nhttp://localhost:%d {\n%s\n}", file, port, directives))
	text, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, `"level":"warn"`) && strings.Contains(line, "openai_lb") {
			lines = append(lines, line)
		}
	}
	return lines
}

func TestMistakesThatLoadAreWarnings(t *testing.T) {
	const key = "client_key alice sk-0123456789abcdef\n"
	for name, c := range map[string]struct{ directives, want string }{
		"an empty caller":                    {"openai_lb {\nbackend http://a\n" + key + "caller alice {\n}\n}", "caller 'alice' has no options, so nothing limits it"},
		"a day below a minute":               {"openai_lb {\nbackend http://a\n" + key + "caller alice {\ntokens 10k/minute\ntokens 5k/day\n}\n}", "caller 'alice': 'tokens 10k/minute' has no effect, because 5k/day is less"},
		"a month below a day":                {"openai_lb {\nbackend http://a\n" + key + "caller alice {\nrequests 10/day\nrequests 5/month\n}\n}", "'requests 10/day' has no effect, because 5/month is less"},
		"a day below a minute, then another": {"openai_lb {\nbackend http://a\n" + key + "caller alice {\ntier x\ntokens 10k/minute\ntokens 5k/day then y\n}\ntier x\ntier y\n}", ""},
		"other kinds":                        {"openai_lb {\nbackend http://a\n" + key + "caller alice {\ntokens 10k/minute\nrequests 5k/day\n}\n}", ""},
		"no weight":                          {"openai_lb {\nbackend http://a {\nweight 0\n}\nbackend http://b {\nweight 0\n}\n}", "every backend has weight 0"},
		"one weight":                         {"openai_lb {\nbackend http://a {\nweight 0\n}\nbackend http://b\n}", ""},
		"a backend twice":                    {"openai_lb {\nbackend http://a {\nname x\napi_key sk-of-a\n}\nbackend http://a/ {\nname y\npriority 2\napi_key sk-of-a\n}\n}", "backend 'y' is 'x' once more"},
		"a backend with two keys":            {"openai_lb {\nbackend http://a {\napi_key sk-of-a\n}\nbackend http://a {\napi_key sk-of-b\n}\n}", ""},
		"a backend with two service tiers":   {"openai_lb {\nbackend http://a\nbackend http://a {\nname b\npriority 2\nservice_tier default\n}\n}", ""},
		"a backend with two headers":         {"openai_lb {\nbackend http://a {\nheader OpenAI-Project p\n}\nbackend http://a {\nname b\nheader OpenAI-Project q\n}\n}", ""},
		"a backend checked twice":            {"openai_lb {\nbackend http://a {\nhealth_uri /x\n}\nbackend http://a {\nname b\npriority 2\n}\n}", "backend 'b' is 'a' once more"},
		"two deployments of a backend":       {"openai_lb {\nbackend http://a {\nmodel x one\n}\nbackend http://a {\nmodel x two\n}\n}", ""},
		"two blocks":                         {"openai_lb {\npool one\nbackend http://a\n}\nopenai_lb {\npool two\nbackend http://b\n}", `"handlers":["openai_lb"]`},
		"an answer to everything":            {"respond hello\nopenai_lb {\nbackend http://a\n}", `"handlers":["static_response"]`},
		"a status page for everything":       {"openai_lb_status\nhandle /v1/* {\nopenai_lb {\nbackend http://a\n}\n}\nrespond /x hello", ""},
		"a status page in front":             {"route {\nopenai_lb_status\nopenai_lb {\nbackend http://a\n}\n}", `"handlers":["openai_lb_status"]`},
		"an answer to a path":                {"respond /healthz hello\nopenai_lb_status /status\nforward_auth localhost:1 {\nuri /x\n}\nopenai_lb {\nbackend http://a\n}", ""},
	} {
		t.Run(name, func(t *testing.T) {
			for as, load := range map[string]func(*testing.T, string){"run": run, "validate": validate} {
				got := warnings(t, load, c.directives)
				if (c.want == "") != (len(got) == 0) || !strings.Contains(strings.Join(got, ""), c.want) {
					t.Errorf("with caddy %s, the log has %q, want %q", as, got, c.want)
				}
			}
		})
	}
}

func TestAMistakeThatOnlyLoadingShowsNamesItsLine(t *testing.T) {
	t.Setenv("EMPTY", "")
	t.Setenv("ONE", "sk-0123456789abcdef")
	t.Setenv("TWO", "sk-0123456789abcdef")
	folder := t.TempDir()
	lbtest.WriteFile(t, folder+"/key", "sk-of-carol-0123456\n")
	for name, c := range map[string]struct{ options, want string }{
		"an empty variable":           {"backend http://a\nbackend http://b {\nweight 2\napi_key {env.EMPTY}\n}", "backend 2 (b): api_key: evaluated placeholder {env.EMPTY} is empty, at Caddyfile:13"},
		"a missing file":              {"backend http://a {\napi_key {file./no/such/file}\n}", "backend 1 (a): api_key: open /no/such/file: no such file or directory, at Caddyfile:11"},
		"an empty variable as URL":    {"backend http://a {\nmodel x\n}\nbackend {env.EMPTY} {\nmodel y\n}", "backend 2: url: evaluated placeholder {env.EMPTY} is empty, at Caddyfile:13"},
		"an empty variable as header": {"backend http://a {\nheader X-A a\nheader X-B {env.EMPTY}\n}", "backend 1 (a): header X-B: evaluated placeholder {env.EMPTY} is empty, at Caddyfile:12"},
		"an empty client key":         {"backend http://a\nclient_key alice {env.ONE}\nclient_key bob {env.EMPTY}", `client_key "bob": evaluated placeholder {env.EMPTY} is empty, at Caddyfile:12`},
		"keys that become equal":      {"backend http://a\nclient_key alice {env.ONE}\nclient_key carol {file." + folder + "/key}\nclient_key bob {env.TWO}", `client_key "bob": it is also the key of "alice", at Caddyfile:13`},
		"no client_keys_file":         {"backend http://a\n\nclient_keys_file /no/such/file", "client_keys_file: open /no/such/file: no such file or directory, at Caddyfile:12"},
	} {
		t.Run(name, func(t *testing.T) {
			log := t.TempDir() + "/log"
			config := "{\nadmin off\nlog {\noutput file " + log + "\n}\n}\nhttp://localhost:80 {\n# a comment\nopenai_lb {\n" + c.options + "\n}\n}\n"
			if err := lbtest.ValidateCaddyfile(t, config); err == nil || !strings.HasSuffix(err.Error(), ": "+c.want) {
				t.Errorf("got %v, want %s", err, c.want)
			}
			// Caddy's own error has its path to the module first.
			text := string(lbtest.ReadFile(t, log))
			if want := fmt.Sprintf(`"msg":"the configuration is not valid","error":%q`, c.want); !strings.Contains(text, want) || strings.Contains(text, "sk-") {
				t.Errorf("the log has %s, want %s", text, want)
			}
		})
	}
}

func TestTheLineOfAMistakeIsThatOfTheFileThatWasReadLast(t *testing.T) {
	t.Setenv("EMPTY", "")
	const options = "openai_lb {\nbackend http://a {\napi_key {env.EMPTY}\n}\n}\n"
	for _, c := range []struct{ before, place string }{{"", "Caddyfile:4"}, {"# a comment\n", "Caddyfile:5"}} {
		config, err := lbtest.Adapt(":80 {\n" + c.before + options + "}\n")
		if err != nil {
			t.Fatal(err)
		}
		if err := lbtest.Validate(t, config); err == nil || !strings.HasSuffix(err.Error(), ", at "+c.place) {
			t.Errorf("got %v, want %s", err, c.place)
		}
		if err := lbtest.Validate(t, config); err == nil || strings.Contains(err.Error(), "Caddyfile:") {
			t.Errorf("JSON has no lines: %v", err)
		}
	}
}
