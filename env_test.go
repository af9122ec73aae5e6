package openailb_test

import (
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// setEnv sets variables for the test, and no others that backends_from_env
// reads.
func setEnv(t *testing.T, pairs ...string) {
	t.Helper()
	for _, pair := range os.Environ() {
		if name, _, _ := strings.Cut(pair, "="); strings.HasPrefix(strings.ToUpper(name), "BACKEND_") || name == backend.TimeoutVariable {
			t.Setenv(name, "") // sets it back in the end
			os.Unsetenv(name)
		}
	}
	for _, pair := range pairs {
		name, value, _ := strings.Cut(pair, "=")
		t.Setenv(name, value)
	}
}

func TestAWrongEnvironmentIsRefusedByNameAndValue(t *testing.T) {
	const secret = "sk-very-secret"
	one := []string{"BACKEND_1_URL=https://a.openai.azure.com", "BACKEND_1_PRIORITY=1", "BACKEND_1_APIKEY=" + secret}
	for _, c := range []struct {
		name  string
		block string
		env   []string
		want  []string
	}{
		{"no variable at all", "", nil, []string{"backends_from_env found no backend", "BACKEND_1_URL, BACKEND_1_PRIORITY and BACKEND_1_APIKEY"}},
		{"no variable with this prefix", "backends_from_env TEAM", one, []string{"found no backend", "TEAM_1_URL"}},
		{"no URL", "", []string{"BACKEND_2_PRIORITY=1", "BACKEND_2_APIKEY=" + secret}, []string{"BACKEND_2_URL is required: expected the URL"}},
		{"a blank URL", "", []string{"BACKEND_1_URL= ", "BACKEND_1_PRIORITY=1"}, []string{"BACKEND_1_URL is required: expected the URL"}},
		{"a URL without a scheme", "", append([]string{"BACKEND_2_URL=b.openai.azure.com", "BACKEND_2_PRIORITY=1", "BACKEND_2_APIKEY=x"}, one...), []string{"BACKEND_2_URL: url ", "http:// or https://"}},
		{"a URL with a key", "", []string{"BACKEND_1_URL=https://a/?api-key=" + secret, "BACKEND_1_PRIORITY=1"}, []string{"BACKEND_1_URL: ", "query"}},
		{"a URL with a password", "", []string{"BACKEND_1_URL=https://x:" + secret + "@a", "BACKEND_1_PRIORITY=1"}, []string{"BACKEND_1_URL: ", "password"}},
		{"no priority", "", []string{"BACKEND_1_URL=https://a", "BACKEND_1_APIKEY=" + secret}, []string{"BACKEND_1_PRIORITY is required: expected a whole number of 1 or more"}},
		{"a priority that is no number", "", []string{"BACKEND_2_URL=https://a", "BACKEND_2_PRIORITY=x"}, []string{"BACKEND_2_PRIORITY 'x' is not a whole number of 1 or more"}},
		{"a priority of 0", "", []string{"BACKEND_2_URL=https://a", "BACKEND_2_PRIORITY=0"}, []string{"BACKEND_2_PRIORITY '0' is not a whole number of 1 or more"}},
		{"a priority that is no whole number", "", []string{"BACKEND_2_URL=https://a", "BACKEND_2_PRIORITY=1.5"}, []string{"BACKEND_2_PRIORITY", "'1.5'"}},
		{"a priority out of all bounds", "", []string{"BACKEND_2_URL=https://a", "BACKEND_2_PRIORITY=99999999999"}, []string{"BACKEND_2_PRIORITY", "'99999999999'"}},
		{"a key with white space in it", "", []string{"BACKEND_1_URL=https://a", "BACKEND_1_PRIORITY=1", "BACKEND_1_APIKEY=" + secret + " x"}, []string{"BACKEND_1_APIKEY: it must not contain white space"}},
		{"a key of two lines", "", []string{"BACKEND_1_URL=https://a", "BACKEND_1_PRIORITY=1", "BACKEND_1_APIKEY=" + secret + "\nx"}, []string{"BACKEND_1_APIKEY: it must not contain white space or control"}},
		{"no key, and a build without Azure's identities", "", append([]string{"BACKEND_2_URL=https://b", "BACKEND_2_PRIORITY=1"}, one...),
			[]string{"BACKEND_2_APIKEY is not set, and auth azure_identity is not in this build", "xcaddy build --with github.com/openai-lb/caddy-openai-lb/azure"}},
		{"a timeout that is no number", "", append([]string{"HTTP_TIMEOUT_SECONDS=100s"}, one...), []string{"HTTP_TIMEOUT_SECONDS '100s' is not a whole number of 1 or more"}},
		{"a timeout of 0", "", append([]string{"HTTP_TIMEOUT_SECONDS=0"}, one...), []string{"HTTP_TIMEOUT_SECONDS", "'0'"}},
		{"a variable with another name", "", append([]string{"BACKEND_1_DEPLOYMENT=gpt-4o"}, one...), []string{"BACKEND_1_DEPLOYMENT is not a variable of a backend", "BACKEND_1_DEPLOYMENT_NAME"}},
		{"a key in the place of the URL", "", []string{"BACKEND_1_URL=" + secret + secret, "BACKEND_1_PRIORITY=1"}, []string{"BACKEND_1_URL: url '…' must begin with http"}},
		{"a key in the place of the priority", "", []string{"BACKEND_1_URL=https://a", "BACKEND_1_PRIORITY=" + secret + secret}, []string{"BACKEND_1_PRIORITY '…' is not a whole number"}},
		{"a key in quotes", "", []string{"BACKEND_1_URL=https://a", "BACKEND_1_PRIORITY=1", `BACKEND_1_APIKEY="` + secret + `"`}, []string{"BACKEND_1_APIKEY: it must not be in quotes"}},
		{"a wrong variable beside a backend of the block", "backends_from_env\nbackend http://x", []string{"BACKEND_1_URL=https://a"}, []string{"BACKEND_1_PRIORITY"}},
		{"a prefix that begins no name", "backends_from_env 1-2", nil, []string{"Caddyfile:3", "backends_from_env '1-2'", "such as BACKEND"}},
		{"a prefix with the underscore", "backends_from_env BACKEND_", nil, []string{"Caddyfile:3", "'BACKEND_'", "no _ at the end"}},
		{"two prefixes", "backends_from_env A B", nil, []string{"Caddyfile:3", "'B'"}},
		{"prefixes on two lines", "backends_from_env A\nbackends_from_env B", nil, []string{"Caddyfile:4", "given twice"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			setEnv(t, c.env...)
			block := c.block
			if block == "" {
				block = "backends_from_env"
			}
			config, err := lbtest.Adapt(":0 {\nopenai_lb {\n" + block + "\n}\n}\n")
			if strings.Contains(config, secret) {
				t.Error("the config holds the key")
			}
			if err == nil {
				err = lbtest.Validate(t, config)
			}
			if err == nil {
				t.Fatal("it was accepted")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error is %q, want it to say %q", err, want)
				}
			}
			if strings.Contains(err.Error(), secret) {
				t.Errorf("the error is %q, with the key", err)
			}
		})
	}
}

