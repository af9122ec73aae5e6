package tools_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/tools"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { lbtest.Main(m) }

// importOf runs `caddy openai-lb import`.
func importOf(t *testing.T, args ...string) (string, error) {
	t.Helper()
	c := cobra.Command{SilenceUsage: true}
	caddycmd.Commands()["openai-lb"].CobraFunc(&c)
	var out bytes.Buffer
	c.SetOut(&out)
	c.SetErr(new(bytes.Buffer))
	c.SetArgs(append([]string{"import"}, args...))
	err := c.Execute()
	return out.String(), err
}

var variable = regexp.MustCompile(`\{env\.([A-Za-z0-9_]+)\}`)

// wantValid checks that Caddy accepts a file once its variables are set, and
// that `caddy fmt` leaves it as it is.
func wantValid(t *testing.T, text string) {
	t.Helper()
	if formatted := string(caddyfile.Format([]byte(text))); formatted != text {
		t.Errorf("caddy fmt changes\n%s\nto\n%s", text, formatted)
	}
	for _, match := range variable.FindAllStringSubmatch(text, -1) {
		value := "a-key-of-sixteen-characters-" + match[1]
		if strings.HasSuffix(match[1], "_URL") || strings.HasSuffix(match[1], "_API_BASE") {
			value = "https://" + strings.ToLower(strings.ReplaceAll(match[1], "_", "-")) + ".example"
		}
		if os.Getenv(match[1]) == "" {
			t.Setenv(match[1], value)
		}
	}
	if err := lbtest.ValidateCaddyfile(t, text); err != nil {
		t.Errorf("%v\n%s", err, text)
	}
}

func wantGolden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		lbtest.WriteFile(t, file, got)
	}
	if want := string(lbtest.ReadFile(t, file)); got != want {
		t.Errorf("%s: got\n%s\nwant\n%s", file, got, want)
	}
}

func TestALiteLLMFileBecomesACaddyfile(t *testing.T) {
	files, err := filepath.Glob("testdata/import/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			got, err := importOf(t, "litellm", file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(strings.ToLower(got), "secret-") || strings.Contains(got, "73g") || strings.Contains(got, "fake-key") {
				t.Errorf("a key is shown:\n%s", got)
			}
			wantGolden(t, strings.TrimSuffix(file, ".yaml")+".caddyfile", got)
			wantValid(t, got)
		})
	}
}

// valuesOf runs `caddy openai-lb import litellm --helm`, and returns also the
// lines for the balancer.
func valuesOf(t *testing.T, file string) (text, openaiLB string) {
	t.Helper()
	text, err := importOf(t, "litellm", "--helm", file)
	if err != nil {
		t.Fatal(err)
	}
	return text, openaiLBOf(t, text)
}

func openaiLBOf(t *testing.T, values string) string {
	t.Helper()
	var v struct {
		Config struct {
			OpenAILB string `yaml:"openaiLB"`
		}
	}
	if err := yaml.Unmarshal([]byte(values), &v); err != nil {
		t.Fatalf("%v\n%s", err, values)
	}
	return v.Config.OpenAILB
}

// e2e/chart_test.go renders the chart with the golden files.
func TestTheValuesOfLiteLLMsChartsBecomeValuesOfOurs(t *testing.T) {
	for _, chart := range []string{"helm", "gateway"} {
		t.Run(chart, func(t *testing.T) {
			got, openaiLB := valuesOf(t, "testdata/import/chart_"+chart+".yaml")
			if strings.Contains(got, "sk-secret") {
				t.Errorf("a key is shown:\n%s", got)
			}
			wantGolden(t, "testdata/import/chart_"+chart+".values", got)
			keysFile := filepath.Join(t.TempDir(), "client-keys")
			lbtest.WriteFile(t, keysFile, "search sha256:"+strings.Repeat("0f", 32)+"\n")
			openaiLB = strings.ReplaceAll(openaiLB, "/run/secrets/openai-lb/client-keys", keysFile)
			wantValid(t, string(caddyfile.Format([]byte(":4000 {\nopenai_lb {\n"+openaiLB+"}\n}\n"))))
		})
	}
}

