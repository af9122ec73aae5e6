package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// repository is a small one in which release/prepare can run.
type repository struct {
	t      *testing.T
	folder string
}

func newRepository(t *testing.T) repository {
	t.Helper()
	r := repository{t, t.TempDir()}
	script, err := os.ReadFile("prepare")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"release/prepare": string(script),
		".ci/run":         "#!/bin/sh\necho the gate runs\n",
		"CHANGELOG.md":    "# Changelog\n\n## Unreleased\n\n## 0.2.0 - 2026-02-03\n\n- New.\n\n## 0.1.0 - 2026-01-02\n\n### Added\n",
		"README.md":       "build --with " + root + "@v0.1.0 --with " + root + "/azure@v0.1.0\n--with " + root + "@v0.0.0=.\n",

		"internal/metrics/released.txt": "",

		"go.mod":       "module " + root + "\n\ngo 1.26.0\n",
		"azure/go.mod": "module " + root + "/azure\n\ngo 1.26.0\n\nreplace " + root + " => ../\n",
		"oidc/go.mod":  "module " + root + "/oidc\n\ngo 1.26.0\n\nreplace " + root + " => ../\n",
		"redis/go.mod": "module " + root + "/redis\n\ngo 1.26.0\n\nrequire " + root + " v0.1.0\n\nreplace " + root + " => ../\n",
	} {
		r.write(name, text)
	}
	r.git("init", "--quiet", "--initial-branch=main")
	r.commit()
	return r
}

func (r repository) write(name, text string) {
	r.t.Helper()
	path := filepath.Join(r.folder, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		r.t.Fatal(err)
	}
}

// run runs a command in the repository.
func (r repository) run(name string, args ...string) (output string, err error) {
	command := exec.CommandContext(r.t.Context(), name, args...)
	command.Dir = r.folder
	command.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com")
	text, err := command.CombinedOutput()
	return string(text), err
}

func (r repository) git(args ...string) string {
	r.t.Helper()
	output, err := r.run("git", args...)
	if err != nil {
		r.t.Fatalf("git %s: %v\n%s", args, err, output)
	}
	return strings.TrimSpace(output)
}

func (r repository) commit() {
	r.t.Helper()
	r.git("add", "-A")
	r.git("commit", "--quiet", "-m", "A change")
}

func TestAReleaseIsACommitAndATagForEachModule(t *testing.T) {
	for _, gate := range []bool{true, false} {
		r := newRepository(t)
		before := r.git("rev-parse", "HEAD")
		args := []string{"0.2.0"}
		if !gate {
			args = []string{"--no-gate", "0.2.0"}
		}
		output, err := r.run("release/prepare", args...)
		if err != nil || strings.Contains(output, "the gate runs") != gate ||
			!strings.Contains(output, "\n\tgit push --atomic origin HEAD azure/v0.2.0 oidc/v0.2.0 redis/v0.2.0\n\tgit push origin v0.2.0\n") {
			t.Fatalf("%v\n%s", err, output)
		}
		if tags := r.git("tag", "--points-at", "HEAD"); tags != "azure/v0.2.0\noidc/v0.2.0\nredis/v0.2.0\nv0.2.0" {
			t.Errorf("the tags are %q", tags)
		}
		if parent := r.git("rev-parse", "HEAD~1"); parent != before {
			t.Error("there is more than one new commit")
		}
		if got, want := r.git("show", "v0.2.0:README.md"), "build --with "+root+"@v0.2.0 --with "+root+"/azure@v0.2.0\n--with "+root+"@v0.0.0=."; got != want {
			t.Errorf("README.md has\n%s\nwant\n%s", got, want)
		}
		if got := r.git("show", "v0.2.0:internal/metrics/released.txt"); got != "v0.2.0 "+before {
			t.Errorf("the release says that it is %q", got)
		}
		for _, module := range []string{"azure", "oidc", "redis"} {
			if text := r.git("show", "v0.2.0:"+module+"/go.mod"); !strings.Contains(text+"\n", "require "+root+" v0.2.0\n") {
				t.Errorf("the module %s does not require the release:\n%s", module, text)
			}
		}
	}
}

func TestNothingIsReleasedThatIsNotReady(t *testing.T) {
	for _, c := range []struct {
		name, version, want string
		spoil               func(r repository)
	}{
		{"no version", "", "'' is not a version", nil},
		{"a word", "next", "'next' is not a version", nil},
		{"two numbers", "0.2", "'0.2' is not a version", nil},
		{"a leading zero", "0.02.0", "'0.02.0' is not a version", nil},
		{"a leading zero before a release", "0.2.0-rc.01", "'0.2.0-rc.01' is not a version", nil},
		{"an empty part", "0.2.0-rc..1", "'0.2.0-rc..1' is not a version", nil},
		{"another major version", "2.0.0", "the paths of the modules need /v2", nil},
		{"no section", "0.3.0", "CHANGELOG.md has no section '## 0.3.0 - <date>'", nil},
		{"an empty section", "0.1.0", "CHANGELOG.md has no section", nil},
		{"a changed file", "0.2.0", "changes that are not committed", func(r repository) { r.write("go.mod", "") }},
		{"a new file", "0.2.0", "changes that are not committed", func(r repository) { r.write("new", "") }},
		{"a tag", "0.2.0", "the tag redis/v0.2.0 exists already", func(r repository) { r.git("tag", "redis/v0.2.0") }},
		{"a gate that fails", "0.2.0", "the gate has failed", func(r repository) { r.write(".ci/run", "#!/bin/sh\nexit 1\n"); r.commit() }},
		{"a module that does not build", "0.2.0", "example.invalid", func(r repository) {
			r.write("redis/redis.go", "package redis\n\nimport _ \"example.invalid/gone\"\n")
			r.commit()
		}},
		{"a gate that leaves files", "0.2.0", "the gate has changed the checkout", func(r repository) { r.write(".ci/run", "#!/bin/sh\n>left\n"); r.commit() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRepository(t)
			if c.spoil != nil {
				c.spoil(r)
			}
			head, tags, changes := r.git("rev-parse", "HEAD"), r.git("tag"), r.git("diff", "HEAD")
			output, err := r.run("release/prepare", c.version)
			if err == nil || !strings.Contains(output, "release/prepare: ") || !strings.Contains(output, c.want) {
				t.Errorf("%v\n%s\nwant %s", err, output, c.want)
			}
			if r.git("rev-parse", "HEAD") != head || r.git("tag") != tags || r.git("diff", "HEAD") != changes {
				t.Error("there is a commit, a tag or a change")
			}
		})
	}
}
