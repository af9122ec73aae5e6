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

// warnings loads a site of these directives, and returns the warnings of openai_lb.
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
