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
				region              "East US"
				requests_per_minute 180
				request_window      1s
				tokens_per_minute   30000
				hints               azure_day
				error_body          mistral_flat
				first_token_latency 300ms
				token_latency       20ms
				output_tokens       100
				fault               status:503:30 10
				fault               sse_error_first:too_many_requests:no_capacity
				allow_fault_header
				status_path         /status
			}`,
			`{"name":"eus","api_key":["{env.KEY_1}","{file./run/key}","plain"],"deployments":["gpt-4o","text-embedding-3-small"],"region":"East US",` +
				`"requests_per_minute":180,"request_window":1000000000,"tokens_per_minute":30000,"hints":"azure_day","error_body":"mistral_flat",` +
				`"first_token_latency":300000000,"token_latency":20000000,"output_tokens":100,` +
				`"fault":[{"action":"status:503:30","every":10},{"action":"sse_error_first:too_many_requests:no_capacity"}],` +
				`"allow_fault_header":true,"status_path":"/status"}`,
		},
		"provisioned": {
			`openai_simulator {
				ptu               50
				input_tpm_per_ptu 3000
				output_ratio      8
				bucket_seconds    0.5
			}`,
			`{"ptu":50,"input_tpm_per_ptu":3000,"output_ratio":8,"bucket_seconds":0.5}`,
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
		"colour blue":                            "unknown option 'colour': want one of name, api_key, deployments",
		"name":                                   "option 'name' wants a value",
		`name ""`:                                "option 'name' wants a value",
		"name a b":                               "spare argument 'b' after option 'name'",
		"name a\nname b":                         "option 'name' is given twice",
		"name a {\nx\n}":                         "option 'name' takes no block",
		"api_key":                                "option 'api_key' wants one value or more",
		`api_key secret ""`:                      "option 'api_key' wants one value or more, none of them empty",
		"deployments":                            "option 'deployments' wants one value or more",
		"deployments a\ndeployments b":           "option 'deployments' is given twice",
		"requests_per_minute many":               "option 'requests_per_minute' wants a whole number above 0, not 'many'",
		"requests_per_minute 0":                  "not '0'",
		"tokens_per_minute -1":                   "not '-1'",
		"tokens_per_minute 1.5":                  "not '1.5'",
		"ptu 99999999999999999999":               "option 'ptu' wants a whole number above 0",
		"request_window 60s":                     "request_window must be 1s or 10s, but is 1m0s",
		"request_window soon":                    "option 'request_window' wants a duration such as 250ms, not 'soon'",
		"output_ratio 0":                         "option 'output_ratio' wants a number above 0, not '0'",
		"bucket_seconds NaN":                     "not 'NaN'",
		"bucket_seconds Inf":                     "not 'Inf'",
		"hints azure":                            "option 'hints' is 'azure': want one of azure_ms, azure_both, azure_s, azure_none, azure_neg1, azure_day, date, openai_dur, garbage, negative, zero",
		"error_body json":                        "option 'error_body' is 'json': want one of azure_classic, ",
		"token_latency -1s":                      "option 'token_latency' wants a duration such as 250ms, not '-1s'",
		"token_latency 20":                       "not '20'",
		"fault":                                  "option 'fault' wants a value",
		"fault explode":                          "fault 'explode' is none of status:<code>[:<retry_after>], content_filter, ",
		"fault status":                           "fault 'status' wants a status from 400 to 599, not ''",
		"fault status:200":                       "not '200'",
		"fault truncate_rst":                     "fault 'truncate_rst' wants a number of events, not ''",
		"fault hang_after:-1":                    "not '-1'",
		"fault sse_error_first:server_error":     "fault 'sse_error_first' wants <type>:<code>, not 'server_error'",
		"fault reset:1":                          "fault 'reset' takes no argument, but has '1'",
		"fault reset often":                      "fault 'reset' wants to know on which requests: a whole number above 0, not 'often'",
		"fault reset 0":                          "not '0'",
		"fault reset 1 2":                        "spare argument '2' after option 'fault'",
		"allow_fault_header yes":                 "spare argument 'yes' after option 'allow_fault_header'",
		"allow_fault_header\nallow_fault_header": "option 'allow_fault_header' is given twice",
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

func TestEveryOptionAnErrorListsIsKnown(t *testing.T) {
	for _, name := range optionNames {
		err := new(Handler).UnmarshalCaddyfile(caddyfile.NewTestDispenser("openai_simulator {\n" + name + "\n}"))
		if err != nil && strings.Contains(err.Error(), "unknown option") {
			t.Errorf("%s is listed, but not known", name)
		}
	}
}
