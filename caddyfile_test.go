package openailb_test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	_ "github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestCaddyfilesAdaptToTheirJSON compares testdata/adapt/*.caddyfile with the
// JSON beside it. UPDATE_GOLDEN=1 writes that anew.
func TestCaddyfilesAdaptToTheirJSON(t *testing.T) {
	files, err := filepath.Glob("testdata/adapt/*.caddyfile")
	if err != nil || len(files) == 0 {
		t.Fatal("no Caddyfiles to adapt", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text := lbtest.ReadFile(t, file)
			got, err := lbtest.Adapt(string(text))
			if err != nil {
				t.Fatal(err)
			}
			golden := strings.TrimSuffix(file, ".caddyfile") + ".json"
			if os.Getenv("UPDATE_GOLDEN") != "" {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want := lbtest.ReadFile(t, golden)
			if got != string(want) {
				t.Errorf("%s adapts to\n%s\nwant\n%s", file, got, want)
			}
			if err := lbtest.Validate(t, got); err != nil {
				t.Errorf("the JSON does not load: %v", err)
			}
		})
	}
}

func TestAWrongCaddyfileIsRefusedByLineAndValue(t *testing.T) {
	for _, c := range []struct {
		name  string
		block string // the lines of an openai_lb block, from line 3 on
		want  []string
	}{
		{"no backend at all", "", []string{"no backend", "backend <url>"}},
		{"a word that is not an option", "backend http://a\nbackends http://b", []string{"Caddyfile:4", "'backends'", "affinity, backend, backends_from_env, ", "caller_identity, "}},
		{"a word of a backend that is not an option", "backend http://a {\nprio 1\n}", []string{"Caddyfile:4", "'prio'", "priority"}},
		{"an engine that is not built in", "backend http://a\nstate redis", []string{"Caddyfile:4", "state 'redis' is not in this build: add it with xcaddy build --with github.com/openai-lb/caddy-openai-lb/redis"}},
		{"an identity that is not built in", "backend http://a {\nauth azure_identity\n}", []string{"Caddyfile:4", "azure_identity is not in this build", "caddy-openai-lb/azure"}},
		{"an unknown scheme", "backend http://a {\nauth basic\n}", []string{"Caddyfile:4", "'basic'", "api_key, bearer, passthrough, none"}},
		{"a scheme in capitals", "backend http://a {\nauth Bearer\n}", []string{"Caddyfile:4", "auth 'Bearer' is not one of", "expected 'bearer'"}},
		{"a scheme with a hyphen", "backend http://a {\nauth api-key\n}", []string{"Caddyfile:4", "expected 'api_key'"}},
		{"a key without braces", "backend http://a {\napi_key env.EAST_KEY\n}", []string{"Caddyfile:4", "api_key: it looks like a placeholder without its braces"}},
		{"a client key without braces", "backend http://a\nclient_key alice env.ALICE_KEY", []string{"Caddyfile:4", "without its braces"}},
		{"a placeholder for two keys", "backend http://a\nclient_key alice {env.KEY}\nclient_key bob {env.KEY}", []string{"Caddyfile:5", "it is also the key of \"alice\""}},
		{"several models in one", "backend http://a {\nmodel gpt-5.5,gpt-5.6\n}", []string{"Caddyfile:4", "model 'gpt-5.5,gpt-5.6' must not contain a comma"}},
		{"a Foundry project", "backend https://a.services.ai.azure.com/api/projects/x/", []string{"Caddyfile:3", "expected /openai/v1 after it"}},
		{"a scheme and more", "backend http://a {\nauth none really\n}", []string{"Caddyfile:4", "auth none does not take another argument"}},
		{"a backend without a URL", "backend", []string{"Caddyfile:3", "backend requires an argument"}},
		{"a backend with two URLs", "backend http://a http://b", []string{"Caddyfile:3", "'http://b'"}},
		{"a URL without a scheme", "backend a.example", []string{"Caddyfile:3", "'a.example' must begin with http:// or https://"}},
		{"a URL with another scheme", "backend ftp://a", []string{"Caddyfile:3", "'ftp://a' must begin with http:// or https://"}},
		{"a URL without a host", "backend https:///v1", []string{"Caddyfile:3", "has no host"}},
		{"a URL with a query", "backend https://a/?x=1", []string{"Caddyfile:3", "query"}},
		{"a priority of 0", "backend http://a {\npriority 0\n}", []string{"Caddyfile:4", "priority '0'", "1 or more"}},
		{"a priority that is no number", "backend http://a {\npriority high\n}", []string{"Caddyfile:4", "priority 'high'", "whole number"}},
		{"a negative weight", "backend http://a {\nweight -1\n}", []string{"Caddyfile:4", "weight '-1' is not a whole number from 0 to 1000000"}},
		{"a weight without a value", "backend http://a {\nweight\n}", []string{"Caddyfile:4", "weight requires an argument", "{$...} may be empty"}},
		{"a weight with two values", "backend http://a {\nweight 1 2\n}", []string{"Caddyfile:4", "unexpected argument '2' after weight"}},
		{"an option of a backend given twice", "backend http://a {\nweight 1\nweight 2\n}", []string{"Caddyfile:5", "weight is given twice"}},
		{"an option given twice", "backend http://a\nlb_retries 1\nlb_retries 2", []string{"Caddyfile:5", "lb_retries is given twice"}},
		{"an account without a name", "backend http://a {\naccount\n}", []string{"Caddyfile:4", "account requires an argument"}},
		{"an unknown word of affinity", "backend http://a\naffinity {\nsticky\n}", []string{"Caddyfile:5", "'sticky'", "callers, prompt_cache"}},
		{"a word after affinity", "backend http://a\naffinity off", []string{"Caddyfile:4", "'off' after affinity", "callers or prompt_cache"}},
		{"max_requests of 0", "backend http://a {\nmax_requests 0\n}", []string{"Caddyfile:4", "max_requests '0'", "1 or more"}},
		{"a header without a value", "backend http://a {\nheader X\n}", []string{"Caddyfile:4", "header requires a name and a value, or - and a name"}},
		{"a URL with a deployment", "backend https://x.openai.azure.com/openai/deployments/gpt-4o {\napi_key k\n}", []string{"Caddyfile:3", "must not contain /openai/deployments/"}},
		{"a service tier of a backend that is not known", "backend http://a {\nservice_tier standard\n}", []string{"Caddyfile:4", "service_tier 'standard'"}},
		{"no duration", "backend http://a\nfail_duration 10", []string{"Caddyfile:4", "fail_duration '10'", "such as 500ms"}},
		{"a negative duration", "backend http://a\nretry_after_max -1s", []string{"Caddyfile:4", "retry_after_max '-1s' is not a duration above 0"}},
		{"the block of Caddy's reverse_proxy", "backend http://a\nreverse_proxy {\nheader_up X 1\n}", []string{"Caddyfile:4", "reverse_proxy", "'transport http'", "'header'", "'intercept'", "'health_uri'"}},
		{"a policy that sets cookies", "backend http://a\nlb_policy cookie", []string{"Caddyfile:4", "lb_policy 'cookie' is not available", "keep no cookies"}},
		{"a policy that falls back to one that sets cookies", "backend http://a\nlb_policy header X {\nfallback cookie\n}", []string{"Caddyfile:4", "lb_policy 'cookie' is not available"}},
		{"a delay that is no duration", "backend http://a\nstream_close_delay soon", []string{"Caddyfile:4", "stream_close_delay 'soon'"}},
		{"a size without a unit", "backend http://a\nrequest_buffers 32", []string{"Caddyfile:4", "request_buffers '32' is not a size with a unit"}},
		{"a pattern for a model", "backend http://a {\nmodel gpt-*\n}", []string{"Caddyfile:4", "backend 1 (a): model 'gpt-*' must not contain *"}},
		{"a shell variable for a key", "backend http://a {\napi_key $OPENAI_API_KEY\n}", []string{"Caddyfile:4", "backend 1 (a): api_key", "shell variable", "{env.X}"}},
		{"a shell variable for a caller's key", "backend http://a\nclient_key alice $ALICE_KEY", []string{"Caddyfile:4", "client_key \"alice\"", "shell variable"}},
		{"a size of nothing", "backend http://a\nrequest_buffers 0", []string{"Caddyfile:4", "request_buffers '0'", "32MiB"}},
		{"a prompt_cache by no header", "backend http://a\naffinity {\nprompt_cache X-Session \"X Session\"\n}", []string{"Caddyfile:5", "prompt_cache 'X Session'", "name of a header"}},
		{"a prompt_cache by one header twice", "backend http://a\naffinity {\nprompt_cache session x-session Session\n}", []string{"Caddyfile:5", "header 'Session'", "twice"}},
		{"an unknown affinity", "backend http://a\naffinity {\ncookie\n}", []string{"Caddyfile:5", "'cookie'", "prompt_cache"}},
		{"negative retries", "backend http://a\nlb_retries -1", []string{"Caddyfile:4", "lb_retries '-1'", "0 or more"}},
		{"other limits in the headers", "backend http://a\nratelimit_headers all", []string{"Caddyfile:4", "ratelimit_headers 'all'", "caller, pool, off"}},
		{"quota_steering on", "backend http://a\nquota_steering on", []string{"Caddyfile:4", "quota_steering 'on'", "off"}},
		{"a silence that is not off", "backend http://a\nsilence on", []string{"Caddyfile:4", "silence 'on' is not allowed: expected off"}},
		{"a wait that is too long", "backend http://a\nwait 11s", []string{"Caddyfile:4", "wait '11s'", "at most 10s"}},
		{"a wait of nothing", "backend http://a\nwait 0", []string{"Caddyfile:4", "wait '0'", "above 0"}},
		{"a wait with a number of places", "backend http://a\nwait 1s 20", []string{"Caddyfile:4", "wait requires a duration", "2 arguments"}},
		{"a wait without a duration", "backend http://a\nwait", []string{"Caddyfile:4", "a duration"}},
		{"a silence without a word", "backend http://a\nsilence", []string{"Caddyfile:4", "silence requires an argument"}},
		{"a usage of a backend that is not off", "backend http://a {\nstream_usage on\n}", []string{"Caddyfile:4", "stream_usage 'on' is not allowed: expected off"}},
		{"a usage of a backend without a word", "backend http://a {\nstream_usage\n}", []string{"Caddyfile:4", "stream_usage requires an argument"}},
		{"a ready_path that is no path", "backend http://a\nready_path readyz", []string{"Caddyfile:4", "ready_path 'readyz' is not a path that begins with /"}},
		{"a ready_path that is a matcher", "backend http://a\nready_path /ready*", []string{"Caddyfile:4", "ready_path '/ready*'"}},
		{"a ready_path without a path", "backend http://a\nready_path", []string{"Caddyfile:4", "ready_path requires an argument"}},
		{"a model without a name", "backend http://a {\nmodel\n}", []string{"Caddyfile:4", "model requires a name and an optional deployment, and has 0 arguments"}},
		{"a model given twice", "backend http://a {\nmodel x\nmodel x y\n}", []string{"Caddyfile:5", "'x' is given twice"}},
		{"a policy that does not exist", "backend http://a\nlb_policy best", []string{"Caddyfile:4", "best", "first, "}},
		{"an argument of a policy that has none", "backend http://a\nlb_policy least_conn 3", []string{"Caddyfile:4", "wrong argument count"}},
		{"the policy of a plain reverse_proxy", "backend http://a\nlb_policy openai_lb", []string{"Caddyfile:4", "lb_policy 'openai_lb' is not available here"}},
		{"a policy that has weights of its own", "backend http://a\nlb_policy weighted_round_robin 8 1 1", []string{"Caddyfile:4", "lb_policy 'weighted_round_robin' is not available here", "use the option weight"}},
		{"a policy without a name", "backend http://a\nlb_policy", []string{"Caddyfile:4", "lb_policy requires an argument"}},
		{"an option that is empty", "backend http://a\nclient_keys_file \"\"", []string{"Caddyfile:4", "client_keys_file requires an argument", "{$...} may be empty"}},
		{"a block where none belongs", "backend http://a {\nweight 1 {\nx\n}\n}", []string{"weight does not take a block"}},
		{"another transport", "backend http://a\ntransport fastcgi", []string{"Caddyfile:4", "fastcgi", "http"}},
		{"two backends of one name", "backend http://a {\nname x\n}\nbackend http://b {\nname x\n}", []string{`backend 2 "x": another backend has this name`}},
		{"a key for nobody", "backend http://a {\nauth none\napi_key sk-secret\n}", []string{"backend 1", "auth none does not take an api_key"}},
		{"no key for Azure", "backend https://x.openai.azure.com", []string{"backend 1 (x.openai.azure.com): api_key is required: auth defaults to api_key for this host"}},
		{"no key for OpenAI", "backend https://api.openai.com/v1", []string{"Caddyfile:3", "backend 1 (api.openai.com): api_key is required: auth defaults to bearer for this host"}},
		{"a key from a variable that is not set", "backend http://a {\napi_key {env.OPENAI_LB_TEST_UNSET}\n}", []string{"backend 1", "api_key", "{env.OPENAI_LB_TEST_UNSET}", "empty"}},
		{"a key of white space", "backend http://a {\napi_key \"  \"\n}", []string{"Caddyfile:4", "backend 1 (a)", "api_key", "empty"}},
		{"a URL from a variable that is not set", "backend {env.OPENAI_LB_TEST_UNSET}", []string{"backend 1", "{env.OPENAI_LB_TEST_UNSET}"}},
		{"a URL with an operation", "backend https://api.openai.com/v1/chat/completions {\napi_key k\n}", []string{"Caddyfile:3", "url 'https://api.openai.com/v1/chat/completions' must not contain an operation"}},
		{"a URL with an operation and a slash", "backend https://x.openai.azure.com/openai/v1/responses/ {\napi_key k\n}", []string{"Caddyfile:3", "must not contain an operation"}},
		{"a URL of an example", "backend https://<resource>.openai.azure.com {\napi_key k\n}", []string{"Caddyfile:3", "replace the part in brackets"}},
		{"an api-key in the place of the key", "backend https://api.openai.com/v1 {\napi_key k\nauth api_key\nheader api-key x\n}", []string{"backend 1 (api.openai.com)", "header Api-Key would replace the credential of auth api_key"}},
		{"a header in the place of the key", "backend https://api.openai.com/v1 {\napi_key k\nheader authorization \"Bearer x\"\n}", []string{"Caddyfile:5", "backend 1 (api.openai.com)", "header Authorization would replace the credential of auth bearer"}},
		{"a key with quotes", "backend http://a {\napi_key `\"sk-quoted\"`\n}", []string{"Caddyfile:4", "backend 1", "api_key", "must not be in quotes"}},
		{"a key with a byte order mark", "backend http://a {\napi_key \ufeffsk-marked\n}", []string{"Caddyfile:4", "backend 1", "api_key", "visible ASCII"}},
		{"a key of 9 KiB", "backend http://a {\napi_key " + strings.Repeat("k", 9<<10) + "\n}", []string{"Caddyfile:4", "backend 1", "api_key", "longer than 8192 bytes"}},
		{"a header name with a blank", "backend http://a {\nheader \"X Y\" z\n}", []string{"Caddyfile:4", "backend 1", `"X Y"`}},
		{"a priority of a backend with a name", "backend http://a\nbackend http://b {\nname east\npriority 0\n}", []string{"Caddyfile:6", `backend 2 "east": priority '0'`}},
		{"a name that is taken", "backend http://a {\nname x\n}\nbackend http://b {\nname x\n}", []string{"Caddyfile:6", `backend 2 "x": another backend has this name`}},
		{"a scheme without its key", "backend http://a {\nname x\nauth bearer\n}", []string{"Caddyfile:5", `backend 1 "x": auth bearer requires an api_key`}},
		{"a scheme that takes no key", "backend http://a {\napi_key k\nauth none\n}", []string{"Caddyfile:5", "auth none does not take an api_key"}},
		{"a short client key", "backend http://a\nclient_key alice short", []string{"Caddyfile:4", `client_key "alice": a key must have at least 16 characters`}},
		{"a transport that says who connects", "backend http://a\ntransport http {\nproxy_protocol v2\n}", []string{"Caddyfile:4", "http: proxy_protocol is not supported"}},
		{"a key of two callers", "backend http://a\nclient_key alice sk-0123456789abcdef\nclient_key bob sk-0123456789abcdef", []string{"Caddyfile:5", `client_key "bob": it is also the key of "alice"`}},
		{"a key of two callers, once as a digest", "backend http://a\nclient_key alice sk-0123456789abcdef\nclient_key bob sha256:" + fmt.Sprintf("%x", sha256.Sum256([]byte("sk-0123456789abcdef"))), []string{"Caddyfile:5", `client_key "bob": it is also the key of "alice"`}},
		{"a name of no caller", "backend http://a\nclient_key \"a\tb\" {env.OPENAI_LB_TEST_UNSET}", []string{"Caddyfile:4", "expected a name of printable characters"}},
		{"a key with an unknown placeholder", "backend http://a {\napi_key sk-{nothing}\n}", []string{"Caddyfile:4", "backend 1 (a): api_key: it has a placeholder that is neither {env.X} nor {file./path}"}},
		{"a key with half a placeholder", "backend http://a {\napi_key {env.KEY\n}", []string{"Caddyfile:4", "backend 1 (a): api_key: it has an unpaired brace"}},
		{"a caller's key with an unknown placeholder", "backend http://a\nclient_key alice {nothing.here}", []string{"Caddyfile:4", `client_key "alice": it has a placeholder that is neither`}},
		{"a file of keys with an unknown placeholder", "backend http://a\nclient_keys_file {nothing.here}/keys", []string{"Caddyfile:4", "client_keys_file: unrecognized placeholder {nothing.here}"}},
		{"a URL with an unknown placeholder", "backend https://{nothing.here}.example", []string{"Caddyfile:3", "backend 1: url: unrecognized placeholder {nothing.here}"}},
		{"a name with an unknown placeholder", "backend http://a {\nname {nothing.here}\n}", []string{"Caddyfile:4", "name: unrecognized placeholder {nothing.here}"}},
		{"a deployment with an unknown placeholder", "backend http://a {\ndeployment {nothing.here}\n}", []string{"Caddyfile:4", "deployment: unrecognized placeholder {nothing.here}"}},
		{"an account with an unknown placeholder", "backend http://a {\naccount {nothing.here}\n}", []string{"Caddyfile:4", "account: unrecognized placeholder {nothing.here}"}},
		{"a model with an unknown placeholder", "backend http://a {\nmodel m {nothing.here}\n}", []string{"Caddyfile:4", "model: unrecognized placeholder {nothing.here}"}},
		{"a header with an unknown placeholder", "backend http://a {\nheader X {nothing.here}\n}", []string{"Caddyfile:4", "header X: unrecognized placeholder {nothing.here}"}},
		{"a key for nobody at a host from a variable", "backend {env.OPENAI_LB_TEST_UNSET} {\napi_key k\nauth none\n}", []string{"Caddyfile:5", "auth none does not take an api_key"}},
		{"fair shares without names", "backend http://a\nfair_shares", []string{"Caddyfile:4", "fair_shares requires client_key, client_keys_file or caller_identity"}},
		{"strict callers without names", "backend http://a\naffinity {\ncallers strict\n}", []string{"Caddyfile:4", "affinity: callers strict requires client_key, client_keys_file or caller_identity"}},
		{"a mistake in the transport", "backend http://a\ntransport http {\ntls_client_auth /dev/null /dev/null\n}", []string{"http: ", "client certificate"}},
	} {
		lbtest.WantRefused(t, c.name, c.block, c.want...)
	}
}

