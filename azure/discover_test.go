package azure

import (
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// contoso has accounts of both kinds, and what an account may have besides
// deployments for a balancer.
func contoso(t *testing.T) *fakeARM {
	f := newFakeARM(t)
	f.account("OpenAI", "contoso-east", openAI, strings.Join([]string{
		deployed("chat", "GlobalStandard", 300, "gpt-5.5", "2026-03-05"),
		deployed("ptu", "ProvisionedManaged", 100, "gpt-5.5", "2026-03-05"),
		deployed("embed", "Standard", 120, "text-embedding-3-small", "1"),
		deployed("night", "GlobalBatch", 500, "gpt-5.5", "2026-03-05"),
		strings.Replace(deployed("broken", "Standard", 1, "gpt-5.5", "2026-03-05"), "Succeeded", "Failed", 1),
	}, ","), model("gpt-5.5", "2026-03-05", inDays(400), inDays(90))+","+model("gpt-5.5", "2025-01-01", inDays(-400), inDays(-400)))
	f.account("OpenAI", "contoso-empty", openAI, "", "")
	f.account("AIServices", "contoso-ai", foundry, strings.Join([]string{
		deployed("gpt-5.5", "DataZoneStandard", 200, "gpt-5.5", "2026-03-05"),
		deployed("zone-ptu", "DataZoneProvisionedManaged", 15, "gpt-5.5", "2026-03-05"),
		deployed("global-ptu", "GlobalProvisionedManaged", 50, "gpt-5.6-luna", "2026-09-09"),
		deployed("whisper", "Standard", 3, "whisper", "001"),
	}, ","), model("gpt-5.6-luna", "2026-09-09", "", ""))
	f.account("SpeechServices", "contoso-speech", `"endpoint":"https://eastus2.api.cognitive.microsoft.com/"`, "", "")
	return f
}

// passes fails the test unless a Caddyfile is formatted and valid.
func passes(t *testing.T, text string) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "Caddyfile")
	lbtest.WriteFile(t, file, text)
	for _, command := range [][]string{{"fmt", "--diff", file}, {"validate", "--config", file}} {
		if out, complaints, status := caddyCommand(t, command...); status != 0 {
			t.Errorf("caddy %s: status %d\n%s%s\n%s", command[0], status, out, complaints, text)
		}
	}
	return file
}

