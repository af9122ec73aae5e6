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
