package verdict

import (
	"bytes"
	"strings"
	"time"
)

// maxErrorText is how much of an error body is looked at.
const maxErrorText = 64 << 10

// readErrorText finds the first wait that the text of an error states. All the ways to say it have
// "try" in common, so one pass over the bytes looks for that and then for the rest:
//
//	Please retry after 9 seconds.             Azure OpenAI
//	Try again in 50 seconds.                  Azure API Management
//	Please try again in 1m2.5s.               OpenAI, Groq
//	Please retry in 34.07s.                   Gemini
//	"retryDelay": "34s"                       google.rpc.RetryInfo
//
// The body is not decoded first: none of these has a character that JSON would escape, and not
// every gateway sends JSON.
func readErrorText(body []byte) (time.Duration, bool) {
	if len(body) > maxErrorText {
		body = body[:maxErrorText]
	}
	for i := range body {
		if body[i]|0x20 != 't' || !hasPrefixFold(body[i:], "try") {
			continue
		}
		if wait, ok := readPhrase(body, i); ok {
			return wait, true
		}
	}
	return 0, false
}

// readPhrase reads the words around the "try" at body[i].
func readPhrase(body []byte, i int) (time.Duration, bool) {
	start := i
	if i >= 2 && hasPrefixFold(body[i-2:], "re") {
		start -= 2
	}
	if start > 0 && isLetter(body[start-1]) && (start == 1 || body[start-2] != '\\') {
		return 0, false // "no entry after 9"; but a letter may also be the rest of JSON's \n
	}
	rest := body[i+len("try"):]

	if after, ok := bytes.CutPrefix(rest, []byte("Delay")); ok {
		// Backslashes, because proxies quote the whole reply of another as a string.
		value := bytes.TrimLeft(after, "\\\": \t\r\n")
		wait, n := scanDuration(value)
		return wait, n > 0
	}

	if r, ok := cutWord(rest, "again"); ok {
		rest = r
	}
	if r, ok := cutWord(rest, "in"); ok {
		wait, n := scanDuration(bytes.TrimLeft(r, spaces))
		return wait, n > 0
	}
	r, ok := cutWord(rest, "after")
	if !ok {
		return 0, false
	}
	r = bytes.TrimLeft(r, spaces)
	if wait, n := scanDuration(r); n > 0 {
		return wait, true
	}
	// A bare number counts seconds, if it ends there: "retry after 20." but not "retry after
	// 2026-10-21", "retry after 1,000 s" or "retry after 3 failed calls".
	n := scanNumber(r)
	if n == 0 || !endsPhrase(r[n:]) {
		return 0, false
	}
	return parseNumber(string(r[:n]), time.Second)
}

// endsPhrase reports whether a phrase ends with the number before rest: neither more digits nor a
// unit follow.
func endsPhrase(rest []byte) bool {
	rest = bytes.TrimLeft(rest, " \t")
	if len(rest) == 0 {
		return true
	}
	return strings.IndexByte(".,;:!?()[]{}<>\"'\\\r\n", rest[0]) >= 0 && (len(rest) == 1 || !isDigit(rest[1]))
}

// parseDuration reads a text that is nothing but a duration.
func parseDuration(v string) (time.Duration, bool) {
	wait, n := scanDuration(v)
	if n == 0 || n != len(v) {
		return 0, false
	}
	return wait, true
}

// scanDuration reads a duration at the start of text and returns how many bytes it takes, 0 if there
// is no duration. It reads "1m2.5s", "1 minute and 2.5 seconds" and everything that
// time.Duration.String writes. Units must get smaller, so that in "wait 20 s, 5 minutes at most"
// the second duration is not taken for a part of the first.
func scanDuration[T []byte | string](text T) (total time.Duration, length int) {
	last := time.Duration(1<<63 - 1)
	for at := 0; ; {
		n := scanNumber(text[at:])
		if n == 0 {
			return total, length
		}
		number := string(text[at : at+n])
		at = skip(text, at+n, " ")
		end := at
		for end < len(text) && isWord(text[end]) && !isDigit(text[end]) {
			end++
		}
		unit := unitOf(string(text[at:end]))
		if unit == 0 || unit >= last {
			return total, length
		}
		f, ok := parseFloat(number)
		if !ok {
			return total, length
		}
		total, length, last = add(total, scale(f, unit)), end, unit
		at = skip(text, end, " ,")
		if at+4 < len(text) && string(text[at:at+4]) == "and " {
			at += 4
		}
	}
}

// unitOf returns the length of a unit, 0 if the word is not a unit.
func unitOf(word string) time.Duration {
	if len(word) > len("milliseconds") {
		return 0
	}
	switch strings.ToLower(word) {
	case "ns":
		return time.Nanosecond
	case "us", "µs", "μs": // U+00B5, which Go writes, and U+03BC, which looks the same
		return time.Microsecond
	case "ms", "msec", "msecs", "millisecond", "milliseconds":
		return time.Millisecond
	case "s", "sec", "secs", "second", "seconds":
		return time.Second
	case "m", "min", "mins", "minute", "minutes":
		return time.Minute
	case "h", "hr", "hrs", "hour", "hours":
		return time.Hour
	case "d", "day", "days":
		return 24 * time.Hour
	}
	return 0
}

// scanNumber returns the length of the decimal number at the start of text: digits, and a fraction
// if there is one. A full stop at the end of a sentence is not a part of it.
func scanNumber[T []byte | string](text T) int {
	n := 0
	for n < len(text) && isDigit(text[n]) {
		n++
	}
	if n == 0 || n+1 >= len(text) || text[n] != '.' || !isDigit(text[n+1]) {
		return n
	}
	for n++; n < len(text) && isDigit(text[n]); n++ {
	}
	return n
}

const spaces = " \t\r\n"

// cutWord returns what follows if text goes on with white space, the word and white space. The word
// may also be followed by a colon: "Retry after: 5 s".
func cutWord(text []byte, word string) (rest []byte, ok bool) {
	r := bytes.TrimLeft(text, spaces)
	if len(r) == len(text) || !hasPrefixFold(r, word) {
		return nil, false
	}
	r = r[len(word):]
	if len(r) == 0 || !strings.ContainsRune(spaces+":", rune(r[0])) {
		return nil, false
	}
	return bytes.TrimPrefix(r, []byte(":")), true
}

func skip[T []byte | string](text T, at int, set string) int {
	for at < len(text) && strings.IndexByte(set, text[at]) >= 0 {
		at++
	}
	return at
}

func hasPrefixFold(text []byte, lower string) bool {
	if len(text) < len(lower) {
		return false
	}
	for i := range len(lower) {
		if text[i]|0x20 != lower[i] {
			return false
		}
	}
	return true
}

func isDigit(c byte) bool  { return '0' <= c && c <= '9' }
func isLetter(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }

// isWord takes any byte beyond ASCII for a letter: the µ of "µs" is two of them.
func isWord(c byte) bool { return isLetter(c) || isDigit(c) || c == '_' || c >= 0x80 }