func TestAWrongPrefixInJSONIsRefused(t *testing.T) {
	err := lbtest.Validate(t, `{"apps":{"http":{"servers":{"x":{"listen":[":0"],"routes":[{"handle":[{"handler":"openai_lb","backends_from_env":"a-b"}]}]}}}}}`)
	if err == nil || !strings.Contains(err.Error(), "backends_from_env 'a-b'") {
		t.Error(err)
	}
}

func TestBackendsOfTheEnvironmentServeLikeOthers(t *testing.T) {
	setEnv(t, "BACKEND_1_URL=http://a", "BACKEND_1_PRIORITY=1", "BACKEND_1_APIKEY= key-of-a\n",
		"BACKEND_2_URL=http://b/", "BACKEND_2_PRIORITY=2", "BACKEND_2_APIKEY=key-of-b", "BACKEND_2_DEPLOYMENT_NAME=gpt-4o-b",
		"BACKEND_3_URL=http://b", "BACKEND_3_PRIORITY=3", "BACKEND_3_APIKEY=key-of-b")
	lbtest.InBubble(t, `openai_lb {
		backend http://c {
			priority 4
		}
		backends_from_env
	}`, func(t *testing.T, w *lbtest.World) {
		var names []string
		for _, b := range w.Handler.Backends {
			names = append(names, b.Name)
		}
		if got := strings.Join(names, " "); got != "c a b b-2" {
			t.Errorf("the backends are called %s", got)
		}
		ask := func() lbtest.Reply {
			r := w.Request(http.MethodPost, "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21", strings.NewReader(`{}`))
			r.Header.Set("Api-Key", "does-not-matter")
			return w.Send(r)
		}
		ask().WantServed(t, "a")
		w.Backends["a"].Replies(lbtest.Throttled("30"))
		ask().WantServed(t, "b")
		for name, want := range map[string]string{"a": "key-of-a /openai/deployments/gpt-4o/chat/completions", "b": "key-of-b /openai/deployments/gpt-4o-b/chat/completions"} {
			got := w.Backends[name].Received()[0].Request
			if got := got.Header.Get("Api-Key") + " " + got.URL.Path; got != want {
				t.Errorf("%s got %q, want %q", name, got, want)
			}
		}
		w.WantCalls(map[string]int{"a": 2, "b": 1, "c": 0})
	})
}

func TestATimeoutOfTheEnvironmentGivesWayToTheConfig(t *testing.T) {
	for _, c := range []struct {
		name, env, block    string
		header, first, idle time.Duration
	}{
		{name: "it is the sample's", block: "backends_from_env", header: 100 * time.Second, first: 100 * time.Second, idle: 100 * time.Second},
		{name: "a blank variable", env: " ", block: "backends_from_env", header: 100 * time.Second, first: 100 * time.Second, idle: 100 * time.Second},
		{name: "a variable", env: " 30 ", block: "backends_from_env", header: 30 * time.Second, first: 30 * time.Second, idle: 30 * time.Second},
		{name: "the config", env: "30", block: "backends_from_env\nresponse_header_timeout 5m\nstream_idle_timeout 1m", header: 5 * time.Minute, first: 30 * time.Second, idle: time.Minute},
		{name: "no backends from there", env: "30", block: "backend http://a", header: 5 * time.Minute, first: 5 * time.Minute, idle: 5 * time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			setEnv(t, "BACKEND_1_URL=http://a", "BACKEND_1_PRIORITY=1", "BACKEND_1_APIKEY=key", "HTTP_TIMEOUT_SECONDS="+c.env)
			lbtest.InBubble(t, "openai_lb {\n"+c.block+"\n}", func(t *testing.T, w *lbtest.World) {
				got := w.Handler.Sender
				if got.ResponseHeaderTimeout != caddy.Duration(c.header) || got.StreamFirstEventTimeout != caddy.Duration(c.first) || got.StreamIdleTimeout != caddy.Duration(c.idle) {
					t.Errorf("the timeouts are %s, %s and %s", time.Duration(got.ResponseHeaderTimeout), time.Duration(got.StreamFirstEventTimeout), time.Duration(got.StreamIdleTimeout))
				}
				if got.FailDuration != caddy.Duration(10*time.Second) {
					t.Errorf("fail_duration is %s", time.Duration(got.FailDuration))
				}
			})
		})
	}
}
