package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const caddy = "github.com/caddyserver/caddy/v2"

func inRepository(t *testing.T, name string, args ...string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), name, args...)
	command.Dir = ".."
	output, err := command.Output()
	if err != nil {
		t.Fatalf("%s %s: %v", name, args, err)
	}
	return strings.TrimSpace(string(output))
}

// TestWhatBuildsCaddyBuildsEachModule holds, because no module asks for a newer
// Go than Caddy does: Caddy's official image for builders has that one.
func TestWhatBuildsCaddyBuildsEachModule(t *testing.T) {
	want := inRepository(t, "go", "list", "-m", "-f", "{{.GoVersion}}", caddy)
	asks := regexp.MustCompile(`(?m)^go (\S+)$`)
	for _, module := range []string{"", "azure", "oidc", "redis"} {
		text, err := os.ReadFile(filepath.Join("..", module, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		if got := asks.FindSubmatch(text); got == nil || string(got[1]) != want {
			t.Errorf("%s/go.mod asks for Go %s, and Caddy for %s", module, got[1], want)
		}
	}
}

func TestPagesNameThePairThatWasTested(t *testing.T) {
	tested := inRepository(t, "go", "list", "-m", "-f", "{{.Version}}", caddy)
	build := regexp.MustCompile("xcaddy build(?: ([^-\\s]\\S*))?((?:[\\s\\\\]+--with [^\\s`]+)*)")
	released, found := "", 0
	for page := range strings.Lines(inRepository(t, "git", "ls-files", "--", "*.md")) {
		text, err := os.ReadFile(filepath.Join("..", strings.TrimSpace(page)))
		if err != nil {
			t.Fatal(err)
		}
		for _, command := range build.FindAllSubmatch(text, -1) {
			if len(command[2]) == 0 { // it is only mentioned
				continue
			}
			if found++; string(command[1]) != tested {
				t.Errorf("%s: %q names another Caddy than %s", page, command[0], tested)
			}
			for with := range strings.FieldsSeq(strings.ReplaceAll(string(command[2]), "--with", "")) {
				_, version, _ := strings.Cut(with, "@")
				if with == "\\" || strings.Contains(version, "=") {
					continue
				}
				if released == "" {
					released = version
				}
				if !strings.HasPrefix(version, "v") || version != released {
					t.Errorf("%s: %s has another version than %s", page, with, released)
				}
			}
		}
	}
	if found < 5 {
		t.Errorf("only %d commands were found", found)
	}
}
