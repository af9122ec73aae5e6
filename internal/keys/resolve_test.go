package keys

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestAKeyIsReadFromWhereTheConfigSays(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	write(t, file, "in-a-file\n")
	t.Setenv("OPENAI_LB_TEST_KEY", " in-the-environment\t")
	for raw, want := range map[string]string{
		"plain":                    "plain",
		"{env.OPENAI_LB_TEST_KEY}": "in-the-environment",
		"{file." + file + "}":      "in-a-file",
	} {
		got, err := Resolve(raw)
		if got != want || err != nil {
			t.Errorf("%q gives %q, %v, want %q", raw, got, err, want)
		}
	}
}

func TestAKeyThatCannotBeReadIsRefusedWithoutTheKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	write(t, file, " \n")
	t.Setenv("OPENAI_LB_TEST_LINES", "s3cret\ns3cret")
	for raw, want := range map[string]string{
		"":                             "it is empty",
		"{file." + file + "}":          "it is empty",
		"{file./nowhere}":              "open /nowhere: no such file",
		"{env.OPENAI_LB_TEST_UNSET}":   "env.OPENAI_LB_TEST_UNSET",
		"{env.OPENAI_LB_TEST_LINES}":   "must not contain white space or control characters",
		"s3cret s3cret":                "must not contain white space or control characters",
		"{env.OPENAI_LB_TEST_UNSET":    "unpaired brace",
		"s3cret}":                      "unpaired brace",
		"env.s3cret":                   "without its braces: expected {env.X}",
		"$env.s3cret":                  "without its braces: expected {env.X}",
		"file./run/secrets/s3cret":     "without its braces: expected {env.X}",
		"{s3cret}":                     "neither {env.X} nor {file./path}",
		"{http.request.header.s3cret}": "neither {env.X} nor {file./path}",
	} {
		got, err := Resolve(raw)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q gives %q, %v, want an error with %q", raw, got, err, want)
		}
	}
}