// TestTwoPoolsOfOneNameAreRefusedByLine unless they are the same one, of a
// snippet that is imported twice.
func TestTwoPoolsOfOneNameAreRefusedByLine(t *testing.T) {
	site := func(port int, options string) string {
		return fmt.Sprintf("http://:%d {\nopenai_lb {\n%s\n}\n}\n", port, options)
	}
	for file, want := range map[string]string{
		site(1, "pool x\nbackend http://a") + site(2, "pool x\nbackend http://b"):               "pool 'x': another pool has this name, choose a different one, at Caddyfile:8",
		site(1, "backend http://a") + site(2, "pool openai_lb\nbackend http://b"):               "pool 'openai_lb': another pool has this name, choose a different one, at Caddyfile:7",
		site(1, "pool x\nbackend http://a") + site(2, "pool x\nbackend http://a"):               "",
		site(1, "backend http://a") + site(2, "backend http://b") + site(3, "backend http://a"): "",
	} {
		err := lbtest.ValidateCaddyfile(t, file)
		if (err == nil) != (want == "") || err != nil && !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", file, err, want)
		}
	}
}

func TestAnUpstreamTwiceIsRefusedByLine(t *testing.T) {
	err := lbtest.ValidateCaddyfile(t, ":0 {\nreverse_proxy a:80 b:80 {\nlb_policy openai_lb {\nupstream a:80 {\n}\nupstream a:80 {\n}\n}\n}\n}\n")
	if err == nil || !strings.Contains(err.Error(), "upstream a:80 is given twice, at Caddyfile:6") {
		t.Errorf("got %v", err)
	}
}

