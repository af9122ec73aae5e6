package pool

import (
	"strings"
	"unicode/utf8"
)

// replacement replaces bytes that are not UTF-8. If they were removed, a text
// could be made to look like another one.
const replacement = string(utf8.RuneError)

// ValidText returns a text from outside as valid UTF-8, for labels, span
// attributes, logs and errors. A single invalid text makes an exporter of spans
// drop its whole batch.
func ValidText(text string) string { return strings.ToValidUTF8(text, replacement) }

// CutText returns a text from outside as valid UTF-8 of at most limit bytes. It
// cuts between two characters.
func CutText(text string, limit int) string {
	text = ValidText(cut(text, limit))
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
