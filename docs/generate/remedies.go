package main

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// The tables of remedies are between these lines.
const (
	remediesBegin = "<!-- remedies -->\n"
	remediesEnd   = "<!-- end of remedies -->\n"
)

// withRemedies returns the page with the tables of the problems of a backend,
// and of those of a pool.
func withRemedies(page string) string {
	before, rest, begins := strings.Cut(page, remediesBegin)
	_, after, ends := strings.Cut(rest, remediesEnd)
	if !begins || !ends {
		wrong("troubleshooting.md has no place for the remedies")
		return page
	}
	var table strings.Builder
	table.WriteString("\n| class | cause | the backend | needs you | next | alert |\n|---|---|---|---|---|---|\n")
	for _, r := range verdict.Remedies {
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s | %s | %s |\n", r.Class, cmp.Or(quoted(r.Cause), "any other"),
			r.Meaning, needs(r), r.Next, quoted(r.Alert))
	}
	table.WriteString("\nOf a pool, or of a replica:\n\n| class | problem | needs you | next | log, and at the end | alert |\n|---|---|---|---|---|---|\n")
	for _, r := range verdict.PoolRemedies {
		lines := quoted(r.Log)
		if r.Over != "" {
			lines += ", " + quoted(r.Over)
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s | %s | %s |\n",
			r.Class, r.Meaning, needs(r), r.Next, lines, quoted(r.Alert))
	}
	return before + remediesBegin + table.String() + "\n" + remediesEnd + after
}

func needs(r verdict.Remedy) string {
	if r.NeedsOperator {
		return "**yes**"
	}
	return "no"
}

func quoted(word string) string {
	if word == "" {
		return ""
	}
	return "`" + word + "`"
}
