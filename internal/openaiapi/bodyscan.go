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

// memberAt finds the member behind the brace or the comma at b[i]: its name, as
// it is written between the quotes, and where its value begins. That is -1 if
// there is none.
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

// endOf returns the end of an object, if that is what comes next, and else -1.
func endOf(b []byte, i int) int {
	if i = skipSpace(b, i); i < len(b) && b[i] == '}' {
		return i + 1
	}
	return -1
}

// skipString returns the end of the string that begins at b[i], or -1 if it has
// none.
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

// quotesIn looks at eight bytes at once. It sets the highest bit of the first
// one that is a quote, none before it, and perhaps some behind it.
func quotesIn(b []byte) uint64 {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	word := binary.LittleEndian.Uint64(b) ^ ones*'"' // in which a quote is 0
	return (word - ones) &^ word & tops
}

// inScalar marks the bytes of which a number, true, false or null consists.
// inert marks those that may stand between strings, but begin and end nothing.
// All others are an error: in a comment, or a string in other quotes, a quote
// or a brace would not mean what it does in JSON.
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

// skipOut returns the end of the list or the object in which b[i] is, or -1 if
// it has none, or a byte that cannot be there. It counts braces and brackets
// alike, and does not check that they match.
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

// unquote decodes a string. Hardly any model's name has an escape; for those
// that do, encoding/json does the work. In a string without an escape every
// byte is allowed, even a control character.
func unquote(quoted []byte) (string, bool) {
	if text := quoted[1 : len(quoted)-1]; bytes.IndexByte(text, '\\') < 0 && utf8.Valid(text) {
		return shared(text), true
	}
	var s string
	err := json.Unmarshal(quoted, &s)
	return s, err == nil
}

// lately are models that were named before. Nearly all requests name one of a
// few, and share its string.
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

// quote encodes a string as JSON, but not for HTML: "a&b" stays readable.
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

// needsNoEscape reports whether a string stands in JSON as it is.
func needsNoEscape(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}
