package openailb_test

import (
	"go/build"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// project is the path of this package, which those of all others begin with.
const project = "github.com/openai-lb/caddy-openai-lb"

// depsOf returns what a package of this Go module imports of it in a build with
// these tags, and what these import, as `go list -deps -tags` does. That would
// need the cache of modules, which is in the home folder: tests have another
// one.
func depsOf(t *testing.T, path string, tags ...string) map[string]bool {
	t.Helper()
	context := build.Default
	context.BuildTags = tags
	deps, open := make(map[string]bool), []string{path}
	for len(open) > 0 {
		folder := "." + strings.TrimPrefix(open[0], project)
		open = open[1:]
		found, err := context.ImportDir(folder, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range found.Imports {
			if (i == project || strings.HasPrefix(i, project+"/")) && !deps[i] {
				deps[i] = true
				open = append(open, i)
			}
		}
	}
	return deps
}

// optional returns the names of the modules in modules/.
func optional(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir("modules")
	if err != nil || len(entries) == 0 {
		t.Fatalf("%v, %v", entries, err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// in returns the names of the modules among packages.
func in(packages map[string]bool) (names []string) {
	for path := range packages {
		if rest, ok := strings.CutPrefix(path, project+"/modules/"); ok {
			name, _, _ := strings.Cut(rest, "/")
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// packagesOf returns the packages of a module.
func packagesOf(t *testing.T, name string) (paths []string) {
	t.Helper()
	files, err := filepath.Glob("modules/" + name + "/*.go")
	inner, _ := filepath.Glob("modules/" + name + "/*/*.go")
	if err != nil || files == nil {
		t.Fatalf("%s has the files %v, %v", name, files, err)
	}
	for _, file := range append(files, inner...) {
		paths = append(paths, project+"/"+filepath.Dir(file))
	}
	return slices.Compact(paths)
}

func TestTheCoreImportsNoModule(t *testing.T) {
	all := optional(t)
	if got := in(depsOf(t, project)); !slices.Equal(got, all) {
		t.Errorf("a build without tags has the modules %v, want %v", got, all)
	}
	if got := in(depsOf(t, project, "openai_lb_core")); got != nil {
		t.Errorf("the core has the modules %v", got)
	}
	for _, name := range all {
		if got := in(depsOf(t, project, "openai_lb_core", "openai_lb_"+name)); !slices.Equal(got, []string{name}) {
			t.Errorf("the core with %s has the modules %v", name, got)
		}
	}
}

// TestAModuleImportsNeitherTheRootNorAnotherModule looks at what a build with
// all of them would not notice: the root imports the modules, but not in a
// build with the tag openai_lb_core.
func TestAModuleImportsNeitherTheRootNorAnotherModule(t *testing.T) {
	for _, name := range optional(t) {
		for _, path := range packagesOf(t, name) {
			deps := depsOf(t, path)
			if deps[project] {
				t.Errorf("%s imports the root", path)
			}
			if others := slices.DeleteFunc(in(deps), func(other string) bool { return other == name }); len(others) > 0 {
				t.Errorf("%s imports the modules %v", path, others)
			}
		}
	}
}

// TestOnlyItsImportFileNamesAModule looks at all files of the core, whatever
// their build constraints.
func TestOnlyItsImportFileNamesAModule(t *testing.T) {
	files, _ := filepath.Glob("*.go")
	inner, _ := filepath.Glob("internal/*/*.go")
	named := make(map[string][]string)
	for _, file := range append(files, inner...) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range optional(t) {
			if !strings.HasSuffix(file, "_test.go") && !strings.HasPrefix(file, "internal/lbtest/") && regexp.MustCompile(project+"/modules/"+name+`["/]`).Match(text) {
				named[name] = append(named[name], file)
			}
		}
	}
	for _, name := range optional(t) {
		if want := "standard_" + name + ".go"; !slices.Equal(named[name], []string{want}) {
			t.Errorf("%s is named in %v, want only %s", name, named[name], want)
		}
	}
}
