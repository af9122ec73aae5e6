package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"
)

// TestTheImageOfTheQuickstartIsBuilt does what its Dockerfile does, without
// Docker: it compiles the files that its list of ignored ones leaves, and
// validates the configuration with the result.
func TestTheImageOfTheQuickstartIsBuilt(t *testing.T) {
	t.Parallel()
	const dockerfile = "examples/quickstart/Dockerfile"
	dir := t.TempDir()
	repository := copyRepository(t, dir)
	removeIgnored(t, repository, filepath.Join("..", dockerfile+".dockerignore"))

	caddy := filepath.Join(dir, "caddy")
	var stages, runs, copies int
	text := strings.ReplaceAll(string(readFile(t, filepath.Join("..", dockerfile))), "\\\n", "")
	for line := range strings.Lines(text) {
		instruction, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch instruction {
		case "FROM":
			stages++
		case "RUN":
			runs++
			run := exec.CommandContext(t.Context(), "sh", "-c", strings.ReplaceAll(rest, " /caddy ", " "+caddy+" "))
			run.Dir = repository
			run.Env = append(os.Environ(), "TARGETOS=", "TARGETARCH=")
			if out, err := run.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", rest, err, out)
			}
		case "COPY":
			if from, ok := strings.CutSuffix(rest, " /etc/caddy/Caddyfile"); ok {
				copies++
				validate := exec.CommandContext(t.Context(), caddy, "validate", "--config", filepath.Join(repository, from))
				validate.Env = append(os.Environ(), "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
				if out, err := validate.CombinedOutput(); err != nil {
					t.Errorf("%v\n%s", err, out)
				}
			}
		}
	}
	if stages != 2 || runs != 1 || copies != 1 {
		t.Errorf("%d stages, %d commands and %d configurations: does this test still do what the file does?", stages, runs, copies)
	}
}

// removeIgnored removes from a copy of the repository the files that Docker
// does not send to a build with this list.
func removeIgnored(t *testing.T, repository, list string) {
	t.Helper()
	file, err := os.Open(list)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	patterns, err := ignorefile.ReadAll(file)
	if err != nil {
		t.Fatal(err)
	}
	ignored, err := patternmatcher.New(patterns)
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(repository, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(repository, path)
		if err != nil {
			return err
		}
		if isIgnored, err := ignored.MatchesOrParentMatches(name); err != nil || !isIgnored {
			return err
		}
		return os.Remove(path)
	})
	if err != nil {
		t.Fatal(err)
	}
}
