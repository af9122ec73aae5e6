// Generate updates the parts of docs that follow from the code:
//
//   - options.md: the syntax of the options, and their tables, from the
//     comments of the options' fields.
//   - troubleshooting.md: the table of problems.
//   - index.md: the whole page.
//
// It also checks that docs/glossary.md says the same as the comment of the root
// package. `go generate` runs it at the root of the repository. With -check, it
// writes nothing, and fails if a page is stale.
package main

import (
	"flag"
	"fmt"
	"os"
)

var check = flag.Bool("check", false, "only check that the pages are what would be written")

// mistakes counts what is wrong in the code or in the pages.
var mistakes int

func wrong(format string, args ...any) {
	mistakes++
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func read(path string) string {
	text, err := os.ReadFile(path)
	must(err)
	return string(text)
}

func write(path, text string) {
	if !*check {
		must(os.WriteFile(path, []byte(text), 0o644)) //nolint:gosec // all may read it
	} else if read(path) != text {
		wrong("%s is stale: run go generate", path)
	}
}

func main() {
	flag.Parse()
	const options = "docs/options.md"
	write(options, optionsPage(read(options)))
	const troubleshooting = "docs/troubleshooting.md"
	write(troubleshooting, withRemedies(read(troubleshooting)))
	write("docs/index.md", indexPage())
	checkGlossary(read("module.go"), read("docs/glossary.md"))
	if mistakes > 0 {
		os.Exit(1)
	}
}