func TestValuesForTheChartNameTheVariablesOfAFileWithoutAChart(t *testing.T) {
	got, openaiLB := valuesOf(t, "testdata/import/literal_keys.yaml")
	for _, want := range []string{"# What envFrom names, or env, has to set:\n", "\n# - CONTOSO_CANADA_1_KEY\n"} {
		if !strings.Contains(got, want) || strings.Contains(got, "existingSecret") || !strings.HasPrefix(openaiLB, "backend ") {
			t.Errorf("want %q in\n%s", want, got)
		}
	}
}

func TestAMistakeInALiteLLMFileNamesItsLine(t *testing.T) {
	const good = "model_list:\n- model_name: a\n  litellm_params: {model: openai/a}\n"
	for _, c := range []struct{ text, want string }{
		{"", "line 1: the file is empty"},
		{"# nothing\n", "line 1: the file is empty"},
		{"a: [\n", "line 1: did not find expected node content"},
		{"a: b\n\tc: d\n", "line 2: found a tab character"},
		{"a: 1\nb: \x00\n", "line 2: expected text in UTF-8 without control characters"},
		{"a: 1\nb: \xff\n", "line 2: expected text in UTF-8"},
		{"a: 1\nb: *nothing\n", "line 2: unknown anchor"},
		{"- a\n", "line 1: expected the file to be a mapping"},
		{good + "---\na: b\n", "a second one"},
		{good + "model_list: []\n", "line 4: 'model_list' is given twice, first on line 1"},
		{"model_list: a\n", "line 1: expected model_list to be a list"},
		{"model_list:\n- a\n", "line 2: expected an entry of model_list to be a mapping"},
		{"model_list:\n- litellm_params: {model: openai/a}\n", "line 2: model_name is required"},
		{"model_list:\n- model_name: a\n", "line 2: model is required in litellm_params"},
		{"model_list:\n- model_name: a\n  litellm_params:\n    model: [a]\n", "line 4: expected 'model' to be a text"},
		{"model_list:\n- model_name: a\n  litellm_params:\n    <<: x\n    model: openai/a\n", "line 4: expected the value of << to be a mapping"},
		{"\nmodel_list:\n- model_name: a\n  litellm_params: {model: bedrock/a}\n", "line 2: no entry of model_list can be imported"},
		{"proxyConfigMap: {create: false}\nproxy_config:\n  model_list: []\n", "line 1: the proxy's configuration is in a ConfigMap of yours"},
		{"proxy_config: {}\n", "line 1: expected model_list"},
		{"environmentSecrets: a\nproxy_config: {}\n", "line 1: expected environmentSecrets to be a list"},
		{"gateway:\n  config:\n    create: false\n", "line 3: the proxy's configuration is in a ConfigMap of yours"},
		{"general_settings:\n  store_model_in_db: true\n", "models in LiteLLM's database are not read"},
		{good + "router_settings: [1]\n", "line 4: expected router_settings to be a mapping"},
		{good + "router_settings:\n  fallbacks: {a: b}\n", "line 5: expected fallbacks to be a list"},
		{good + "router_settings:\n  num_retries: []\n", "line 5: expected 'num_retries' to be a text"},
	} {
		if got, err := tools.LiteLLM([]byte(c.text)); err == nil || !strings.Contains(err.Error(), c.want) || !hasLine.MatchString(err.Error()) {
			t.Errorf("%q: got %v, want %s\n%s", c.text, err, c.want, got)
		}
	}
}

var hasLine = regexp.MustCompile(`^line \d+: `)

