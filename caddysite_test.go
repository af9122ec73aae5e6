package openailb_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	openailb "github.com/openai-lb/caddy-openai-lb"
)

// TestCaddysSiteShowsTheOptions checks what caddyserver.com needs to show
// modules. A scanner reads the source of a registered package, and finds no
// module in an argument of RegisterModule other than T{} and new(T)
// (https://github.com/fabriziosalmi/caddy-waf/pull/121). The site shows the
// comments of the type and of the fields in JSON, as Markdown, which takes
// <name> for HTML unless it is code.
func TestCaddysSiteShowsTheOptions(t *testing.T) {
	modules := 0
	for _, pattern := range []string{"*.go", "*/*.go", "*/*/*.go", "*/*/*/*.go"} {
		for _, file := range parsed(t, pattern) {
			ast.Inspect(file, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok && isCallOf(call, "RegisterModule") {
					modules++
					_, literal := call.Args[0].(*ast.CompositeLit)
					made, _ := call.Args[0].(*ast.CallExpr)
					if !literal && (made == nil || !isCallOf(made, "new")) {
						t.Errorf("package %s registers a module that is neither T{} nor new(T)", file.Name)
					}
				}
				return true
			})
		}
	}
	if modules < 10 {
		t.Errorf("found %d modules, expected more", modules)
	}
	seen := make(map[reflect.Type]bool)
	for _, module := range []any{openailb.Handler{}, openailb.Selection{}, openailb.Transport{}} {
		checkComments(t, reflect.TypeOf(module), seen)
	}
	if len(seen) < 10 {
		t.Errorf("found %d types of options, expected more", len(seen))
	}
}

func isCallOf(call *ast.CallExpr, name string) bool {
	switch f := call.Fun.(type) {
	case *ast.Ident:
		return f.Name == name
	case *ast.SelectorExpr:
		return f.Sel.Name == name
	}
	return false
}

func parsed(t *testing.T, pattern string) (files []*ast.File) {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return files
}

// checkComments checks the comments of a struct of options and of the structs
// in it.
func checkComments(t *testing.T, of reflect.Type, seen map[reflect.Type]bool) {
	t.Helper()
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice || of.Kind() == reflect.Map {
		of = of.Elem()
	}
	folder, ours := strings.CutPrefix(of.PkgPath(), project)
	if !ours || of.Kind() != reflect.Struct || seen[of] {
		return
	}
	seen[of] = true
	comments := commentsOf(t, "."+folder+"/*.go", of.Name())
	for i := range of.NumField() {
		field := of.Field(i)
		key, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Anonymous && key == "":
		case !field.IsExported() || key == "" || key == "-":
			continue
		case comments[field.Name] == "":
			t.Errorf("%s.%s has no comment", of, field.Name)
		case swallowed.MatchString(code.ReplaceAllString(comments[field.Name], "")):
			t.Errorf("%s.%s has a name in angle brackets outside of code", of, field.Name)
		}
		checkComments(t, field.Type, seen)
	}
}

var (
	code = regexp.MustCompile("`[^`]*`|(?m)^\t.*$")
	// swallowed matches a name that Markdown takes for HTML.
	swallowed = regexp.MustCompile(`<\w+>`)
)

// commentsOf returns the comments of the fields of a struct.
func commentsOf(t *testing.T, files, name string) map[string]string {
	t.Helper()
	comments := make(map[string]string)
	for _, file := range parsed(t, files) {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || spec.Name.Name != name {
				return true
			}
			for _, field := range spec.Type.(*ast.StructType).Fields.List {
				for _, ident := range field.Names {
					comments[ident.Name] = field.Doc.Text()
				}
			}
			return false
		})
	}
	return comments
}
