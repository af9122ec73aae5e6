package tools_test

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/tools"
)

func apimFiles(t testing.TB) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/import/apim_*.[jx]*")
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	return files
}

// azure/import_test.go imports them in a build with azure_identity.
func TestAPoolOfAPIManagementBecomesACaddyfile(t *testing.T) {
	for _, file := range apimFiles(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			got, err := importOf(t, "apim", file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(got, "secret") {
				t.Errorf("a key is shown:\n%s", got)
			}
			wantGolden(t, strings.TrimSuffix(file, filepath.Ext(file))+".caddyfile", got)
			wantValid(t, got)
		})
	}
}

const poolOfTwo = `{"value": [
{"name": "a", "properties": {"url": "https://a.openai.azure.com/openai", "protocol": "http", "credentials": {"header": {"api-key": ["{{a-key}}"]}}}},
{"name": "b", "properties": {"url": "https://b.openai.azure.com/openai", "protocol": "http"}},
{"name": "c", "properties": {"url": "https://c.openai.azure.com/openai", "protocol": "http"}},
{"name": "one", "properties": {"pool": {"services": [{"id": "/backends/a"}, {"id": "/backends/b"}]}}},
{"name": "two", "properties": {"pool": {"services": [{"id": "/backends/c"}, {"id": "/backends/b"}]}}}
]}`

func policyOf(inbound string) string {
	return "<policies>\n<inbound>\n" + inbound + "\n</inbound>\n</policies>\n"
}

func TestThePolicyOrTheFlagNamesThePool(t *testing.T) {
	for _, c := range []struct{ flag, policy, hosts string }{
		{"one", "", "ab"},
		{"TWO", "", "cb"},
		{"", policyOf(`<set-backend-service backend-id="two" />`), "cb"},
		{"", policyOf(`<set-backend-service backend-id="b" />`), "b"},
		{"one", policyOf(`<set-backend-service backend-id="two" />`), "ab"},
		{"", policyOf(`<set-backend-service base-url="https://d.openai.azure.com/openai" />`), "d"},
		{"", policyOf(`<set-variable name="x" value="@{ return new JArray(new JObject() { { "backend-id", "c" }, {"priority", 1} }, new JObject() { {"backend-id", "a"}, { "priority", 2 } }); }" />`), "ca"},
	} {
		files := []tools.File{{Name: "backends.json", Text: []byte(poolOfTwo)}}
		if c.policy != "" {
			files = append(files, tools.File{Name: "policy.xml", Text: []byte(c.policy)})
		}
		got, err := tools.APIM(c.flag, files...)
		if err != nil {
			t.Errorf("%q: %v", c, err)
			continue
		}
		hosts := ""
		for _, line := range strings.Split(got, "\n") {
			if _, rest, ok := strings.Cut(line, "backend https://"); ok {
				hosts += rest[:1]
			}
		}
		if hosts != c.hosts {
			t.Errorf("%q: got %s\n%s", c, hosts, got)
		}
		wantValid(t, got)
	}
}

func TestARetryThatDoesNotReachAllBackendsBecomesAnOption(t *testing.T) {
	for count, want := range map[string]bool{"0": true, "1": false, "50": false} {
		got, err := tools.APIM("one", tools.File{Text: []byte(poolOfTwo)},
			tools.File{Text: []byte(`<policies><backend><retry count="` + count + `"><forward-request /></retry></backend></policies>`)})
		if err != nil || strings.Contains(got, "lb_retries "+count) != want {
			t.Errorf("%s: %v\n%s", count, err, got)
		}
	}
}

func TestAnEscapedPolicyIsTheSameAsOneThatIsNot(t *testing.T) {
	raw := lbtest.ReadFile(t, "testdata/import/apim_list.xml")
	want, err := tools.APIM("", tools.File{Text: raw})
	if err != nil {
		t.Fatal(err)
	}
	escaped := string(raw)
	for _, expression := range []string{`@("pool-" + context.Api.Id)`, `@(context.Variables.ContainsKey("listBackends") == false)`, `@((JArray)context.Variables["listBackends"])`,
		`@("Bearer " + (string)context.Variables["token"])`, `@(context.Response != null && context.Response.StatusCode >= 500)`,
		`@((string)context.Variables["backendUrl"])`, `@(context.Variables.GetValueOrDefault<string>("backendUrl", "none"))`} {
		escaped = strings.ReplaceAll(escaped, expression, escapedXML(expression))
	}
	for rest := escaped; ; {
		_, after, ok := strings.Cut(rest, `"@{`)
		if !ok {
			break
		}
		code, after, _ := strings.Cut(after, `}" />`)
		escaped = strings.Replace(escaped, code, strings.ReplaceAll(escapedXML(code), "&#xA;", "\n"), 1)
		rest = after
	}
	if err := xml.Unmarshal([]byte(escaped), new(struct{})); err != nil {
		t.Fatal(err)
	}
	if got, err := tools.APIM("", tools.File{Text: []byte(escaped)}); err != nil || got != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, got, want)
	}
}

func escapedXML(text string) string {
	var out bytes.Buffer
	_ = xml.EscapeText(&out, []byte(text)) // a buffer takes all
	return out.String()
}