func TestAHeaderThatMayHoldAKeyBecomesAVariable(t *testing.T) {
	for _, header := range []string{"X-Pass: hunter2-hunter2", "X-Signature: hunter2-hunter2", "X-Up: sk-hunter2", "X-Up: Bearer hunter2", "X-Up: basic aHVudGVyMg=="} {
		got, err := tools.LiteLLM([]byte("model_list:\n- model_name: a\n  litellm_params: {model: openai/a, extra_headers: {" + header + "}}\n"))
		_, value, _ := strings.Cut(header, ": ")
		if err != nil || strings.Contains(got, value) || !strings.Contains(got, "{env.HEADER_X_") {
			t.Errorf("%s: %v\n%s", header, err, got)
		}
	}
}

func TestANoteNamesTheModelThatIsMissing(t *testing.T) {
	got, err := tools.LiteLLM([]byte("model_list:\n- model_name: a\n  litellm_params: {model: openai/a}\n- model_name: c\n  litellm_params: {model: anthropic/c}\n" +
		"router_settings:\n  fallbacks: [{a: [c]}]\n  model_group_alias: {b: d, 'e*': a}\n"))
	for _, want := range []string{
		"- line 7: no backend here names the model 'c', which 'a' would use\n",
		"- line 8: no backend here names the model 'd', which 'b' would use\n",
		"- line 8: the name 'e*' cannot be that of a model here\n",
	} {
		if err != nil || !strings.Contains(got, want) {
			t.Errorf("%v: want %s\n%s", err, want, got)
		}
	}
}

func TestAHiddenAliasIsNotHiddenSilently(t *testing.T) {
	got, err := tools.LiteLLM([]byte("model_list:\n- model_name: a\n  litellm_params: {model: openai/a}\n" +
		"router_settings:\n  model_group_alias:\n    model: a\n    c:\n      model: a\n      hidden: true\n"))
	if err != nil || !strings.Contains(got, "# - line 9: hidden: an alias is in the list of models") || !strings.Contains(got, "model model a\n") || !strings.Contains(got, "model c a\n") {
		t.Errorf("%v\n%s", err, got)
	}
}

func TestTheQueryOfAURLIsNotLostSilently(t *testing.T) {
	for query, noted := range map[string]bool{"": false, "?api-version=2024-10-21": false, "?code=hunter2": true, "?api-version=1&code=hunter2": true} {
		got, err := tools.LiteLLM([]byte("model_list:\n- model_name: a\n  litellm_params:\n    model: openai/a\n    api_base: https://a.example/v1" + query + "\n"))
		if err != nil || strings.Contains(got, "line 5: api_base: its query does not carry over") != noted || strings.Contains(got, "hunter2") {
			t.Errorf("%s: %v\n%s", query, err, got)
		}
	}
}

func TestWhoMayUseAModelIsNotLostSilently(t *testing.T) {
	got, err := tools.LiteLLM([]byte("model_list:\n- model_name: a\n  litellm_params: {model: openai/a}\n  model_info:\n    id: x\n    access_groups: [beta]\n    team_id: y\n"))
	if err != nil || !strings.Contains(got, "# - lines 6, 7: access_groups, team_id: every client may use the model") {
		t.Errorf("%v\n%s", err, got)
	}
}

// wantAdapts checks that Caddy reads a file, and that `caddy fmt` leaves it as
// it is.
func wantAdapts(t *testing.T, text string) (config string) {
	t.Helper()
	config, err := lbtest.Adapt(text)
	if err != nil {
		t.Errorf("%v\n%s", err, text)
	}
	if formatted := string(caddyfile.Format([]byte(text))); formatted != text {
		t.Errorf("caddy fmt changes\n%q\nto\n%q", text, formatted)
	}
	return config
}

