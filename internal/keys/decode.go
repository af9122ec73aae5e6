package keys

import (
	"html"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth is the number of layers of encoding in which a secret is still
// found. A percent-encoded address in a page of HTML in a string of JSON has
// three.
const maxDepth = 3

// maxEntity is longer than the HTML name of any character of a key.
const maxEntity = 16

// decode decodes the first character of a text as its reader will, in up to
// depth layers. A layer is percent-encoding, an escape of JSON or of a
// programming language, or an HTML entity. n is the length of the encoded
// character. It is 0 if the text ends before that is certain.
func decode(text []byte, depth int) (piece string, n int) {
	switch {
	case len(text) == 0:
		return "", 0
	case depth == 0:
		return string(text[:1]), 1
	}
	depth--
	piece, n = decode(text, depth)
	decoded, length, whole := "", 0, true
	switch piece {
	case "%":
		decoded, length, whole = hexadecimal(text[n:], depth, 2)
	case `\`:
		decoded, length, whole = escaped(text[n:], depth)
	case "&":
		decoded, length, whole = entity(text[n:], depth)
	}
	switch {
	case !whole:
		return "", 0
	case decoded != "":
		return decoded, n + length
	}
	return piece, n
}

// take returns up to limit of the next characters that ok accepts. whole
// reports whether more text could not change the result.
func take(text []byte, depth, limit int, ok func(byte) bool) (taken string, n int, whole bool) {
	for len(taken) < limit {
		piece, length := decode(text[n:], depth)
		if length == 0 {
			return taken, n, false
		}
		if len(piece) != 1 || !ok(piece[0]) {
			break
		}
		taken, n = taken+piece, n+length
	}
	return taken, n, true
}

// hexadecimal decodes that many hexadecimal digits: 2 for a byte, 4 for a
// UTF-16 character.
func hexadecimal(text []byte, depth, digits int) (decoded string, n int, whole bool) {
	taken, n, whole := take(text, depth, digits, isHex)
	code, err := strconv.ParseUint(taken, 16, 16)
	switch {
	case len(taken) < digits || err != nil:
		return "", 0, whole
	case digits == 2:
		return string([]byte{byte(code)}), n, true
	}
	if high := rune(code); utf16.IsSurrogate(high) { // the other half follows
		prefix, length, whole := take(text[n:], depth, 2, func(c byte) bool { return c == '\\' || c == 'u' })
		if !whole || prefix != `\u` {
			return "", 0, whole
		}
		taken, more, whole := take(text[n+length:], depth, digits, func(byte) bool { return true })
		low, _ := strconv.ParseUint(taken, 16, 16)
		return string(utf16.DecodeRune(high, rune(low))), n + length + more, whole
	}
	return string(rune(code)), n, true
}

// escaped decodes the escape after a backslash.
func escaped(text []byte, depth int) (decoded string, n int, whole bool) {
	kind, n := decode(text, depth)
	switch kind {
	case "":
		return "", 0, false
	case "u":
		decoded, length, whole := hexadecimal(text[n:], depth, 4)
		return decoded, n + length, whole
	case "x":
		decoded, length, whole := hexadecimal(text[n:], depth, 2)
		return decoded, n + length, whole
	case `/`, `\`, `"`, `'`:
		return kind, n, true
	}
	return "", 0, true
}

// entity decodes the HTML entity after an ampersand.
func entity(text []byte, depth int) (decoded string, n int, whole bool) {
	name, n, whole := take(text, depth, maxEntity,
		func(c byte) bool { return c == '#' || isAlphanumeric(c) })
	if name == "" || !whole {
		return "", 0, whole
	}
	end, length := decode(text[n:], depth)
	if end != ";" {
		return "", 0, length > 0
	}
	decoded = html.UnescapeString("&" + name + ";")
	if utf8.RuneCountInString(decoded) != 1 {
		return "", 0, true
	}
	return decoded, n + length, true
}

func isHex(c byte) bool { return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'f' }

func isAlphanumeric(c byte) bool { return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z' }
