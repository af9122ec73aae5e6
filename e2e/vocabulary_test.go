package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// vocabulary is a list of the codes of errors, events and service tiers that
// tests compare the tables in the code with.
const vocabulary = "../internal/openaiapi/testdata/openai-python.txt"

// TestTheWordsOfOpenAIsSDKAreListed compares that list with the package that is
// installed, or, with E2E_NEWEST, with the newest one, whose new words it
// names. The list is made anew by
//
//	python/.venv/bin/python python/vocabulary.py >../internal/openaiapi/testdata/openai-python.txt
func TestTheWordsOfOpenAIsSDKAreListed(t *testing.T) {
	lookPath(t, "python3")
	if err := installPython(); err != nil {
		t.Fatal(err)
	}
	listed, err := os.ReadFile(vocabulary)
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv("E2E_NEWEST") == "" {
		if got := outputOf(t, "python/.venv/bin/python", "python/vocabulary.py"); got != string(listed) {
			t.Errorf("the installed package has other words than %s:\n%s", vocabulary, got)
		}
		return
	}
	folder := t.TempDir()
	outputOf(t, "python/.venv/bin/pip", "install", "--disable-pip-version-check", "--no-deps", "--target", folder, "openai")
	for line := range strings.Lines(outputOf(t, "python/.venv/bin/python", "python/vocabulary.py", filepath.Join(folder, "openai"))) {
		if !strings.Contains("\n"+string(listed), "\n"+line) {
			t.Errorf("the newest package has a new word: %s", line)
		}
	}
}

// outputOf runs a command and returns what it prints.
func outputOf(t *testing.T, command ...string) string {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v", command, err)
	}
	return string(output)
}