func TestWrongJSONIsRefusedByNameAndValue(t *testing.T) {
	for handler, want := range map[string]string{
		`{"backends":[null]}`: "backend 1 is null",
		`{"backends":[{"url":"http://a"}],"request_buffers":9223372036854775807}`: "request_buffers",
		`{"backends":[]}`: "no backend",
		`{"backends":[{"url":"http://a"}],"state":{"engine":"redis"}}`:                   "state 'redis' is not in this build: add it with xcaddy build --with github.com/openai-lb/caddy-openai-lb/redis",
		`{"backends":[{"url":"http://a","weights":1}]}`:                                  "weights",
		`{"backends":[{"url":"http://a","weight":-1}]}`:                                  "weight '-1' is not a whole number from 0 to 1000000",
		`{"backends":[{"url":"http://a","priority":-1}]}`:                                "priority '-1' is not a whole number of 1 or more",
		`{"backends":[{"url":"http://a","max_requests":-1}]}`:                            "max_requests '-1' is not a whole number of 1 or more",
		`{"backends":[{"url":"http://a","auth":"basic"}]}`:                               `auth 'basic' is not one of api_key, bearer, passthrough, none`,
		`{"backends":[{"url":"http://a","auth":"none","auth_options":{}}]}`:              `auth none does not take auth_options`,
		`{"backends":[{"url":"a"}]}`:                                                     "http:// or https://",
		`{"backends":[{"url":"http://a"}],"affinity":{"prompt_cache":{"headers":[""]}}}`: "prompt_cache '' is not the name of a header",
		`{"backends":[{"url":"http://a"}],"lb_retries":-1}`:                              "lb_retries '-1' is not a whole number of 0 or more",
		`{"backends":[{"url":"http://a"}],"fail_duration":-1}`:                           "fail_duration '-1ns' is not a duration above 0",
		`{"backends":[{"url":"http://a"}],"ratelimit_headers":"x"}`:                      "ratelimit_headers 'x' is not one of caller, pool, off",
		`{"backends":[{"url":"http://a"}],"reverse_proxy":{}}`:                           "unknown field \"reverse_proxy\"",
		`{"backends":[{"url":"http://a"}],"transport":{"protocol":"fastcgi"}}`:           "protocol \"fastcgi\" is not available: expected \"http\"",
		`{"backends":[{"url":"http://a"}],"stream_timeout":-1}`:                          "stream_timeout '-1ns' is not a duration above 0",
		`{"backends":[{"url":"http://a"}],"request_buffers":-1}`:                         "request_buffers '-1' is not a number of bytes from 1 to 2147483647",
		`{"backends":[{"url":"http://a"}],"wait":"-1s"}`:                                 "wait '-1s' is not a duration above 0, of at most 10s",
		`{"backends":[{"url":"http://a"}],"wait":"11s"}`:                                 "wait '11s' is not a duration above 0, of at most 10s",
		`{"backends":[{"url":"http://a"}],"lb_try_duration":-1}`:                         "lb_try_duration",
		`{"backends":[{"url":"http://a"}],"ready_path":"readyz"}`:                        "ready_path 'readyz'",
		`{"backends":[{"url":"http://a","account":"{env.OPENAI_LB_UNSET}"}]}`:            "account: ",
	} {
		handler = `{"handler":"openai_lb",` + strings.TrimPrefix(handler, "{")
		err := lbtest.Validate(t, `{"apps":{"http":{"servers":{"x":{"listen":[":0"],"routes":[{"handle":[`+handler+`]}]}}}}}`)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s gives %v, want %q", handler, err, want)
		}
	}
}

