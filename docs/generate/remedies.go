package main

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// The table of remedies is between these lines.
const (
	remediesBegin = "<!-- remedies -->\n"
	remediesEnd   = "<!-- end of remedies -->\n"
)

// withRemedies returns the page with the table of the problems of a backend.
func withRemedies(page string) string {
	before, rest, begins := strings.Cut(page, remediesBegin)
	_, after, ends := strings.Cut(rest, remediesEnd)
	if !begins || !ends {
		wrong("troubleshooting.md has no place for the remedies")
		return page
	}
	var table strings.Builder
	table.WriteString("\n| class | cause | the backend | needs you | next |\n|---|---|---|---|---|\n")
	for _, r := range verdict.Remedies {
		needs := "no"
		if r.NeedsOperator {
			needs = "**yes**"
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s | %s |\n", r.Class, cmp.Or(quoted(r.Cause), "any other"), r.Meaning, needs, r.Next)
	}
	return before + remediesBegin + table.String() + "\n" + remediesEnd + after
}

func quoted(word string) string {
	if word == "" {
		return ""
	}
	return "`" + word + "`"
}
