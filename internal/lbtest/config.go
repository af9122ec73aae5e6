package lbtest

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
)

// ThreeBackends is a pool of two priorities.
const ThreeBackends = `openai_lb {
	backend http://a {
		priority 1
	}
	backend http://b {
		priority 2
		weight 3
	}
	backend http://c {
		priority 2
		weight 1
	}
}`

// ThreeInOrder is a pool of three priorities.
var ThreeInOrder = InOrder("a b c", "")

// Adapt turns a Caddyfile into JSON as `caddy adapt` does.
func Adapt(caddyfile string) (string, error) {
	text, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return "", err
	}
	for _, w := range warnings {
		if !strings.Contains(w.Message, "not formatted") {
			return "", os.ErrInvalid
		}
	}
	var indented any
	if err := json.Unmarshal(text, &indented); err != nil {
		return "", err
	}
	pretty, err := json.MarshalIndent(indented, "", "\t")
	return string(pretty) + "\n", err
}

// Validate loads a config as `caddy validate` does.
func Validate(t testing.TB, config string) error {
	t.Helper()
	var cfg caddy.Config
	if err := caddy.StrictUnmarshalJSON(caddy.RemoveMetaFields([]byte(config)), &cfg); err != nil {
		return err
	}
	return caddy.Validate(&cfg)
}

// ValidateCaddyfile loads a Caddyfile as `caddy validate` does.
func ValidateCaddyfile(t testing.TB, caddyfile string) error {
	t.Helper()
	config, err := Adapt(caddyfile)
	if err != nil {
		return err
	}
	return Validate(t, config)
}

// WantRefused runs a subtest of this name: the lines of a block of openai_lb,
// which begin at line 3 of its Caddyfile, are refused with an error that
// contains each of these texts.
func WantRefused(t *testing.T, name, block string, texts ...string) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		err := ValidateCaddyfile(t, ":0 {\nopenai_lb {\n"+block+"\n}\n}\n")
		if err == nil {
			t.Fatal("it was accepted")
		}
		for _, text := range texts {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("the error is %q, want it to say %q", err, text)
			}
		}
	})
}

// PoolOf writes an openai_lb block with these backends, in one priority, and
// these options.
func PoolOf(names, options string) string {
	var block strings.Builder
	block.WriteString("openai_lb {\n")
	for name := range strings.FieldsSeq(names) {
		block.WriteString("backend http://" + name + "\n")
	}
	return block.String() + options + "\nready_path /readyz\n}"
}

// InOrder writes an openai_lb block with these backends, each with the next
// priority, and these options.
func InOrder(names, options string) string {
	var block strings.Builder
	for i, name := range strings.Fields(names) {
		fmt.Fprintf(&block, "backend http://%s {\npriority %d\n}\n", name, i+1)
	}
	return "openai_lb {\n" + block.String() + options + "\n}"
}

// BackendKey is the key of a backend whose key matters.
const BackendKey = "sk-key-of-the-backend"

// WriteFile writes a file that only we may read.
func WriteFile(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// ReadFile returns the contents of a file.
func ReadFile(t testing.TB, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// FilesIn returns the files in a folder and in those below it, by their paths.
func FilesIn(t testing.TB, folder string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			files = append(files, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}
