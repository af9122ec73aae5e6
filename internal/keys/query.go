package keys

import (
	"net/url"
	"strings"
)

// params are the query parameters with a key that identifies the caller.
var params = []string{"api-key", "subscription-key"}

// MaskQuery returns the query with [Redacted] in place of every key.
func MaskQuery(rawQuery string) string {
	return replaceParams(rawQuery, func(p param) (string, bool) {
		if p.value == "" || !HoldsKey(p.name) || strings.ContainsAny(p.name, notInNames) {
			return "", true
		}
		return p.written + "=" + Redacted, false
	})
}

// notInNames are characters that no name of a query parameter has. A text with
// one of them before an equals sign is not a parameter.
const notInNames = " \t\n\"'`,:/<>(){}\\|"

// param is a parameter of a query: its name and value without their encoding,
// and the name as it is written.
type param struct{ name, value, written string }

// replaceParams calls replace for each parameter, and returns the query with
// the parameters that replace does not keep replaced, or removed if with is
// empty. A semicolon separates parameters like an ampersand, because some
// servers read it so.
func replaceParams(rawQuery string, replace func(param) (with string, keep bool)) string {
	if rawQuery == "" {
		return ""
	}
	var kept strings.Builder
	changed := false
	for rest, separator := rawQuery, ""; ; {
		pair, next, after := cutPair(rest)
		written, value, _ := strings.Cut(pair, "=")
		if with, keep := replace(param{unescaped(written), unescaped(value), written}); !keep {
			if !changed {
				kept.WriteString(strings.TrimSuffix(rawQuery[:len(rawQuery)-len(rest)], separator))
				changed = true
			}
			pair = with
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
// semicolon separates two as well, for servers that decode the query first.
func cutPair(query string) (pair, separator, rest string) {
	for i := range len(query) {
		length := 0
		switch query[i] {
		case '&', ';':
			length = 1
		case '%':
			if rest := query[i+1:]; strings.HasPrefix(rest, "3B") || strings.HasPrefix(rest, "3b") || strings.HasPrefix(rest, "26") {
				length = 3
			}
		}
		if length > 0 {
			return query[:i], query[i : i+length], query[i+length:]
		}
	}
	return query, "", ""
}

// unescaped returns a text of a query without its encoding, or as it is if it
// is badly encoded.
func unescaped(text string) string {
	if plain, err := url.QueryUnescape(text); err == nil {
		return plain
	}
	return text
}
