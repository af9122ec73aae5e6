package simulator

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy" // its directive
)

func TestACaddyfileBecomesTheSameJSON(t *testing.T) {
	for name, tc := range map[string]struct{ input, want string }{
		"bare":        {`openai_simulator`, `{}`},
		"empty block": {"openai_simulator {\n}", `{}`},
		"pay as you go": {
			`openai_simulator {
				name                eus
				api_key             {env.KEY_1} {file./run/key}
				api_key             plain
				deployments         gpt-4o text-embedding-3-small
				requests_per_minute 180
				tokens_per_minute   30000
				hints               azure_day
				error_body          mistral_flat
				first_token_latency 300ms
				first_token_latency_p95 900ms
				token_latency       20ms
				output_tokens       100
				flex_capacity       33
				priority_capacity   0
				flex_latency        100s
				fault               status:503:30 10
				fault               sse_error_first:too_many_requests:no_capacity
				fault               silent for 30s every 120s
				allow_fault_header
				early_grace         10ms
			}`,
			`{"name":"eus","api_key":["{env.KEY_1}","{file./run/key}","plain"],"deployments":["gpt-4o","text-embedding-3-small"],` +
				`"requests_per_minute":180,"tokens_per_minute":30000,"hints":"azure_day","error_body":"mistral_flat",` +
				`"first_token_latency":300000000,"first_token_latency_p95":900000000,"token_latency":20000000,"output_tokens":100,` +
				`"flex_capacity":33,"priority_capacity":0,"flex_latency":100000000000,` +
				`"fault":[{"action":"status:503:30","every":10},{"action":"sse_error_first:too_many_requests:no_capacity"},{"action":"silent","for":30000000000,"period":120000000000}],` +
				`"allow_fault_header":true,"early_grace":10000000}`,
		},
		"provisioned": {
			`openai_simulator {
				ptu            50
				bucket_seconds 0.5
				no_flex
			}`,
			`{"ptu":50,"bucket_seconds":0.5,"no_flex":true}`,
		},
		"a retry-after date keeps its colons": {
			`openai_simulator {
				fault "status:503:Wed, 21 Oct 2026 07:28:30 GMT"
			}`,
			`{"fault":[{"action":"status:503:Wed, 21 Oct 2026 07:28:30 GMT"}]}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var h Handler
			if err := h.UnmarshalCaddyfile(caddyfile.NewTestDispenser(tc.input)); err != nil {
				t.Fatal(err)
			}
			got, err := json.Marshal(h)
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != tc.want {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
		})
	}
}

func TestACaddyfileIsRefusedByLineAndValue(t *testing.T) {
	for block, want := range map[string]string{
		"colour blue":                            "unrecognized option 'colour': expected one of allow_fault_header, api_key, bucket_seconds",
		"name":                                   "name requires an argument",
		`name ""`:                                "name requires an argument",
		"name a b":                               "unexpected argument 'b' after name",
		"name a\nname b":                         "name is given twice",
		"name a {\nx\n}":                         "name does not take a block",
		"api_key":                                "api_key requires at least one argument",
		`api_key secret ""`:                      "api_key requires at least one argument, and none that is empty",
		"deployments":                            "deployments requires at least one argument",
		"deployments a\ndeployments b":           "deployments is given twice",
		"requests_per_minute many":               "requests_per_minute 'many' is not a whole number of 1 or more",
		"requests_per_minute 0":                  "'0' is not ",
		"tokens_per_minute -1":                   "'-1' is not ",
		"tokens_per_minute 1.5":                  "'1.5' is not ",
		"ptu 99999999999999999999":               "ptu '99999999999999999999' is not a whole number of 1 or more",
		"zone here":                              "unrecognized option 'zone'",
		"bucket_seconds 0":                       "bucket_seconds '0' is not a number above 0",
		"bucket_seconds NaN":                     "'NaN' is not ",
		"bucket_seconds Inf":                     "'Inf' is not ",
		"hints azure":                            "hints 'azure' is not one of azure_ms, azure_both, azure_s, azure_none, azure_neg1, azure_day, date, openai_dur, zero",
		"error_body json":                        "error_body 'json' is not one of azure_classic, ",
		"token_latency -1s":                      "token_latency '-1s' is not a duration",
		"token_latency 20":                       "'20' is not ",
		"fault":                                  "fault requires an action and, optionally, how often, and has 0 arguments",
		"fault explode":                          "fault 'explode' is not one of status:<code>[:<retry_after>], content_filter, ",
		"fault status":                           "fault 'status': '' is not a status from 400 to 599",
		"fault status:200":                       "'200' is not ",
		"fault truncate_rst":                     "fault 'truncate_rst' requires a number of events, got ''",
		"fault hang_after:-1":                    "got '-1'",
		"fault sse_error_first:server_error":     "fault 'sse_error_first' requires <type>:<code>, got 'server_error'",
		"fault reset:1":                          "fault 'reset' does not take an argument, got '1'",
		"fault reset often":                      "fault 'reset': 'often' is not a whole number of 1 or more",
		"fault reset 0":                          "'0' is not ",
		"fault reset 1 2":                        "fault 'reset' requires at most one number, got '1 2'",
		"fault silent":                           "fault 'silent' requires 'for <duration> every <duration>', got ''",
		"fault silent for 30s":                   "fault 'silent' requires 'for <duration> every <duration>', got 'for 30s'",
		"fault silent 10":                        "got '10'",
		"fault silent for 30s each 120s":         "got 'for 30s each 120s'",
		"fault silent for long every 120s":       "fault 'silent': 'long' is not a duration",
		"fault silent for 30s every 30s":         "fault 'silent' requires for and period, with for the shorter one, got 30s and 30s",
		"fault silent for 0s every 30s":          "got 0s and 30s",
		"flex_capacity 101":                      "flex_capacity '101' is not a whole number from 0 to 100",
		"flex_capacity -1":                       "'-1' is not ",
		"priority_capacity 50%":                  "priority_capacity '50%' is not a whole number from 0 to 100",
		"allow_fault_header yes":                 "unexpected argument 'yes' after allow_fault_header",
		"allow_fault_header\nallow_fault_header": "allow_fault_header is given twice",
	} {
		t.Run(block, func(t *testing.T) {
			err := new(Handler).UnmarshalCaddyfile(caddyfile.NewTestDispenser("openai_simulator {\n" + block + "\n}"))
			if err == nil {
				t.Fatal("accepted")
			}
			if !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "Testfile:") {
				t.Errorf("got  %s\nwant %s and a line", err, want)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("the error shows a key: %s", err)
			}
		})
	}
}

func TestOptionsOutsideABlockAreRefused(t *testing.T) {
	err := new(Handler).UnmarshalCaddyfile(caddyfile.NewTestDispenser("openai_simulator eus"))
	if err == nil || !strings.Contains(err.Error(), "unexpected argument 'eus'") {
		t.Errorf("got %v", err)
	}
}

func TestTheDirectiveHasAnOrderOfItsOwn(t *testing.T) {
	adapter := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}
	config, _, err := adapter.Adapt([]byte(":80 {\n\treverse_proxy 127.0.0.1:1\n\topenai_simulator /openai/* {\n\t\tname eus\n\t}\n}"), nil)
	if err != nil {
		t.Fatal(err)
	}
	simulator, proxy := strings.Index(string(config), `"handler":"openai_simulator"`), strings.Index(string(config), `"handler":"reverse_proxy"`)
	if simulator < 0 || proxy < simulator {
		t.Errorf("openai_simulator does not stand before reverse_proxy: %s", config)
	}
}
