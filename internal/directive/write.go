package directive

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

var (
	bareWord = regexp.MustCompile(`^[A-Za-z0-9_./:@*+,=%-]+$`)
	// environment matches the placeholder of a variable.
	environment = regexp.MustCompile(`^\{env\.[A-Za-z_][A-Za-z0-9_]*\}$`)
)

// Word writes any text as one argument of a Caddyfile. It reports false for a
// text that no argument can hold as it is: Caddy would read a brace as a
// placeholder, and a line break as the next line.
func Word(text string) (string, bool) {
	switch {
	case bareWord.MatchString(text):
		return text, true
	case text == "" || !utf8.ValidString(text) || strings.ContainsAny(text, `{}\`) ||
		strings.ContainsFunc(text, isUnprintable):
		return `""`, false
	case !strings.Contains(text, `"`):
		return `"` + text + `"`, true
	case !strings.Contains(text, "`"):
		return "`" + text + "`", true
	}
	return `""`, false
}

func isUnprintable(r rune) bool { return !unicode.IsPrint(r) }

// Line writes the words of a line: texts that [Word] accepts, and placeholders
// of variables.
func Line(words ...string) string {
	written := make([]string, len(words))
	for i, word := range words {
		if written[i] = word; !environment.MatchString(word) {
			written[i], _ = Word(word)
		}
	}
	return strings.Join(written, " ")
}

// maxComment is how much of a comment is written.
const maxComment = 512

// Comment writes any text as a comment of one line. It has no braces, because
// Caddy replaces {$X} also in comments.
func Comment(text string) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case r == '{':
			return '('
		case r == '}':
			return ')'
		case isUnprintable(r):
			return ' '
		}
		return r
	}, text)
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > maxComment {
		text = strings.ToValidUTF8(text[:maxComment], "") + "…"
	}
	return "# " + text
}