func TestDiscoverPrintsACaddyfileOfTheDeployments(t *testing.T) {
	f := contoso(t)
	out, complaints, status := f.discover(t)
	if status != 0 || complaints != "" {
		t.Fatalf("status %d, %s", status, complaints)
	}
	global, general := inDays(90)[:10], inDays(400)[:10]
	limits := func(n string) string { return n + " requests in 10 s, " + n + "000 tokens in 60 s, eastus2" }
	auth := "\n\t\t\tauth azure_identity\n"
	want := `# Made by caddy openai-lb discover of subscription ` + subscription + `.
# Clients name the model, and each deployment of it may serve them. Deployments with provisioned throughput are first,
# and the others share the rest by their capacity. Add a client_key for each caller: without one, anyone who can
# reach this address can spend your budget.
#
# Not here:
# - contoso-east/broken (gpt-5.5 2026-03-05, Standard): its state is Failed
# - contoso-east/night (gpt-5.5 2026-03-05, GlobalBatch): it serves batches only
# - contoso-empty has no deployments

:8080 {
	openai_lb {
		# gpt-5.5 2026-03-05, DataZoneProvisionedManaged, 15 units, ` + limits("15") + `
		backend https://contoso-ai.openai.azure.com {
			name contoso-ai-zone-ptu
			priority 1
			weight 3` + auth + `			model gpt-5.5 zone-ptu
		}
		# gpt-5.5 2026-03-05, ProvisionedManaged, 100 units, ` + limits("100") + `, retires on ` + general + `
		backend https://contoso-east.openai.azure.com {
			name contoso-east-ptu
			priority 1
			weight 20` + auth + `			model gpt-5.5 ptu
		}
		# gpt-5.6-luna 2026-09-09, GlobalProvisionedManaged, 50 units, ` + limits("50") + `
		backend https://contoso-ai.openai.azure.com {
			name contoso-ai-global-ptu
			priority 1` + auth + `			model gpt-5.6-luna global-ptu
		}
		# gpt-5.5 2026-03-05, DataZoneStandard, capacity 200, ` + limits("200") + `
		backend https://contoso-ai.openai.azure.com {
			name contoso-ai-gpt-5.5
			priority 2
			weight 2` + auth + `			model gpt-5.5
		}
		# gpt-5.5 2026-03-05, GlobalStandard, capacity 300, ` + limits("300") + `, retires on ` + global + `
		backend https://contoso-east.openai.azure.com {
			name contoso-east-chat
			priority 2
			weight 3` + auth + `			model gpt-5.5 chat
		}
		# text-embedding-3-small 1, Standard, capacity 120, ` + limits("120") + `
		backend https://contoso-east.openai.azure.com {
			name contoso-east-embed
			priority 2` + auth + `			model text-embedding-3-small embed
		}
		# whisper 001, Standard, capacity 3, ` + limits("3") + `
		backend https://contoso-ai.openai.azure.com {
			name contoso-ai-whisper
			priority 2` + auth + `			model whisper
		}
	}
}
`
	if out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
	file := passes(t, out)
	if out, complaints, status := f.discover(t, "--check", file); out != "No difference\n" || status != 0 {
		t.Errorf("of its own Caddyfile, --check says %d, %s%s", status, out, complaints)
	}
	if got := resource(f.tokens.received()[0]); got != f.URL {
		t.Errorf("the token is for %s, want %s", got, f.URL)
	}
	var asked []string
	f.set(func() { asked = f.requests })
	for _, path := range asked {
		if strings.Contains(path, "contoso-speech") || strings.Contains(path, "contoso-empty/models") {
			t.Errorf("it asked for %s", path)
		}
	}
}

func TestDiscoverReadsOneResourceGroup(t *testing.T) {
	f := newFakeARM(t)
	f.account("OpenAI", "a", openAI, deployed("d", "Standard", 1, "m", "1"), "")
	f.set(func() { f.lists["/subscriptions/"+subscription+provider] = []any{"of another group"} })
	out, _, status := f.discover(t, "--resource-group", "rg-one")
	if status != 0 || !strings.Contains(out, "of resource group rg-one of subscription "+subscription+".\n") || !strings.Contains(out, "\tmodel m d\n") {
		t.Errorf("status %d, %s", status, out)
	}
}

// TestOddNamesAreWrittenOrLeftOut has names that Azure would refuse: a
// Caddyfile must not get a line of them.
func TestOddNamesAreWrittenOrLeftOut(t *testing.T) {
	f := newFakeARM(t)
	f.account("OpenAI", "a", openAI, strings.Join([]string{
		deployed("with space", "Standard", 1, "m", "1"), deployed(`quo"te`, "Standard", 1, "m", "1"), deployed("ünïcödé", "Standard", 1, "m", "1"),
		deployed("x\n}\nimport /etc/passwd", "Standard", 1, "m", "1"), deployed("{env.HOME}", "Standard", 1, "m", "1"), deployed("{$HOME}", "Standard", 1, "m", "{$HOME}\n:80"),
		deployed("\x1b[2J", "Standard", 1, "m", "1"), deployed("star", "Standard", 1, "gpt-*", "1"), deployed("", "Standard", 1, "m", "1"), deployed("#no", "Standard", 1, "m", "1"),
		deployed("Twin", "Standard", 1, "m", "1"), deployed("Twin", "Standard", 1, "other", "1"), deployed("none", "Standard", 0, "", ""), "null",
	}, ","), "null")
	f.account("OpenAI", "regional", `"endpoint":"https://eastus2.api.cognitive.microsoft.com/","customSubDomainName":null`, deployed("d", "Standard", 1, "m", "1"), "")
	out, _, status := f.discover(t)
	if status != 0 {
		t.Fatalf("status %d", status)
	}
	passes(t, out)
	head, body, _ := strings.Cut(out, "\n:8080 {")
	for _, want := range []string{"model m \"with space\"\n", "model m `quo\"te`\n", "name a-Twin\n", "name a-Twin-2\n", "model m \"ünïcödé\"\n", "model m \"#no\"\n"} {
		if !strings.Contains(body, want) {
			t.Errorf("there is no %q in\n%s", want, out)
		}
	}
	for _, no := range []string{"import", "env.HOME", "$HOME", "gpt-*", "\x1b", "none", "regional"} {
		if strings.Contains(body, no) {
			t.Errorf("there is %q in\n%s", no, body)
		}
	}
	if n := strings.Count(head, "\n# - "); n != 8 || !strings.Contains(head, "# - regional/d (m 1, Standard): its account has no custom subdomain") {
		t.Errorf("%d are left out: %s", n, head)
	}
}

