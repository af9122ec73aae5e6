package e2e

import (
	"cmp"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestTheSiteNeedsNoOtherHost builds the docs site and reads it as somebody
// does behind a proxy that blocks all other hosts: the diagram of Home, the
// search, and colored Caddyfiles. With E2E_SCREENSHOTS=<folder> it leaves what
// it saw there.
func TestTheSiteNeedsNoOtherHost(t *testing.T) {
	node, chromium, python := lookPath(t, "node"), lookPath(t, "chromium"), lookPath(t, "python3")
	if err := installBrowser(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	repository, site := copyRepository(t, dir), filepath.Join(dir, "site")
	build := exec.CommandContext(t.Context(), "bash", "-c", `
git init -q && git add -A &&
"$1" -m venv ../venv && ../venv/bin/pip install -q --disable-pip-version-check --only-binary :all: -r site/requirements.txt &&
PATH=$PWD/../venv/bin:$PATH site/build "$2"`, "bash", python, site)
	build.Dir = repository
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	// as on GitHub Pages, it is in a folder
	server := httptest.NewServer(http.StripPrefix("/caddy-openai-lb/", http.FileServer(http.Dir(site))))
	defer server.Close()

	var got struct {
		Looked []struct {
			Name                      string
			Errors, Elsewhere, Broken []string
			Sideways                  int
			Caddyfiles, Colored       int
		}
		Found []string
	}
	paths := []string{"", "docs/tutorial/", "docs/guide-ptu/", "docs/forty-teams/", "docs/options/", "docs/replies/",
		"docs/regions/", "docs/explained-silence/"}
	folder := cmp.Or(os.Getenv("E2E_SCREENSHOTS"), t.TempDir())
	runBrowser(t, &got, append([]string{node, "browser/site.mjs", chromium, server.URL + "/caddy-openai-lb/", folder}, paths...)...)
	if want := 4 * len(paths); len(got.Looked) != want {
		t.Errorf("%d pages, want %d", len(got.Looked), want)
	}
	for _, l := range got.Looked {
		if len(l.Errors)+len(l.Elsewhere)+len(l.Broken) > 0 || l.Sideways > 0 {
			t.Errorf("got %+v", l)
		}
		if l.Colored != l.Caddyfiles {
			t.Errorf("%s has %d Caddyfiles, and %d of them have colored directives", l.Name, l.Caddyfiles, l.Colored)
		}
	}
	if !slices.ContainsFunc(got.Found, func(path string) bool { return strings.HasPrefix(path, "/caddy-openai-lb/docs/options/") }) {
		t.Errorf("a search for an option finds %q", got.Found)
	}
}
