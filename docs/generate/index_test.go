package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestANameLeadsToTheSectionThatExplainsIt(t *testing.T) {
	t.Chdir(t.TempDir())
	for page, text := range map[string]string{
		"docs/options.md": "# Options\n\n## Syntax\n\n```text\nquota <n>\nmode a\n```\n\n`extra` is repeatable.\n\n" +
			"## Order\n\nA request waits because of its `quota`. See [`hold`](callers.md#holding-requests).\n\n" +
			"| header | meaning |\n|---|---|\n| `x-a` | as `quota`, `tls` or `https` |\n\n" +
			"## Mode and color\n\n## priority and weight\n\n## TLS\n\n`tls { … }` has options.\n",
		"docs/callers.md": "# Callers\n\n## How a limit uses weight and quota\n\n## Holding requests\n\n" +
			"- `total`, `sum`: all\n\n## Limits\n\n| option | meaning |\n|---|---|\n| `quota` | how many |\n\n" +
			"## What an owner is\n\n## Example\n\n```caddyfile\nextra {\n}\n```\n",
		"sub/README.md": "# All sums\n\nThe `sum` of the `hold`s, and an `owner`.\n\n## Options\n\n| `part` | one part |\n",
	} {
		if err := os.MkdirAll(filepath.Dir(page), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(page, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"weight":  "options.md#priority-and-weight", // a heading is a list with it
		"owner":   "callers.md#what-an-owner-is",    // a heading asks for it
		"hold":    "callers.md#holding-requests",    // a link has it as its text
		"quota":   "callers.md#limits",              // a table, not a text before it
		"sum":     "callers.md#holding-requests",    // a list
		"tls":     "options.md#tls",                 // a text, not a cell about another name
		"https":   "options.md#order",               // nothing else has it
		"extra":   "callers.md#example",             // a configuration, not the syntax
		"part":    "../sub/README.md#options",       // a page outside of docs
		"nowhere": "",
	} {
		got := explained(name, []string{"docs/options.md", "docs/callers.md", "sub/README.md"})
		if got != want {
			t.Errorf("%s leads to %q, want %q", name, got, want)
		}
	}
}

func TestTheIndexLeadsToTheSectionThatExplainsAnOption(t *testing.T) {
	t.Chdir("../..")
	index := read("docs/index.md")
	options, rest, _ := strings.Cut(index, "\n## Metrics\n")
	for link, within := range map[string]string{
		"[`caller`](callers.md#what-callers-may-use)":                     options,
		"[`max_requests`](options.md#a-backend)":                          options,
		"[`reserve`](callers.md#what-callers-may-use)":                    options,
		"[`timezone`](callers.md#what-callers-may-use)":                   options,
		"[`callers_file`](callers.md#limits-in-a-file)":                   options,
		"[`wait`](callers.md#short-waits)":                                options,
		"[`http`](options.md#transport)":                                  options,
		"[`prompt_cache`](affinity.md#prompt-caches)":                     options,
		"[`backends_from_env`](options.md#backends-from-the-environment)": options,
		"[`caller_identity`](options.md#callers)":                         options,
		"[`state`](replicas.md#set-it-up)":                                options,
		"[`waited_total`](observability.md#metrics)":                      rest,
	} {
		if !strings.Contains(within, link) {
			t.Errorf("the index does not have %s", link)
		}
	}
	if strings.Contains(index, "#syntax)") {
		t.Error("the index leads to the syntax, which explains nothing")
	}
}