// TestPoolsOfOneNameHaveTheSameOptions has servers, which Caddy sets up in any
// order, so that chance would say which pool gets what name.
func TestPoolsOfOneNameHaveTheSameOptions(t *testing.T) {
	const plain = `{"handler":"reverse_proxy","upstreams":[{"dial":"%s"}],"load_balancing":{"selection_policy":{"policy":"openai_lb"%s}}}`
	const nested = `{"handler":"reverse_proxy","upstreams":[{"dial":"%s"}],"load_balancing":{"selection_policy":{"policy":"header","field":"X","fallback":{"policy":"openai_lb"}}}}`
	for _, c := range []struct{ one, other, want string }{
		{`{"handler":"openai_lb","backends":[{"url":"http://a"}]}`, `{"handler":"openai_lb","backends":[{"url":"http://b"}]}`, "pool 'openai_lb'"},
		{`{"handler":"openai_lb","pool":"x","backends":[{"url":"http://a"}]}`, `{"handler":"openai_lb","pool":"x","backends":[{"url":"http://b"}]}`, "pool 'x'"},
		{`{"handler":"openai_lb","backends":[{"url":"http://a"}]}`, `{"handler":"openai_lb","backends":[{"url":"http://a"}]}`, ""},
		{fmt.Sprintf(plain, "a:80", ""), fmt.Sprintf(plain, "b:80", ""), "pool 'reverse_proxy'"},
		{fmt.Sprintf(plain, "a:80", ""), fmt.Sprintf(plain, "b:80", `,"pool":"b"`), ""},
		{fmt.Sprintf(plain, "a:80", ""), fmt.Sprintf(plain, "a:80", ""), ""},
		{fmt.Sprintf(nested, "a:80"), fmt.Sprintf(nested, "b:80"), "pool 'reverse_proxy'"},
	} {
		server := func(port int, handler string) string {
			return fmt.Sprintf(`{"listen":[":%d"],"routes":[{"handle":[%s]}]}`, port, handler)
		}
		config := `{"apps":{"http":{"servers":{"one":` + server(8001, c.one) + `,"other":` + server(8002, c.other) + `}}}}`
		switch err := lbtest.Validate(t, config); {
		case c.want == "" && err != nil:
			t.Errorf("%s beside %s: %v", c.one, c.other, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want+": another pool has this name")):
			t.Errorf("%s beside %s: %v", c.one, c.other, err)
		}
	}
}

