package main

import "strings"

// checkGlossary compares the words of the package comment with those of the glossary, which has more of them, and links.
func checkGlossary(code, page string) {
	comment, _, _ := strings.Cut(code, "\npackage ")
	_, list, found := strings.Cut(comment, "as docs/glossary.md has them:\n//\n")
	if !found {
		wrong("the package comment has no words")
	}
	page = strings.Join(strings.Fields(page), " ")
	for _, entry := range strings.Split(strings.ReplaceAll(list, "\n//     ", " "), "//   - ")[1:] {
		if word, meaning, _ := strings.Cut(strings.TrimSpace(entry), ": "); !strings.Contains(page, "**"+word+"**: "+meaning) {
			wrong("docs/glossary.md does not say of %s: %s", word, meaning)
		}
	}
}