func TestACheckFindsEachDifference(t *testing.T) {
	f := newFakeARM(t)
	f.account("OpenAI", "east", openAI, strings.Join([]string{
		deployed("served", "GlobalStandard", 1, "long", "1"), deployed("forgotten", "Standard", 1, "long", "1"), deployed("soon", "GlobalStandard", 1, "soon", "1"),
		deployed("later", "Standard", 1, "soon", "1"), deployed("gone", "Standard", 1, "gone", "1"), deployed("night", "DataZoneBatch", 1, "long", "1"),
		strings.Replace(deployed("moving", "Standard", 1, "long", "1"), "Succeeded", "Moving", 1),
	}, ","), strings.Join([]string{model("soon", "1", inDays(61), inDays(59)), model("gone", "1", inDays(-1), ""), model("long", "1", "", "odd"), model("long", "2", inDays(1), "")}, ","))
	f.account("AIServices", "all", foundry, deployed("a", "Standard", 1, "long", "1")+","+deployed("b", "Standard", 1, "long", "1"), "")
	const auth = "\nauth azure_identity\n"
	found, complaints, status := f.check(t, `
		backend https://EAST.openai.azure.com {
			name one`+auth+`
			model long SERVED
			model soon
			model late later
			model lost
			model gone
			model moving
		}
		backend https://all.services.ai.azure.com {
			name any`+auth+`
		}
		backend https://west.openai.azure.com {
			name other`+auth+`
			deployment d
		}
		backend https://api.openai.com/v1 {
			api_key sk-KEY-OF-OPENAI
			model whatever
		}`)
	want := []string{
		"backend 'one' of pool 'llm': the account east has no deployment 'lost'",
		"backend 'one' of pool 'llm': the deployment 'moving' cannot serve: its state is Moving",
		"backend 'other' of pool 'llm': no account has the host west.openai.azure.com",
		"deployment east/forgotten (long 1, Standard): no backend serves it",
		"deployment east/gone (gone 1, Standard): its model retired on " + inDays(-1)[:10],
		"deployment east/soon (soon 1, GlobalStandard): its model retires on " + inDays(59)[:10],
	}
	if slices.Sort(found); status != 1 || !slices.Equal(found, want) {
		t.Errorf("status %d, got\n%s\nwant\n%s", status, strings.Join(found, "\n"), strings.Join(want, "\n"))
	}
	if !strings.HasSuffix(complaints, "Error: differences: 6\n") || strings.Contains(complaints, "sk-KEY") {
		t.Errorf("it says %s", complaints)
	}
}