func TestAnErrorNeverHoldsASecret(t *testing.T) {
	const secret = "sk-very-secret"
	t.Setenv("OPENAI_LB_TEST_SECRET", secret+"\nsecond line")
	for _, block := range []string{
		"backend http://a {\napi_key " + secret + " spare\n}",
		"backend http://a {\napi_key " + secret + "\napi_key " + secret + "\n}",
		"backend http://a {\nauth none\napi_key " + secret + "\n}",
		"backend http://a {\napi_key \"" + secret + "\x01\"\n}",
		"backend http://a {\napi_key {env.OPENAI_LB_TEST_SECRET}\n}",
		"backend http://a {\nheader X {env.OPENAI_LB_TEST_SECRET}\n}",
		"backend http://a {\nauth " + secret + "\n}",
		"backend http://a {\nauth bearer " + secret + "\n}",
		"backend http://a {\napi_key sk-{" + secret + "}\n}",
		"backend http://a {\napi_key {env." + secret + "\n}",
		"backend http://a\nclient_key x {" + secret + "}",
		"backend http://user:" + secret + "@a",
		"backend http://user:" + secret + "@a:port",
		"backend " + secret + secret,
	} {
		err := lbtest.ValidateCaddyfile(t, ":0 {\nopenai_lb {\n"+block+"\n}\n}\n")
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%q gives %v", block, err)
		}
	}
}

