// Package showntext makes texts of others fit to be shown in labels, span attributes, logs and errors:
// short, and valid UTF-8. One text that is not makes an exporter of spans drop its whole batch.
package showntext

import (
	"strings"
	"unicode/utf8"
)

// replacement stands for bytes that are no UTF-8. If they were left out, a text could be made to look
// like another one.
const replacement = string(utf8.RuneError)

// Valid returns the text as valid UTF-8.
func Valid(text string) string { return strings.ToValidUTF8(text, replacement) }

// Cut returns the text as valid UTF-8 of at most limit bytes. It cuts between two characters.
func Cut(text string, limit int) string {
	text = Valid(cut(text, limit))
	return cut(text, limit) // it may be longer than before
}

func cut(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	end := limit
	for end > 0 && limit-end < utf8.UTFMax && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end]
}