func TestAMistakeInAFileOfAPIManagementNamesItsLine(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"", "backends.json: line 1: expected JSON, or the XML of a policy"},
		{"{\n\"a\":,\n}", "line 2: invalid character ','"},
		{"{}\n\n{}", "line 3: expected one JSON value"},
		{"[]", "line 1: expected backends of API Management"},
		{"{\"properties\": {\"url\": \"https://a.example\"}}", "line 1: expected backends of API Management"},
		{"<policies>\n<inbound>\n</policies>", "line 3: expected XML: element <inbound> closed by </policies>"},
		{"<fragment>\n</fragment>", "line 1: expected the element policies, and found 'fragment'"},
		{"<policies>\n<when condition=\"@(\"a\" />\n</policies>", "line 2: the expression has no end"},
		{"<policies a=\"<\">\n<!-- \n</policies>", "line 2: the comment has no end"},
		{"<policies>\x00</policies>", "line 1: expected XML: illegal character code"},
		{"<policies />", "expected a backend of API Management, or a policy with a list of backends"},
		{policyOf(`<set-backend-service backend-id="pool" />`), "the policy names the backend 'pool', which is not in the files"},
		{poolOfTwo, "there are several pools: name one of 'one', 'two' with --pool"},
		{`{"name":"a","properties":{"url":"ftp://secret:secret@a","protocol":"http"}}`, ""},
		{`{"name":"a","properties":{"url":"a","protocol":"http"}}`, "no backend can be imported\nthere is no pool, so each backend has the same priority\nthe backend 'a': url"},
		{`{"name":"a/p","properties":{"value":"<policies>\n<a>"}}`, "backends.json: the policy 'p': line 2: expected XML"},
	} {
		got, err := tools.APIM("", tools.File{Name: "backends.json", Text: []byte(c.text)})
		switch {
		case c.want == "" && (err != nil || strings.Contains(got, "secret")), c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%q: got %v, want %s\n%s", c.text, err, c.want, got)
		}
	}
	if _, err := tools.APIM("three", tools.File{Text: []byte(poolOfTwo)}); err == nil || err.Error() != "there is no pool 'three': expected one of 'one', 'two'" {
		t.Error(err)
	}
}

// FuzzAPIM imports any file: it is an error, or a Caddyfile.
func FuzzAPIM(f *testing.F) {
	for _, file := range apimFiles(f) {
		f.Add(lbtest.ReadFile(f, file))
	}
	f.Add([]byte(poolOfTwo))
	f.Add([]byte(policyOf(`<set-variable value='@{ new JObject() { {"url", "https://a.openai.azure.com"}, {"key", @"a""b" } } }' /><set-header name="-x"><value> a</value></set-header>`)))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, pool := range []string{"", "one"} {
			if got, err := tools.APIM(pool, tools.File{Name: "a", Text: text}); err == nil {
				wantAdapts(t, got)
			}
		}
	})
}

// FuzzAPIMTexts imports any texts: Caddy reads them as they are, or they are
// left out. A key is never shown.
func FuzzAPIMTexts(f *testing.F) {
	for _, text := range []string{"east", "{$HOME}", "{env.HOME}", "a b", "a\nb }", `"`, "`", `\`, "#", "é", "import", "}", "", "{{east-key}}", "{{-}}", "[parameters('1')]", "[x(')]", "https://a.openai.azure.com", "1", "@(x)"} {
		f.Add(text, text, text)
	}
	f.Fuzz(func(t *testing.T, name, url, value string) {
		const key = "sk-literal-0123456789"
		for _, s := range []string{name, url, value} {
			if strings.Contains(s, key) || !utf8.ValidString(s) {
				t.Skip()
			}
		}
		backends, err := json.Marshal(map[string]any{"value": []any{
			map[string]any{"name": name, "properties": map[string]any{"url": url, "protocol": "http", "tls": value,
				"credentials": map[string]any{"header": map[string]any{"api-key": []string{key}, "X-Team": value, value: url, "X-Token": key}}}},
			map[string]any{"name": "two", "properties": map[string]any{"url": "https://{{" + value + "}}/" + key, "protocol": "http",
				"credentials": map[string]any{"authorization": map[string]any{"scheme": "Bearer", "parameter": key}}}},
			map[string]any{"name": "pool", "properties": map[string]any{"pool": map[string]any{"services": []any{
				map[string]any{"id": name, "weight": value}, map[string]any{"id": "/x/two", "priority": value}}}}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		policy := policyOf(`<set-header name="` + escapedXML(value) + `"><value>` + escapedXML(url) + `</value></set-header><set-header name="X-Key"><value>` + key + `</value></set-header>` +
			`<authentication-managed-identity client-id="` + escapedXML(value) + `" /><llm-token-limit tokens-per-minute="` + escapedXML(value) + `" />`)
		got, err := tools.APIM("pool", tools.File{Name: name, Text: backends}, tools.File{Text: []byte(policy)})
		if err != nil {
			t.Fatalf("%v\n%s\n%s", err, backends, policy)
		}
		if strings.Contains(got, key) {
			t.Errorf("a key is shown:\n%s", got)
		}
		wantAdapts(t, got)
	})
}
