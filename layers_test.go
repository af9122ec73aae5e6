package openailb_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// lower are packages of which each uses only those before it.
var lower = []string{
	"directive", // keys has its check of placeholders
	"keys",
	"openaiapi",
	"verdict", // reads errors with the scanner of bodies
	"replay",
	"latency", "quota", // what a pool knows of one backend
	"pool",
}

// users are the internal packages that import these, besides the root.
var users = map[string][]string{
	"metrics": {"lbtest"}, // reads them
	"observe": {},
	// the options, which a module behind seam.AdmissionModule applies
	"calleroptions": {"seam"},
}

// forModules are the internal packages that only modules use, so that a core
// without modules is built without them.
var forModules = []string{"admin", "background", "cli", "limiter"}

// internalImports returns the internal packages that each of them imports
// outside of tests.
func internalImports(t *testing.T) map[string][]string {
	t.Helper()
	folders, err := filepath.Glob("internal/*")
	if err != nil {
		t.Fatal(err)
	}
	imports := make(map[string][]string)
	for _, folder := range folders {
		imports[filepath.Base(folder)] = importsOf(t, filepath.Join(folder, "*.go"))
	}
	return imports
}

// importsOf returns the internal packages that files import, except tests. `go
// list` would need the cache of modules, which is in the home folder: tests
// have another one.
func importsOf(t *testing.T, pattern string) (imports []string) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range file.Imports {
			if _, to, ok := strings.Cut(strings.Trim(i.Path.Value, `"`), "/caddy-openai-lb/internal/"); ok && !slices.Contains(imports, to) {
				imports = append(imports, to)
			}
		}
	}
	return imports
}

// usedBy adds to used what a package imports, and what these import.
func usedBy(name string, imports map[string][]string, used map[string]bool) map[string]bool {
	for _, i := range imports[name] {
		if !used[i] {
			used[i] = true
			usedBy(i, imports, used)
		}
	}
	return used
}

func TestAPackageUsesOnlyThoseOfLowerLayers(t *testing.T) {
	imports := internalImports(t)
	for i, name := range lower {
		for used := range usedBy(name, imports, map[string]bool{}) {
			if !slices.Contains(lower[:i], used) {
				t.Errorf("%s uses %s, want only %s", name, used, lower[:i])
			}
		}
	}
	backend := usedBy("backend", imports, map[string]bool{})
	for _, name := range []string{"attempt", "affinity"} {
		if backend[name] {
			t.Errorf("backend uses %s", name)
		}
	}
	for used, by := range users {
		for name := range imports {
			if slices.Contains(imports[name], used) && !slices.Contains(by, name) {
				t.Errorf("%s imports %s, want only the root and %s", name, used, by)
			}
		}
	}
	for _, name := range []string{"pool", "verdict", "openaiapi", "replay", "keys", "backend", "metrics", "observe"} {
		if _, ok := imports[name]; !ok {
			t.Errorf("there is no package %s", name)
		}
	}
}

func TestTheCoreDoesNotUseWhatModulesShare(t *testing.T) {
	imports := internalImports(t)
	imports["root"] = importsOf(t, "*.go")
	for name, used := range imports {
		for _, shared := range forModules {
			if slices.Contains(used, shared) && name != "lbtest" && !slices.Contains(forModules, name) {
				t.Errorf("%s imports %s", name, shared)
			}
		}
	}
}

// TestTheDirectiveServesWithoutReverseProxy looks at what the program uses of
// the package of Caddy's reverse_proxy. The handler there belongs to the two
// modules for a plain reverse_proxy, and only to what sets them up.
func TestTheDirectiveServesWithoutReverseProxy(t *testing.T) {
	allowed := map[string][]string{
		"Handler": {"proxyAround", "checkUpstream", "hasSelection", "checkRetries", "passiveOption", "provisionUpstreams", "takeOver", "answersAnybody"},
	}
	for _, name := range []string{
		"HTTPTransport", "KeepAlive", "DialInfo", "Upstream", "UpstreamPool", "Host", "Selector", // of the directive
		"LeastConnSelection", "RandomChoiceSelection", // whose counts are the pool's
		"NewDialError", "TLSConfig", "TLSTransport", "RequestHeaderOpsTransport", "HealthCheckSchemeOverriderTransport", // of the modules
	} {
		allowed[name] = nil
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	inner, err := filepath.Glob("internal/*/*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, name := range append(files, inner...) {
		if strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "internal/lbtest/") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			function, _ := decl.(*ast.FuncDecl)
			ast.Inspect(decl, func(n ast.Node) bool {
				used, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if of, ok := used.X.(*ast.Ident); !ok || of.Name != "reverseproxy" {
					return true
				}
				found++
				users, known := allowed[used.Sel.Name]
				if !known || users != nil && (function == nil || !slices.Contains(users, function.Name.Name)) {
					t.Errorf("%s uses reverseproxy.%s in %v", name, used.Sel.Name, declName(decl))
				}
				return true
			})
		}
	}
	if found == 0 {
		t.Error("nothing of the package is used: the test looks at the wrong files")
	}
}

// declName returns the name of a function, or else what kind of declaration it
// is.
func declName(decl ast.Decl) string {
	if function, ok := decl.(*ast.FuncDecl); ok {
		return function.Name.Name
	}
	return "a declaration"
}
