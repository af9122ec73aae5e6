package main

import "strings"

// checkGlossary compares the words of the package comment with those of the
// glossary, which has more of them, and links.
func checkGlossary(code, page string) {
	comment, _, _ := strings.Cut(code, "\npackage ")
	_, list, _ := strings.Cut(comment, "as docs/glossary.md has them:\n//\n")
	entries := strings.Split(strings.ReplaceAll(list, "\n//     ", " "), "//   - ")[1:]
	if len(entries) != 14 {
		wrong("the package comment has %d words, want 14", len(entries))
	}
	page = strings.Join(strings.Fields(page), " ")
	for _, entry := range entries {
		if word, meaning, _ := strings.Cut(strings.TrimSpace(entry), ": "); !strings.Contains(page,
			"**"+word+"**: "+meaning) {
			wrong("docs/glossary.md does not say of %s: %s", word, meaning)
		}
	}
}