func TestAKeyForAProviderWithoutEncryptionIsWarnedOf(t *testing.T) {
	for backend, want := range map[string]int{
		"http://api.openai.com/v1 {\napi_key k\n}":        1,
		"http://contoso.openai.azure.com {\napi_key k\n}": 1,
		"http://api.openai.com/v1 {\nauth none\n}":        0,
		"https://api.openai.com/v1 {\napi_key k\n}":       0,
		"http://gateway {\napi_key k\n}":                  0,
	} {
		lbtest.InBubble(t, "openai_lb {\nbackend "+backend+"\n}", func(t *testing.T, w *lbtest.World) {
			if got := len(w.Logged("the backend's key is sent without encryption: use https")); got != want {
				t.Errorf("%s: %d warnings, want %d", backend, got, want)
			}
		})
	}
}

func TestBackendsWithoutANameAreNamedByTheirHost(t *testing.T) {
	lbtest.InBubble(t, `openai_lb {
		backend http://a
		backend http://a {
			name a-2
		}
		backend http://a
		backend http://b
	}`, func(t *testing.T, w *lbtest.World) {
		var names []string
		for _, b := range w.Handler.Backends {
			names = append(names, b.Name)
		}
		if got := strings.Join(names, " "); got != "a a-2 a-3 b" {
			t.Errorf("named %s", got)
		}
	})
}

