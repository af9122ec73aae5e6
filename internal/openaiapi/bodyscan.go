package openaiapi

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/bits"
	"sync/atomic"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

func skipSpace(b []byte, i int) int {
	for i < len(b) && b[i] <= ' ' && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// memberAt finds the member after the brace or comma at b[i]. It returns the
// member's name, as written between the quotes, and the index of its value, or
// -1 if there is no member.
func memberAt(b []byte, i int) (name []byte, value int) {
	key := skipSpace(b, i+1)
	if key >= len(b) || b[key] != '"' {
		return nil, -1
	}
	end := skipString(b, key)
	if end < 0 {
		return nil, -1
	}
	name = b[key+1 : end-1]
	if end = skipSpace(b, end); end >= len(b) || b[end] != ':' {
		return name, -1
	}
	return name, skipSpace(b, end+1)
}

// endOf returns the end of an object if its closing brace comes next, else -1.
func endOf(b []byte, i int) int {
	if i = skipSpace(b, i); i < len(b) && b[i] == '}' {
		return i + 1
	}
	return -1
}

// skipString returns the end of the string that begins at b[i], or -1 if the
// string has no end.
func skipString(b []byte, i int) int {
	start := i + 1
	if near := b[start:]; len(near) >= 16 { // most names and many values are short
		end, found := start, quotesIn(near)
		if found == 0 {
			end, found = end+8, quotesIn(near[8:])
		}
		if end += bits.TrailingZeros64(found) / 8; found != 0 && b[end-1] != '\\' {
			return end + 1
		}
	}
	for at := start; ; {
		n := bytes.IndexByte(b[at:], '"')
		if n < 0 {
			return -1
		}
		end := at + n
		// A quote is escaped if an odd number of backslashes stands before it.
		// No backslash is counted twice: the next count stops at this quote at
		// the latest.
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

// quotesIn finds the first quote in eight bytes. It sets the highest bit of
// that byte, no bit before it, and perhaps some bits after it.
func quotesIn(b []byte) uint64 {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	word := binary.LittleEndian.Uint64(b) ^ ones*'"' // in which a quote is 0
	return (word - ones) &^ word & tops
}

// inScalar marks the bytes of numbers, true, false and null. inert marks the
// bytes that may stand between strings without beginning or ending anything.
// All other bytes are an error: within a comment, or a string in other quotes,
// a quote or a brace would not mean the same as in JSON.
var (
	inScalar = marks("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
	inert    = marks("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,: \n\r\t")
)

func marks(chars string) (m [256]bool) {
	for i := range len(chars) {
		m[chars[i]] = true
	}
	return m
}

// skipValue returns the end of the value at b[i], or -1 if it is missing or
// incomplete.
func skipValue(b []byte, i int) int {
	if i >= len(b) {
		return -1
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		return skipOut(b, i+1)
	}
	end := i
	for end < len(b) && inScalar[b[end]] {
		end++
	}
	if end == i {
		return -1
	}
	return end
}

// skipOut returns the end of the list or object that contains b[i]. It returns
// -1 if there is no end, or a byte that is not allowed there. It counts braces
// and brackets alike, and does not check that they match.
func skipOut(b []byte, i int) int {
	for depth := 1; i < len(b); {
		c := b[i]
		if inert[c] {
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
		case '}', ']':
			depth--
		default:
			return -1
		}
		i++
		if depth == 0 {
			return i
		}
	}
	return -1
}

// unquote decodes a JSON string. Hardly any model's name has an escape;
// encoding/json decodes those. A string without an escape may have any byte,
// even a control character.
func unquote(quoted []byte) (string, bool) {
	if text := quoted[1 : len(quoted)-1]; bytes.IndexByte(text, '\\') < 0 && utf8.Valid(text) {
		return shared(text), true
	}
	var s string
	err := json.Unmarshal(quoted, &s)
	return s, err == nil
}

// lately caches the strings of models that were named lately. Nearly all
// requests name one of a few models, and share its string.
var lately [64]atomic.Pointer[string]

func shared(text []byte) string {
	place := &lately[xxhash.Sum64(text)%uint64(len(lately))]
	if s := place.Load(); s != nil && *s == string(text) {
		return *s
	}
	s := string(text)
	if len(s) <= longestID {
		place.Store(&s)
	}
	return s
}

// quote encodes a string as JSON, without the escapes for HTML: "a&b" stays
// readable.
func quote(s string) []byte {
	if needsNoEscape(s) {
		quoted := make([]byte, 0, len(s)+2)
		return append(append(append(quoted, '"'), s...), '"')
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // neither a string nor a Buffer can make it fail
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// needsNoEscape reports whether a string needs no escape in JSON.
func needsNoEscape(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}
