package keys

import (
	"net/url"
	"strings"
)

// params are the query parameters whose key identifies the caller.
var params = []string{"api-key", "subscription-key"}

// MaskQuery returns the query with every key replaced by [Redacted].
func MaskQuery(rawQuery string) string {
	if !strings.Contains(rawQuery, "=") {
		return rawQuery // as most values of a log, each of which may be a query
	}
	return replaceParams(rawQuery, func(p param) (string, bool) {
		if p.value == "" || !HoldsKey(p.name) || strings.ContainsAny(p.name, notInNames) {
			return "", true
		}
		return p.written + "=" + Redacted, false
	})
}

// notInNames are characters that do not occur in names of query parameters. A
// text with one of them before an equals sign is not a parameter.
const notInNames = " \t\n\"'`,:/<>(){}\\|"

// param is a parameter of a query: its decoded name and value, and the name as
// it is written.
type param struct{ name, value, written string }

// replaceParams calls replace for each parameter. If keep is false, the
// parameter is replaced by with, or removed if with is empty. A semicolon
// separates parameters like an ampersand, because some servers read it so.
func replaceParams(rawQuery string, replace func(param) (replacement string, keep bool)) string {
	if rawQuery == "" {
		return ""
	}
	var kept strings.Builder
	changed := false
	for rest, separator := rawQuery, ""; ; {
		pair, next, after := cutPair(rest)
		written, value, _ := strings.Cut(pair, "=")
		if replacement, keep := replace(param{unescaped(written), unescaped(value), written}); !keep {
			if !changed {
				kept.WriteString(strings.TrimSuffix(rawQuery[:len(rawQuery)-len(rest)], separator))
				changed = true
			}
			pair = replacement
		}
		if changed && pair != "" {
			if kept.Len() > 0 {
				kept.WriteString(separator)
			}
			kept.WriteString(pair)
		}
		if next == "" {
			break
		}
		separator, rest = next, after
	}
	if !changed {
		return rawQuery
	}
	return kept.String()
}

// cutPair cuts a query after its first parameter. An encoded ampersand or
// semicolon is a separator, too, because some servers decode the query first.
func cutPair(query string) (pair, separator, rest string) {
	for i := range len(query) {
		length := 0
		switch query[i] {
		case '&', ';':
			length = 1
		case '%':
			if rest := query[i+1:]; strings.HasPrefix(rest, "3B") || strings.HasPrefix(rest, "3b") ||
				strings.HasPrefix(rest, "26") {
				length = 3
			}
		}
		if length > 0 {
			return query[:i], query[i : i+length], query[i+length:]
		}
	}
	return query, "", ""
}

// unescaped decodes a text of a query. A badly encoded text is returned as it
// is.
func unescaped(text string) string {
	if plain, err := url.QueryUnescape(text); err == nil {
		return plain
	}
	return text
}