// BenchmarkClientKeys adapts a Caddyfile with keys: ten times as many take ten
// times as long.
func BenchmarkClientKeys(b *testing.B) {
	for _, n := range []int{600, 6000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			var keys strings.Builder
			for i := range n {
				fmt.Fprintf(&keys, "client_key caller-%d key-of-caller-%08d\n", i, i)
			}
			for b.Loop() {
				if _, err := lbtest.Adapt(":0 {\nopenai_lb {\nbackend http://a\n" + keys.String() + "}\n}\n"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkModelLists loads 10 backends with models: ten times as many take ten
// times as long.
func BenchmarkModelLists(b *testing.B) {
	for _, n := range []int{300, 3000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			var models strings.Builder
			for i := range n {
				fmt.Fprintf(&models, "model gpt-%d\n", i)
			}
			var backends strings.Builder
			for i := range 10 {
				fmt.Fprintf(&backends, "backend http://backend-%d {\n%s}\n", i, models.String())
			}
			for b.Loop() {
				if err := lbtest.ValidateCaddyfile(b, ":0 {\nopenai_lb {\n"+backends.String()+"client_key alice key-of-alice-0123456789\ncaller alice {\ntokens 1k/minute\n}\n}\n}\n"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestAMatcherThatMatchesNoRequestIsRefused(t *testing.T) {
	for matcher, want := range map[string]string{
		"/v1": "expected /v1/*", "/v1/": "expected /v1/*", "/openai": "expected /openai/*", "/openai/v1": "expected /openai/v1/*", "/": "expected /*",
		"/v1*": "", "/v1/*": "", "*": "", "/v1/chat/completions": "", "/generate": "", "": "",
	} {
		_, err := lbtest.Adapt(":8080\nopenai_lb " + matcher + " {\nbackend http://a\n}")
		if (want == "") != (err == nil) || err != nil && (!strings.Contains(err.Error(), "Caddyfile:2") || !strings.Contains(err.Error(), want)) {
			t.Errorf("the matcher %q: %v, want %q", matcher, err, want)
		}
	}
}
