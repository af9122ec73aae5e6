package openailb_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// The comment of Handler becomes the page of the module at caddyserver.com.
func TestTheExampleInTheDocsOfTheHandlerLoads(t *testing.T) {
	t.Setenv("PTU_KEY", "key-1")
	t.Setenv("OPENAI_KEY", "key-2")
	t.Setenv("ALICE_KEY", "key-3-of-16-bytes")
	file, err := parser.ParseFile(token.NewFileSet(), "module.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var example strings.Builder
	for _, decl := range file.Decls {
		d, ok := decl.(*ast.GenDecl)
		if !ok || d.Tok != token.TYPE || d.Specs[0].(*ast.TypeSpec).Name.Name != "Handler" {
			continue
		}
		for line := range strings.Lines(d.Doc.Text()) {
			if strings.HasPrefix(line, "\t") {
				example.WriteString(line)
			}
		}
	}
	if example.Len() == 0 {
		t.Fatal("there is no example")
	}
	if err := lbtest.Validate(t, handlerJSON(example.String())); err != nil {
		t.Errorf("%v in\n%s", err, &example)
	}
}

// Pools without a name exchange their names, and the ids that belong to these,
// when their order in the file changes.
func TestSeveralUnnamedPoolsOfCallersAreWarnedOfOnce(t *testing.T) {
	const keys = "client_key alice alices-secret-key\nclient_key bob bobs-secret-key-1\n"
	site := func(port int, options string) string {
		return fmt.Sprintf(":%d {\nopenai_lb {\nbackend http://b%d\n%s\n}\n}\n", port, port, options)
	}
	for i, c := range []struct {
		about, sites string
		warnings     int
	}{
		{"one pool", site(1, keys), 0},
		{"three pools with keys", site(1, keys) + site(2, keys) + site(3, keys), 1},
		{"two pools, one of them with keys", site(1, "") + site(2, keys), 1},
		{"two pools, one of them with a file of keys", site(1, "client_keys_file keys.txt") + site(2, ""), 1},
		{"two pools without keys", site(1, "") + site(2, ""), 0},
		{"two pools, one of them with a name", site(1, keys) + site(2, keys+"pool second"), 0},
		{"two pools with names", site(1, keys+"pool first") + site(2, keys+"pool second"), 0},
		{"one pool on two ports", strings.Replace(site(1, keys), ":1", ":1, :2", 1), 0},
	} {
		folder := t.TempDir()
		log := filepath.Join(folder, fmt.Sprintf("%d.json", i))
		lbtest.WriteFile(t, filepath.Join(folder, "keys.txt"), "alice alices-secret-key\n")
		sites := strings.ReplaceAll(c.sites, "keys.txt", filepath.Join(folder, "keys.txt"))
		config, err := lbtest.Adapt("{\nadmin off\nauto_https off\nlog {\noutput file " + log + "\n}\n}\n" + sites)
		if err != nil {
			t.Fatal(err)
		}
		if err := lbtest.Validate(t, config); err != nil {
			t.Fatal(err)
		}
		text := lbtest.ReadFile(t, log)
		if n := strings.Count(string(text), "several pools have no name"); n != c.warnings {
			t.Errorf("%s: %d warnings, want %d:\n%s", c.about, n, c.warnings, text)
		}
	}
}

// TestAnOptionOfAnEarlierVersionIsRefusedWithWhatAppliesInstead so that a configuration of the first release is valid, or
// its owner knows which line to remove.
func TestAnOptionOfAnEarlierVersionIsRefusedWithWhatAppliesInstead(t *testing.T) {
	directive := func(option string) string { return ":0 {\nopenai_lb {\nbackend http://a\n" + option + "\n}\n}\n" }
	affinity := func(option string) string { return directive("affinity {\n" + option + "\n}") }
	transport := func(option string) string {
		return ":0 {\nreverse_proxy a {\nlb_policy openai_lb\ntransport openai_lb {\n" + option + "\n}\n}\n}\n"
	}
	policy := func(option string) string {
		return ":0 {\nreverse_proxy a {\nlb_policy openai_lb {\n\n" + option + "\n}\n}\n}\n"
	}
	for _, c := range []struct {
		option, gone, instead string
		where                 func(option string) string
		line                  int
	}{
		{"all_throttled forward", "all_throttled", "while all backends throttle, clients get a 429", directive, 4},
		{"all_throttled respond", "all_throttled", "while all backends throttle, clients get a 429", transport, 5},
		{"unhealthy_status 429 5xx", "unhealthy_status", "docs/replies.md says what each status means", directive, 4},
		{"unhealthy_status 429", "unhealthy_status", "docs/replies.md says what each status means", transport, 5},
		{"max_fails 3", "max_fails", "one failure makes a backend a suspect", directive, 4},
		{"max_fails 1", "max_fails", "one failure makes a backend a suspect", transport, 5},
		{"retry_after_min 1ms", "retry_after_min", "at least 50ms", directive, 4},
		{"retry_after_min 1s", "retry_after_min", "at least 50ms", transport, 5},
		{"retry_after_default 7s", "retry_after_default", "is benched for fail_duration", directive, 4},
		{"retry_after_default 7s", "retry_after_default", "is benched for fail_duration", transport, 5},
		{"stream_require_end", "stream_require_end", "must send it in each of its streams", directive, 4},
		{"stream_require_end on", "stream_require_end", "must send it in each of its streams", transport, 5},
		{"handshake_timeout 2s", "handshake_timeout", "a backend has 5s", directive, 4},
		{"handshake_timeout 2s", "handshake_timeout", "a backend has 5s", transport, 5},
		{"silence 2.5", "silence <number>", "'silence off' turns that off", directive, 4},
		{"silence 8", "silence <number>", "'silence off' turns that off", transport, 5},
		{"stream_usage", "stream_usage", "a caller with a limit of tokens", directive, 4},
		{"lb_policy first_byte", "lb_policy first_byte", "'lb_policy least_conn'", directive, 4},
		{"lb_policy first_byte", "lb_policy first_byte", "'lb_policy least_conn'", policy, 5},
		{"ids 200000", "ids", "1000000 ids", affinity, 5},
		{"ids 0", "ids", "1000000 ids", affinity, 5},
		{"ids_ttl 1h", "ids_ttl", "30 days", affinity, 5},
		{"lookup_timeout 20ms", "lookup_timeout", "50ms", affinity, 5},
		{"save", "save", "ids are always saved", affinity, 5},
	} {
		err := lbtest.ValidateCaddyfile(t, c.where(c.option))
		wantGone(t, err, c.option, c.gone, c.instead, fmt.Sprintf("Caddyfile:%d", c.line))
	}
	for option, c := range map[string]struct{ gone, instead string }{
		`"all_throttled":"forward"`:             {"all_throttled", "clients get a 429"},
		`"unhealthy_status":[429,5]`:            {"unhealthy_status", "docs/replies.md"},
		`"max_fails":3`:                         {"max_fails", "one failure"},
		`"retry_after_min":"1ms"`:               {"retry_after_min", "at least 50ms"},
		`"retry_after_default":"7s"`:            {"retry_after_default", "fail_duration"},
		`"stream_require_end":true`:             {"stream_require_end", "must send it"},
		`"handshake_timeout":"2s"`:              {"handshake_timeout", "has 5s"},
		`"silence":2.5`:                         {"silence <number>", "'silence off'"},
		`"silence":0`:                           {"silence <number>", "'silence off'"},
		`"stream_usage":true`:                   {"stream_usage", "limit of tokens"},
		`"lb_policy":{"policy":"first_byte"}`:   {"lb_policy first_byte", "'lb_policy least_conn'"},
		`"affinity":{"ids":0}`:                  {"ids", "1000000 ids"},
		`"affinity":{"ids_ttl":"1h"}`:           {"ids_ttl", "30 days"},
		`"affinity":{"lookup_timeout":"200ms"}`: {"lookup_timeout", "50ms"},
		`"affinity":{"save":true}`:              {"save", "always saved"},
	} {
		wantGone(t, lbtest.Validate(t, handlerJSON(`{"handler":"openai_lb","backends":[{"url":"http://a"}],`+option+`}`)), option, c.gone, c.instead, "")
		if strings.Contains(option, "affinity") || strings.Contains(option, "lb_policy") || strings.Contains(option, "stream_usage") {
			continue
		}
		plain := `{"handler":"reverse_proxy","upstreams":[{"dial":"a:1"}],"transport":{"protocol":"openai_lb",` + option + `}}`
		wantGone(t, lbtest.Validate(t, handlerJSON(plain)), option, c.gone, c.instead, "transport.openai_lb")
	}
	for _, unknown := range []string{`"stream_require_ends":true`, `"backends":[{"url":"http://a","wait":1}]`} {
		err := lbtest.Validate(t, handlerJSON(`{"handler":"openai_lb",`+unknown+`}`))
		if err == nil || !strings.Contains(err.Error(), "unknown field") {
			t.Errorf("%s gives %v, want it to be unknown", unknown, err)
		}
	}
}

// wantGone checks that the error about a part of a configuration names the option that is gone, what applies instead, and
// where it is.
func wantGone(t *testing.T, err error, text, option, instead, where string) {
	t.Helper()
	for _, want := range []string{option + " is no longer an option: ", instead, where} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want it to say %q", text, err, want)
		}
	}
}
