package openaiapi

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"
)

// ParseJSON looks for the top-level members "model" and "stream" of a JSON object. A "model" that
// is not a string is none.
//
// It is a scanner, not a parser: it goes over the bytes once, remembers a depth and no more, and
// jumps from quote to quote where strings are, which is what most of a prompt is. What it can
// step over, it does not judge: a body that is not quite JSON, or not even UTF-8, is the
// backend's to refuse. Where it cannot go on, it returns what it found until there, so of a body
// that was cut off the members that came whole. For a body that is valid JSON the result is the
// same as from encoding/json, exact spelling of the keys assumed.
func ParseJSON(body []byte) Request {
	var r Request
	i := 0
	if bytes.HasPrefix(body, []byte("\xef\xbb\xbf")) {
		i = 3 // a byte order mark, which RFC 8259 section 8.1 lets a parser ignore
	}
	i = skipSpace(body, i)
	if i >= len(body) || body[i] != '{' {
		return r
	}
	first := i + 1
	named := false // there is a "model", whatever its value
	last := span{} // of the last one's value, unless that is no string
	for {
		key := skipSpace(body, i+1) // past the brace or the comma
		if key >= len(body) || body[key] != '"' {
			break
		}
		keyEnd := skipString(body, key)
		if keyEnd < 0 {
			break
		}
		isModel := isKey(body[key:keyEnd], "model")
		named = named || isModel
		colon := skipSpace(body, keyEnd)
		if colon >= len(body) || body[colon] != ':' {
			break
		}
		value := skipSpace(body, colon+1)
		end := skipValue(body, value)
		if end < 0 {
			break
		}
		switch {
		case isModel:
			last = span{}
			if body[value] == '"' {
				last = span{value, end}
				r.models = append(r.models, last)
			}
		case isKey(body[key:keyEnd], "stream"):
			r.Stream = string(body[value:end]) == "true"
		}
		i = skipSpace(body, end)
		if i >= len(body) || body[i] != ',' {
			break
		}
	}
	if last.end > 0 {
		r.Model, r.HasModel = unquote(body[last.start:last.end])
	}
	if !r.HasModel {
		r.models = nil
	}
	if !named {
		r.addFirst(body, first)
	}
	return r
}

// addFirst sees to it that a model can be added to the object whose first member would be at i,
// if that is there to see.
func (r *Request) addFirst(body []byte, i int) {
	next := skipSpace(body, i)
	if next >= len(body) {
		return
	}
	switch body[next] {
	case '"':
		r.addAt, r.before, r.after = i, `"model":`, ","
	case '}':
		r.addAt, r.before = i, `"model":`
	}
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// skipString returns the end of the string that begins at b[i], or -1 if it has none.
func skipString(b []byte, i int) int {
	start := i + 1
	for at := start; ; {
		n := bytes.IndexByte(b[at:], '"')
		if n < 0 {
			return -1
		}
		end := at + n
		// A quote is escaped if an odd number of backslashes stands before it. No backslash is
		// counted twice: the next count stops at this quote at the latest.
		slash := end
		for slash > start && b[slash-1] == '\\' {
			slash--
		}
		at = end + 1
		if (end-slash)%2 == 0 {
			return at
		}
	}
}

// structural marks the bytes that matter between strings; scalarEnd those that end a number,
// true, false and null.
var structural, scalarEnd = marks(`"{}[]`), marks(",}] \n\r\t")

func marks(chars string) (m [256]bool) {
	for i := range len(chars) {
		m[chars[i]] = true
	}
	return m
}

// skipValue returns the end of the value at b[i], or -1 if it is missing or incomplete. Braces and
// brackets count alike; whether they match is not our business.
func skipValue(b []byte, i int) int {
	if i >= len(b) {
		return -1
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
	default:
		end := i
		for end < len(b) && !scalarEnd[b[end]] {
			end++
		}
		if end == i {
			return -1
		}
		return end
	}
	depth := 0
	for i < len(b) {
		c := b[i]
		if !structural[c] {
			i++
			continue
		}
		switch c {
		case '"':
			if i = skipString(b, i); i < 0 {
				return -1
			}
			continue
		case '{', '[':
			depth++
		default:
			depth--
		}
		i++
		if depth == 0 {
			return i
		}
	}
	return -1
}

// isKey compares a quoted string with a word of lower-case letters. Those have one escape each,
// \u00XX, so there is nothing to decode and nothing to allocate.
func isKey(quoted []byte, word string) bool {
	b := quoted[1 : len(quoted)-1]
	for i := range len(word) {
		switch {
		case len(b) >= 1 && b[0] == word[i]:
			b = b[1:]
		case len(b) >= 6 && string(b[:4]) == `\u00` && unhex(b[4])<<4|unhex(b[5]) == int(word[i]):
			b = b[6:]
		default:
			return false
		}
	}
	return len(b) == 0
}

func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c|0x20 && c|0x20 <= 'f':
		return int(c|0x20-'a') + 10
	}
	return -1
}

// unquote decodes a string. Hardly any model's name has something to decode; for those that do,
// encoding/json knows best. Without an escape anything goes, even a control character.
func unquote(quoted []byte) (string, bool) {
	if bytes.IndexByte(quoted, '\\') < 0 && utf8.Valid(quoted) {
		return string(quoted[1 : len(quoted)-1]), true
	}
	var s string
	err := json.Unmarshal(quoted, &s)
	return s, err == nil
}

// quote encodes a string as JSON, but not for HTML: "a&b" stays readable.
func quote(s string) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // a string always can be, and a Buffer takes all
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