// TestACheckNeedsNoSecrets has a Caddyfile whose variables are not set, as in
// CI.
func TestACheckNeedsNoSecrets(t *testing.T) {
	f := newFakeARM(t)
	f.account("OpenAI", "east", openAI, deployed("d", "Standard", 1, "m", "1"), "")
	found, complaints, status := f.check(t, "client_keys_file /no/such/file\nbackend https://east.openai.azure.com {\napi_key {env.DISCOVER_UNSET}\nmodel m d\n}")
	if status != 0 || !slices.Equal(found, []string{"No difference"}) {
		t.Errorf("status %d, %s, %s", status, found, complaints)
	}
	for _, url := range []string{"{env.DISCOVER_UNSET}", "https://{env.DISCOVER_UNSET}.openai.azure.com"} {
		if _, complaints, status := f.check(t, "backend "+url+" {\nname e\nauth azure_identity\n}"); status != 2 || !strings.Contains(complaints, "Error: backend 'e' of pool 'llm': its url or a model has a variable or a file that is not set here") {
			t.Errorf("status %d, %s", status, complaints)
		}
	}
}

func TestAnErrorOfDiscoverHasItsOwnStatus(t *testing.T) {
	f := contoso(t)
	refuse := func(status int, body string) func(http.ResponseWriter, *http.Request, int) bool {
		return func(w http.ResponseWriter, r *http.Request, _ int) bool { errorReply(status, body)(w, r); return true }
	}
	link := func(to string) func(http.ResponseWriter, *http.Request, int) bool {
		return refuse(200, `{"value":[],"nextLink":"`+to+`"}`)
	}
	other := newWitness(t)
	for _, c := range []struct {
		name  string
		reply func(http.ResponseWriter, *http.Request, int) bool
		args  []string
		want  string
	}{
		{"no role", refuse(403, `{"error":{"code":"AuthorizationFailed","message":"The client 'a' with object id 'b' does not have authorization to perform action 'Microsoft.CognitiveServices/accounts/read' over scope '/subscriptions/x'."}}`), nil,
			"403 Forbidden, AuthorizationFailed, The client 'a' with object id 'b' does not have authorization"},
		{"a token that is not accepted", refuse(401, `{"error":{"code":"InvalidAuthenticationToken","message":"The token `+tokenNumber(1)+` is bad."}}`), nil, "401 Unauthorized, InvalidAuthenticationToken, The token … is bad."},
		{"no such subscription", refuse(404, `{"error":{"code":"SubscriptionNotFound","message":"The subscription could not be found."}}`), nil, "404 Not Found, SubscriptionNotFound"},
		{"a page of HTML", refuse(200, `<html>`), nil, "the reply is not a list"},
		{"an account that is none", refuse(200, `{"value":[{"kind":"OpenAI","name":"x","id":"/../secrets"}]}`), nil, "the account x has an id that is not one"},
		{"a redirect", func(w http.ResponseWriter, r *http.Request, _ int) bool {
			http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
			return true
		}, nil, "307 Temporary Redirect"},
		{"a link to another host", link(other.URL + "/x"), nil, "nextLink leads to another host: expected 127.0.0.1"},
		{"a link without TLS", link(strings.Replace(f.URL, "https:", "http:", 1)), nil, "nextLink leads to another host"},
		{"a link without an end", link(f.URL + "/x?api-version=2025-06-01"), nil, "has more than 1000 pages"},
		{"a pause that is too long", func(w http.ResponseWriter, r *http.Request, _ int) bool {
			w.Header().Set("Retry-After", "3600")
			return refuse(429, `{"error":{"code":"TooManyRequests","message":"Slow down."}}`)(w, r, 0)
		}, nil, "429 Too Many Requests, TooManyRequests, Slow down., and to wait for 1h0m0s would take longer than --timeout allows"},
		{"no such file", nil, []string{"--check", "/no/such/Caddyfile"}, "no such file or directory"},
		{"an unknown flag", nil, []string{"--sub", "x"}, "unknown flag: --sub"},
		{"an argument", nil, []string{"x"}, `unknown command "x"`},
		{"a secret in the arguments", nil, []string{"--credential", "client_secret", "--client-secret", clientSecret}, "client-secret must be {env.X} or {file./path}"},
		{"a timeout", nil, []string{"--timeout", "0s"}, "timeout '0s' is not a duration above 0"},
		{"a wrong credential", nil, []string{"--credential", "password"}, "credential 'password' is not one of default, managed_identity"},
		{"a URL of ARM with a path", nil, []string{"--arm-endpoint", "https://x/y"}, "arm-endpoint 'https://x/y': expected an https URL without a path, like https://management.azure.com"},
		{"ARM without TLS", nil, []string{"--arm-endpoint", "http://x"}, "arm-endpoint 'http://x': expected an https URL"},
		{"two subscriptions and a group", nil, []string{"--subscription", "x", "--resource-group", "g"}, "resource-group requires exactly one subscription"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.set(func() { f.reply = c.reply })
			out, complaints, status := f.discover(t, c.args...)
			if status != 2 || out != "" || !strings.HasPrefix(complaints, "Error: ") || !strings.Contains(complaints, c.want) || strings.Count(complaints, "\n") > 1 {
				t.Errorf("status %d, %s\n%s\nwant %s", status, out, complaints, c.want)
			}
		})
	}
	if n := len(other.take()); n > 0 {
		t.Errorf("another host got %d requests", n)
	}
	if _, complaints, status := caddyCommand(t, "openai-lb", "discover"); status != 2 || complaints != "Error: subscription is required: expected --subscription <id>\n" {
		t.Errorf("status %d, %s", status, complaints)
	}
	f.tokens.set(func() {
		f.tokens.fail = errorReply(400, `{"error":"invalid_request","error_description":"Identity not found"}`)
	})
	if _, complaints, status := f.discover(t); status != 2 || !strings.Contains(complaints, "could not get a token for "+f.URL+"/.default: ") {
		t.Errorf("status %d, %s", status, complaints)
	}
}