// FuzzLiteLLM imports any file: it is an error with a line, or a Caddyfile.
func FuzzLiteLLM(f *testing.F) {
	files, _ := filepath.Glob("testdata/import/*.yaml")
	for _, file := range files {
		f.Add(lbtest.ReadFile(f, file))
	}
	f.Add([]byte("a: &a\n  <<: *a\nmodel_list: &b\n- *b\n"))
	f.Add([]byte("model_list: [{model_name: a, litellm_params: &a {model: openai/a, order: -7, weight: 0.0001, <<: [*a, *a]}}]\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := tools.LiteLLM(text)
		switch {
		case err != nil && !hasLine.MatchString(err.Error()):
			t.Errorf("%q: an error without a line: %v", text, err)
		case err == nil:
			wantAdapts(t, got)
			values, err := tools.LiteLLMValues(text)
			if err != nil {
				t.Fatalf("%q: %v", text, err)
			}
			if _, err := lbtest.Adapt(":4000 {\nopenai_lb {\n" + openaiLBOf(t, values) + "}\n}\n"); err != nil {
				t.Errorf("%v\n%s", err, values)
			}
		}
	})
}

// FuzzImportedTexts imports any texts: Caddy reads them as they are, or they
// are left out. A key is never shown.
func FuzzImportedTexts(f *testing.F) {
	for _, text := range []string{"gpt-4o", "{$HOME}", "{env.HOME}", "a b", "a\nb }", `"`, "`", "\"`", `\`, `a\"b`, "#", "<<A", "é", "\u00a0", "import", "}", "", "*", "~", "a'b"} {
		f.Add(text, text, "https://gateway.example/"+text, text)
	}
	f.Fuzz(func(t *testing.T, model, backendModel, url, header string) {
		const key = "sk-literal-0123456789"
		for _, s := range []string{model, backendModel, url, header} {
			if strings.Contains(s, key) || !utf8.ValidString(s) { // Marshal writes invalid UTF-8 in base64
				t.Skip()
			}
		}
		text, err := yaml.Marshal(map[string]any{"model_list": []any{
			map[string]any{"model_name": model, model: backendModel, "litellm_params": map[string]any{"model": "openai/" + backendModel, "api_base": url, "api_key": key,
				"extra_headers": map[string]any{"X-Team": header, "X-Api-Key": key, model: header}, "organization": header}},
			map[string]any{"model_name": "one", "litellm_params": map[string]any{"model": "azure/one", "api_key": key, "api_base": "https://a.openai.azure.com"}},
		}, "general_settings": map[string]any{"master_key": key, backendModel: header}, "router_settings": map[string]any{
			"model_group_alias": map[string]any{header: "one"}, "fallbacks": []any{map[string]any{"one": []any{model}}}}})
		if err != nil {
			t.Skip()
		}
		got, err := tools.LiteLLM(text)
		if err != nil {
			if !hasLine.MatchString(err.Error()) || strings.Contains(err.Error(), key) {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		values, err := tools.LiteLLMValues(text)
		if err != nil || strings.Contains(got+values, key) || openaiLBOf(t, values) == "" {
			t.Errorf("%v: a key is shown, or nothing:\n%s\n%s", err, got, values)
		}
		var config struct {
			Apps struct {
				HTTP struct {
					Servers map[string]struct {
						Routes []struct {
							Handle []struct {
								Backends []struct {
									Model []struct{ Name, Deployment string }
								}
							}
						}
					}
				}
			}
		}
		if err := json.Unmarshal([]byte(wantAdapts(t, got)), &config); err != nil {
			t.Fatal(err)
		}
		names := []string{"one", strings.TrimSpace(model), strings.TrimSpace(backendModel), strings.TrimSpace(header), header, "", strings.TrimPrefix(strings.TrimSpace("openai/"+backendModel), "openai/")}
		for _, server := range config.Apps.HTTP.Servers {
			for _, b := range server.Routes[0].Handle[0].Backends {
				for _, m := range b.Model {
					for _, prefix := range []string{"responses/", "o_series/", "gpt5_series/"} {
						names = append(names, strings.TrimPrefix(strings.TrimSpace(backendModel), prefix))
					}
					if !slices.Contains(names, m.Name) || !slices.Contains(names, m.Deployment) {
						t.Errorf("model %q %q is none of %q\n%s", m.Name, m.Deployment, names, got)
					}
				}
			}
		}
	})
}
