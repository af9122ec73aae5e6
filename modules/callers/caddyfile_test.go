package callers_test

import (
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }

func TestAWrongOptionOfACallerIsRefusedByLineAndValue(t *testing.T) {
	for _, c := range []struct {
		name  string
		block string
		want  []string
	}{
		{"a word that is not an option", "backend http://a\nbackends http://b", []string{"Caddyfile:4", "caller, caller_identity, callers_file, client_key", "tier, timezone, "}},
		{"a limit of 0", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nrequests 0/minute\n}", []string{"Caddyfile:6", "0/minute", "expected <number>/<unit>, such as 200k/minute, with a whole number from 1 to 10^15, which may end in k, M or G, and the unit second, minute, hour, day or month"}},
		{"a limit of a negative number", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nrequests -1/minute\n}", []string{"Caddyfile:6", "-1/minute", "expected <number>/<unit>, such as 200k/minute, with a whole number from 1 to 10^15, which may end in k, M or G, and the unit second, minute, hour, day or month"}},
		{"a limit of too much", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nrequests 1001000G/minute\n}", []string{"Caddyfile:6", "1001000G/minute", "expected <number>/<unit>, such as 200k/minute, with a whole number from 1 to 10^15, which may end in k, M or G, and the unit second, minute, hour, day or month"}},
		{"a limit of an unknown unit", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nrequests 5/week\n}", []string{"Caddyfile:6", "5/week", "expected <number>/<unit>, such as 200k/minute, with a whole number from 1 to 10^15, which may end in k, M or G, and the unit second, minute, hour, day or month"}},
		{"a limit of no unit", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nrequests 5\n}", []string{"Caddyfile:6", "5", "expected <number>/<unit>, such as 200k/minute, with a whole number from 1 to 10^15, which may end in k, M or G, and the unit second, minute, hour, day or month"}},
		{"the same limit twice", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\ntokens 5/day\ntokens 6/day\n}", []string{"Caddyfile:7", "caller 'alice': tokens per day is given twice: '6/day'"}},
		{"a limit and a word", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\ntokens 5/day o3 x\n}", []string{"Caddyfile:6", "tokens '5/day': unexpected argument 'x' after the model 'o3', expected 'then <tier>'"}},
		{"a limit of two models", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\ntokens 5/day o3 gpt-4o\n}", []string{"Caddyfile:6", "tokens '5/day': unexpected argument 'gpt-4o' after the model 'o3', expected 'then <tier>'"}},
		{"a limit of a model then nothing", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\ntokens 5/day o3 then\n}", []string{"Caddyfile:6", "expected the name of a tier after then"}},
		{"the same limit of a model twice", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\ntokens 5/day\ntokens 5/day o3\ntokens 6/day o3\n}", []string{"Caddyfile:8", "caller 'alice': tokens per day of o3 is given twice: '6/day'"}},
		{"a limit of a model that no backend has", "backend http://a {\nmodel gpt-4o\n}\nclient_key alice sk-0123456789abcdef\ncaller alice {\ntokens 5/day o3\n}", []string{"Caddyfile:7", "caller 'alice': no backend has the model 'o3': expected some of gpt-4o"}},
		{"a limit of a tier of a model that no backend of the tier has", "backend http://a {\nmodel gpt-4o\n}\nbackend http://b {\nmodel o3\n}\nclient_key alice sk-0123456789abcdef\ntier x {\nbackends a\nrequests 5/day o3\n}", []string{"Caddyfile:10", "tier 'x': no backend that it may use has the model 'o3': expected some of gpt-4o"}},
		{"a limit then nothing", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\ntokens 5/day then\n}", []string{"Caddyfile:6", "expected the name of a tier after then"}},
		{"a limit then no tier", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller bob {\n}\ncaller alice {\ntokens 5/day then x\n}\ncaller * {\n}\ntier y", []string{"Caddyfile:7", "caller 'alice': tokens 5/day then x: tier 'x' is not declared: expected one of y"}},
		{"a tier that is not declared", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\ntier x\n}", []string{"Caddyfile:5", "caller 'alice': tier 'x' is not declared: expected 'tier x' in openai_lb"}},
		{"a caller twice", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\n}\ncaller alice {\n}", []string{"Caddyfile:7", "caller 'alice' is given twice"}},
		{"a model twice", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nmodels x x\n}", []string{"Caddyfile:5", "caller 'alice': model 'x' is given twice"}},
		{"a service tier that is not known", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nservice_tiers flex standard\n}", []string{"Caddyfile:5", "caller 'alice': service tier 'standard' is not known: expected some of auto, default, flex, fast, priority, ultrafast"}},
		{"a service tier twice", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nservice_tiers flex flex\n}", []string{"Caddyfile:5", "caller 'alice': service tier 'flex' is given twice"}},
		{"a caller without a name", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller", []string{"Caddyfile:5", "caller requires an argument"}},
		{"an unknown word of a caller", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nbudget 5\n}", []string{"Caddyfile:6", "'budget'", "backends, max_requests, models, requests, service_tiers, tier, tokens"}},
		{"an unknown word after a caller", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller * refuse", []string{"Caddyfile:5", "caller '*': unexpected argument 'refuse', expected deny or a block"}},
		{"deny and a limit", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller * deny {\nmax_requests 1\n}", []string{"Caddyfile:5", "caller '*': deny excludes all other options"}},
		{"max_requests of a caller of 0", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nmax_requests 0\n}", []string{"Caddyfile:6", "max_requests '0' is not a whole number of 1 or more"}},
		{"a share above 100 %", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x {\nreserve 101%\n}", []string{"Caddyfile:6", "tier 'x': reserve '101%' is not a percentage from 1% to 100%"}},
		{"a share without %", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x {\nreserve 80\n}", []string{"Caddyfile:6", "tier 'x': reserve '80' is not a percentage from 1% to 100%, such as 80%"}},
		{"no share", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x {\nreserve\n}", []string{"Caddyfile:6", "reserve requires a percentage such as 50%"}},
		{"a share twice", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x {\nreserve 10%\nreserve 20%\n}", []string{"Caddyfile:7", "reserve"}},
		{"shares of more than all", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x {\nreserve 60%\n}\ntier y {\nreserve 41%\n}", []string{"Caddyfile:9", "tier 'y': reserve '41%' makes the shares of all tiers 101%, expected at most 100%"}},
		{"a share of a caller", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller x {\nreserve 60%\n}", []string{"Caddyfile:6", "'reserve'"}},
		{"a share without client keys", "backend http://a\ntier x {\nreserve 60%\n}", []string{"Caddyfile:4", "tier 'x' requires client_key, client_keys_file or caller_identity"}},
		{"a ceiling", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x 80%", []string{"Caddyfile:5", "tier 'x': unexpected argument '80%', expected [default]"}},
		{"a tier twice", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x\ntier x", []string{"Caddyfile:6", "tier 'x' is given twice"}},
		{"nine tiers", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier t0\ntier t1\ntier t2\ntier t3\ntier t4\ntier t5\ntier t6\ntier t7\ntier t8\n", []string{"Caddyfile:13", "tier 't8': expected at most 8 tiers"}},
		{"an unknown timezone", "backend http://a\nclient_key alice sk-0123456789abcdef\ntimezone Europe/Nowhere", []string{"Caddyfile:5", "timezone 'Europe/Nowhere' is not known: expected a name of the IANA database, such as UTC or Europe/Berlin"}},
		{"a caller without client keys", "backend http://a\ncaller alice {\n}", []string{"Caddyfile:4", "caller 'alice' requires client_key, client_keys_file or caller_identity"}},
		{"a model that no backend has", "backend http://a {\nmodel gpt-4o\n}\nclient_key alice sk-0123456789abcdef\ncaller alice {\nmodels gpt-4o o3\n}", []string{"Caddyfile:7", "caller 'alice': no backend has the model 'o3': expected some of gpt-4o"}},
		{"a backend of a caller that there is not", "backend http://a {\nname ptu-1\n}\nbackend http://b\nbackend http://b\nclient_key alice sk-0123456789abcdef\ncaller alice {\nbackends ptu-* b-2 east-*\n}", []string{"Caddyfile:9", "caller 'alice': no backend has the name 'east-*': expected some of ptu-1, b, b-2, or a name with *"}},
		{"a backend of a caller twice", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nbackends a a\n}", []string{"Caddyfile:5", "caller 'alice': backend 'a' is given twice"}},
		{"no backend of a caller", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice {\nbackends\n}", []string{"Caddyfile:6", "backends requires"}},
		{"a model that no backend of the caller has", "backend http://a {\nmodel gpt-4o\n}\nbackend http://b {\nmodel o3\n}\nclient_key alice sk-0123456789abcdef\ncaller alice {\nbackends a\nmodels gpt-4o o3\n}", []string{"Caddyfile:10", "caller 'alice': no backend that it may use has the model 'o3': expected some of gpt-4o"}},
		{"backends of a caller that is denied", "backend http://a\nclient_key alice sk-0123456789abcdef\ncaller alice deny {\nbackends a\n}", []string{"Caddyfile:5", "caller 'alice': deny excludes all other options"}},
		{"a limit of a tier of 0", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x {\ntokens 0/minute\n}", []string{"Caddyfile:6", "0/minute", "expected <number>/<unit>"}},
		{"the same limit of a tier twice", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x {\ntokens 5/day\ntokens 6/day\n}", []string{"Caddyfile:7", "tier 'x': tokens per day is given twice: '6/day'"}},
		{"a limit of a tier then no tier", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x\ntier y {\ntokens 5/day then z\n}", []string{"Caddyfile:6", "tier 'y': tokens 5/day then z: tier 'z' is not declared: expected one of x, y"}},
		{"a tier of a tier", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x {\ntier y\n}", []string{"Caddyfile:6", "'tier'", "backends, max_requests, models, requests, reserve, service_tiers, tokens"}},
		{"a backend of a tier that there is not", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x {\nbackends b\n}", []string{"Caddyfile:5", "tier 'x': no backend has the name 'b': expected some of a, or a name with *"}},
		{"two default tiers", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x default\ntier y default", []string{"Caddyfile:6", "tier 'y': default is given twice: also for tier 'x'"}},
		{"another word after a tier", "backend http://a\nclient_key alice sk-0123456789abcdef\ntier x default gold", []string{"Caddyfile:5", "tier 'x': unexpected argument 'gold', expected [default]"}},
		{"a tier without a name", "backend http://a\ntier", []string{"Caddyfile:4", "tier requires an argument"}},
		{"limits of a tier without client keys", "backend http://a\ntier x {\nmax_requests 1\n}", []string{"Caddyfile:4", "tier 'x' requires client_key, client_keys_file or caller_identity"}},
		{"a caller's limit without a number", "backend http://a\ncaller a {\ntokens\n}", []string{"Caddyfile:5", "tokens requires a limit such as 600/minute, an optional model and an optional 'then <tier>', and has 0 arguments"}},
	} {
		lbtest.WantRefused(t, c.name, c.block, c.want...)
	}
}

func TestAWrongOptionOfACallerInJSONIsRefusedByNameAndValue(t *testing.T) {
	for options, want := range map[string]string{
		`"callers":[{"name":"alice"}]`:        "caller 'alice' requires client_key, client_keys_file or caller_identity",
		`"tiers":[{"name":"x","reserve":0}]`:  "tier 'x': reserve '0%' is not from 1% to 100%",
		`"tiers":[{"name":"x","ceiling":60}]`: "unknown field \"ceiling\"",
		`"timezone":"Local"`:                  "timezone 'Local' is not known",
		`"client_keys":[{"name":"alice","key":"sk-0123456789abcdef"}],"callers":[{"name":"alice","tokens":[{"limit":"1/day"},{"limit":"2/day"}]}]`: "caller 'alice': tokens per day is given twice: '2/day'",
		`"client_keys":[{"name":"alice","key":"sk-0123456789abcdef"}],"callers":[{"name":"alice","max_requests":-1}]`:                              "caller 'alice': max_requests '-1' is not a whole number of 1 or more",
		`"client_keys":[{"name":"alice","key":"sk-0123456789abcdef"}],"callers":[{"name":"alice","models":[]}]`:                                    "caller 'alice': models is an empty list: expected at least one name",
		`"client_keys":[{"name":"alice","key":"sk-0123456789abcdef"}],"callers":[{"name":"alice","service_tiers":[]}]`:                             "caller 'alice': service_tiers is an empty list: expected at least one name",
		`"client_keys":[{"name":"alice","key":"sk-0123456789abcdef"}],"callers":[{"name":"alice","backends":[]}]`:                                  "caller 'alice': backends is an empty list: expected at least one name",
		`"client_keys":[{"name":"alice","key":"sk-0123456789abcdef"}],"callers":[{"name":"alice","backends":["b"]}]`:                               "caller 'alice': no backend has the name 'b': expected some of a, or a name with *",
		`"client_keys":[{"name":"alice","key":"sk-0123456789abcdef"}],"callers":[{"name":"alice","backends":[""]}]`:                                "caller 'alice': backends has an empty name",
		`"client_keys":[{"name":"alice","key":"sk-0123456789abcdef"}],"tiers":[{"name":"x","backends":[]}]`:                                        "tier 'x': backends is an empty list: expected at least one name",
	} {
		handler := `{"handler":"openai_lb","backends":[{"url":"http://a"}],` + options + `}`
		err := lbtest.Validate(t, `{"apps":{"http":{"servers":{"x":{"listen":[":0"],"routes":[{"handle":[`+handler+`]}]}}}}}`)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s gives %v, want %q", handler, err, want)
		}
	}
}

func TestALineOfAClientKeysFileNamesOneDeclaredTier(t *testing.T) {
	for _, c := range []struct{ tiers, lines, want string }{
		{"tier gold\ntier bronze\n", "x sk-secret-of-bobs-key tier=gold\ny sk-secret-of-alice tier=silver\n", "line 2: its tier is not declared: expected one of gold, bronze"},
		{"tier gold\ntier bronze\n", "x sk-secret-of-bobs-key tier=gold\nx sk-secret-of-bobs-too\nx sk-secret-of-bobs-new tier=bronze\n", `line 3: "x" has another tier in a line before`},
		{"tier gold\n", "x sk-secret-of-bobs-key tier=gold tier=gold\n", "line 1: expected a name, a key and at most tier=<name>"},
	} {
		file := t.TempDir() + "/keys"
		lbtest.WriteFile(t, file, c.lines)
		err := lbtest.ValidateCaddyfile(t, ":0 {\nopenai_lb {\nbackend http://a\n"+c.tiers+"client_keys_file "+file+"\n}\n}\n")
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "sk-secret") {
			t.Errorf("%q: got %v, want %q", c.lines, err, c.want)
		}
	}
}

func TestACallersFileThatDoesNotExistIsRefusedByLine(t *testing.T) {
	const config = "http://localhost:80 {\nopenai_lb {\nbackend http://a\nclient_key alice sk-0123456789abcdef\ncallers_file /no/such/file\n}\n}\n"
	const want = ": callers_file: open /no/such/file: no such file or directory, at Caddyfile:5"
	if err := lbtest.ValidateCaddyfile(t, config); err == nil || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}