// TestTheEndpointIsThatOfTheCloud checks where a token goes, and for what it is
// requested.
func TestTheEndpointIsThatOfTheCloud(t *testing.T) {
	clearEnv(t)
	for _, c := range []struct {
		d               discovery
		endpoint, scope string
	}{
		{discovery{}, "https://management.azure.com", "https://management.azure.com/.default"},
		{discovery{Credentials: Credentials{Cloud: "government"}}, "https://management.usgovcloudapi.net", "https://management.usgovcloudapi.net/.default"},
		{discovery{Credentials: Credentials{Cloud: "china"}}, "https://management.chinacloudapi.cn", "https://management.chinacloudapi.cn/.default"},
		{discovery{Credentials: Credentials{AuthorityHost: "https://login.example", Scope: "https://arm.example/x/.default"}, endpoint: "https://arm.example/"}, "https://arm.example/", "https://arm.example/x/.default"},
	} {
		s, endpoint, err := c.d.target()
		if err != nil || endpoint.String() != c.endpoint || s.scope != c.scope || s.otherScope != "" {
			t.Errorf("got %v, %s, %s, want %s, %s", endpoint, s.scope, err, c.endpoint, c.scope)
		}
	}
	if got := strings.Join((&discovery{Credentials: Credentials{Cloud: "china"}}).auth(), "\n"); got != "auth azure_identity {\n\tcloud china\n}" {
		t.Errorf("got %s", got)
	}
}

// TestTheREADMEHasTheFlagsOfDiscover keeps the page and the command together.
func TestTheREADMEHasTheFlagsOfDiscover(t *testing.T) {
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	help, _, _ := caddyCommand(t, "openai-lb", "discover", "--help")
	for _, flag := range []string{"subscription", "resource-group", "check", "arm-endpoint", "timeout"} {
		if !regexp.MustCompile("--"+flag+" ").MatchString(help) || !strings.Contains(string(page), "`--"+flag) {
			t.Errorf("the help or the page lacks --%s", flag)
		}
	}
}
