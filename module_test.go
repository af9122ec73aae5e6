package openailb_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// The comment of Handler becomes the page of the module at caddyserver.com.
func TestTheExampleInTheDocsOfTheHandlerLoads(t *testing.T) {
	t.Setenv("PTU_KEY", "key-1")
	t.Setenv("OPENAI_KEY", "key-2")
	t.Setenv("ALICE_KEY", "key-3")
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
