package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"
)

// example is a binary of two modules, in a module cache.
func example(t *testing.T) (release, *debug.BuildInfo) {
	t.Helper()
	r := release{version: "v0.1.0", modcache: t.TempDir(), goroot: t.TempDir(), time: time.Unix(1_790_000_000, 0).UTC()}
	for name, text := range map[string]string{
		root + "@v0.1.0/LICENSE":                        "ours",
		root + "@v0.1.0/README.md":                      "read",
		root + "@v0.1.0/module.go":                      "package openailb",
		root + "@v0.1.0/examples/systemd/restart":       "#!/bin/sh",
		root + "@v0.1.0/testdata/LICENSE":               "of data",
		"github.com/!some!one/lib@v1.2.3/COPYING":       "theirs",
		"github.com/!some!one/lib@v1.2.3/license.go":    "package lib",
		"github.com/!some!one/lib@v1.2.3/zstd/NOTICE.x": "a part's",
	} {
		path := filepath.Join(r.modcache, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(r.goroot, "LICENSE"), []byte("Go's"), 0o644); err != nil {
		t.Fatal(err)
	}
	const sum = "h1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
	return r, &debug.BuildInfo{GoVersion: "go1.26.8", Deps: []*debug.Module{
		{Path: "github.com/SomeOne/lib", Version: "v1.2.3", Sum: sum},
		{Path: root, Version: "v0.1.0", Sum: sum},
	}, Settings: []debug.BuildSetting{{Key: "GOOS", Value: "linux"}, {Key: "GOARCH", Value: "arm64"}}}
}

func TestAnArchiveHasTheLicencesOfEverythingInTheBinary(t *testing.T) {
	r, info := example(t)
	files, err := r.contents(info)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, f := range sorted(files) {
		found = append(found, f.name+": "+string(f.data))
		if (f.mode == 0o755) != (f.name == "examples/systemd/restart") {
			t.Errorf("the mode of %s is %o", f.name, f.mode)
		}
	}
	want := []string{
		"LICENSE: ours", "README.md: read", "examples/systemd/restart: #!/bin/sh",
		"licences/github.com/SomeOne/lib@v1.2.3/COPYING: theirs", "licences/github.com/SomeOne/lib@v1.2.3/zstd/NOTICE.x: a part's",
		"licences/" + root + "@v0.1.0/LICENSE: ours", "licences/go1.26.8/LICENSE: Go's",
	}
	if !slices.Equal(found, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(found, "\n"), strings.Join(want, "\n"))
	}
}

func TestWhatHasNoLicenceIsNotReleased(t *testing.T) {
	r, info := example(t)
	if err := os.Remove(filepath.Join(r.modcache, "github.com/!some!one/lib@v1.2.3/COPYING")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(r.modcache, "github.com/!some!one/lib@v1.2.3/zstd/NOTICE.x")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.contents(info); err == nil || err.Error() != "github.com/SomeOne/lib v1.2.3 has no licence" {
		t.Errorf("got the error %v", err)
	}
}

func TestABillHasEveryModuleAndGo(t *testing.T) {
	r, info := example(t)
	text, err := r.bill(info, []byte("program"))
	if err != nil {
		t.Fatal(err)
	}
	var bom struct {
		BOMFormat, SpecVersion, SerialNumber string
		Metadata                             struct{ Timestamp string }
		Components                           []struct {
			PURL   string
			Hashes []struct{ Content string }
		}
	}
	if err := json.Unmarshal(text, &bom); err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, c := range bom.Components {
		found = append(found, c.PURL)
	}
	if want := []string{"pkg:golang/std@1.26.8", "pkg:golang/github.com/SomeOne/lib@v1.2.3", "pkg:golang/" + root + "@v0.1.0"}; !slices.Equal(found, want) {
		t.Errorf("got %q, want %q", found, want)
	}
	if bom.BOMFormat != "CycloneDX" || bom.Metadata.Timestamp != "2026-09-21T14:13:20Z" || len(bom.SerialNumber) != len("urn:uuid:")+36 ||
		!strings.HasPrefix(bom.Components[1].Hashes[0].Content, "000102030405") {
		t.Errorf("the bill is\n%s", text)
	}
	if again, err := r.bill(info, []byte("program")); err != nil || string(again) != string(text) {
		t.Errorf("a second bill of the same binary differs (%v)", err)
	}
	info.Deps[0].Sum = ""
	if _, err := r.bill(info, nil); err == nil {
		t.Error("a module without a checksum, as if it was built from a folder, gets into a bill")
	}
}

func TestABinaryOfAnotherVersionIsNotPacked(t *testing.T) {
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := (release{binary: program, version: "v0.1.0"}).pack(); err == nil || !strings.Contains(err.Error(), "has "+root+" (none), expected v0.1.0") {
		t.Errorf("got the error %v", err)
	}
}
