package verdict

import (
	"bytes"
	"regexp"
	"strings"
	"time"
)

// maxErrorText is how much of an error body is read.
const maxErrorText = 64 << 10

// readErrorText finds the first wait that the text of an error states. Each way
// to say it begins with one of a few words, so one pass over the bytes looks
// for these, and then for the rest:
//
//	Please retry after 9 seconds.                              Azure OpenAI
//	Try again in 1 hour 2 minutes.                             Azure API Management
//	Quota will be replenished in 22.14:18:12.                  the same
//	Please try again in 1m2.5s.                                OpenAI, Groq
//	Please retry in 34.07s.                                    Gemini
//	You will regain access on 2026-11-01 at 00:00 UTC.         Anthropic
//	Your limit will reset at 2026-10-21 07:41:44.              Z.ai
//	"retryDelay": "34s"                                        google.rpc.RetryInfo
//	"resets_in_seconds": 392723, "resets_at": 1782365382       Codex
//
// The body is not decoded first: none of these has a character that JSON would
// escape, and not every gateway sends JSON. A time of day is compared with now,
// the sender's clock. Without a zone it is read as UTC. One that has passed
// says nothing.
func readErrorText(body []byte, now time.Time) (time.Duration, bool) {
	if len(body) > maxErrorText {
		body = body[:maxErrorText]
	}
	for i := range body {
		switch body[i] | 0x20 {
		case 't':
			if hasPrefixFold(body[i:], "try") {
				if wait, ok := readPhrase(body, i, now); ok {
					return wait, true
				}
			}
		case 'r', 'w', 'a':
			if i+1 == len(body) || strings.IndexByte("eav", body[i+1]|0x20) < 0 ||
				i > 0 && isLetter(body[i-1]) && (i == 1 || body[i-2] != '\\') {
				continue
			}
			for _, word := range []string{"reset", "replenish", "renew", "regain", "wait ", "available again"} {
				if !hasPrefixFold(body[i:], word) {
					continue
				}
				if wait, ok := readReturn(body[i+len(word):], now); ok {
					return wait, true
				}
			}
		}
	}
	return 0, false
}

// readPhrase reads the phrase around the "try" at body[i].
func readPhrase(body []byte, i int, now time.Time) (time.Duration, bool) {
	start := i
	if i >= 2 && hasPrefixFold(body[i-2:], "re") {
		start -= 2
	}
	if start > 0 && isLetter(body[start-1]) && (start == 1 || body[start-2] != '\\') {
		return 0, false // "no entry after 9"; but a letter may also be the rest of JSON's \n
	}
	rest := body[i+len("try"):]

	if after, ok := bytes.CutPrefix(rest, []byte("Delay")); ok {
		// Backslashes, because proxies quote the whole reply of another as a
		// string.
		value := bytes.TrimLeft(after, "\\\": \t\r\n")
		wait, n := scanDuration(value)
		return wait, n > 0
	}
	if wait, ok := readMember(rest, now); ok {
		return wait, true
	}

	if r, ok := cutWord(rest, "again"); ok {
		rest = r
	}
	for _, word := range []string{"on", "at"} {
		if r, ok := cutWord(rest, word); ok {
			return readTime(r, now)
		}
	}
	if r, ok := cutWord(rest, "in"); ok {
		return readWait(r)
	}
	r, ok := cutWord(rest, "after")
	if !ok {
		return 0, false
	}
	r = bytes.TrimLeft(r, spaces)
	if wait, ok := readWait(r); ok {
		return wait, true
	}
	if wait, ok := readTime(r, now); ok {
		return wait, true
	}
	// A bare number counts seconds, if it ends there: "retry after 20." but not
	// "retry after 3 failed calls" or "retry after 1,000 s".
	n := scanNumber(r)
	if n == 0 || !endsPhrase(r[n:]) {
		return 0, false
	}
	return parseNumber(string(r[:n]), time.Second)
}

// linking are the words that may stand between a word such as "reset" or
// "regain" and the time.
var linking = []string{
	"access", "will", "be", "is", "again", "date", "time", "for", "about", "approximately", "around", "on", "at", "in", "after", "until",
}

// readReturn reads the text after a word for the end of a limit.
func readReturn(rest []byte, now time.Time) (time.Duration, bool) {
	for _, end := range []string{"s", "ed", "ting", "ing"} {
		if hasPrefixFold(rest, end) && (len(rest) == len(end) || !isLetter(rest[len(end)])) {
			rest = rest[len(end):]
			break
		}
	}
	if wait, ok := readMember(rest, now); ok {
		return wait, true
	}
	rest = bytes.TrimPrefix(rest, []byte(":"))
	for range 4 {
		rest = bytes.TrimLeft(rest, spaces)
		if wait, ok := readWait(rest); ok {
			return wait, true
		}
		if wait, ok := readTime(rest, now); ok {
			return wait, true
		}
		before := len(rest)
		for _, word := range linking {
			if r, ok := bytes.CutPrefix(rest, []byte(word)); ok && len(r) > 0 &&
				strings.IndexByte(spaces+":", r[0]) >= 0 {
				rest = bytes.TrimPrefix(r, []byte(":"))
				break
			}
		}
		if len(rest) == before {
			break
		}
	}
	return 0, false
}

// readMember reads the value of a JSON member whose name begins before rest,
// such as resets_in_seconds or retry_after_ms.
func readMember(rest []byte, now time.Time) (time.Duration, bool) {
	end := bytes.IndexAny(rest[:min(len(rest), len("_after_seconds")+1)], "\\\"")
	if end < 0 {
		return 0, false
	}
	value, ok := bytes.CutPrefix(bytes.TrimLeft(bytes.TrimLeft(rest[end:], "\\\""), spaces), []byte(":"))
	if !ok {
		return 0, false
	}
	value = bytes.TrimLeft(value, spaces)
	number := string(value[:scanNumber(value)])
	switch strings.ToLower(string(rest[:end])) {
	case "_after", "_after_seconds", "_in_seconds", "_in", "_after_sec":
		return parseNumber(number, time.Second)
	case "_after_ms", "_in_ms":
		return parseNumber(number, time.Millisecond)
	case "_at", "_time":
		if number != "" && !bytes.HasPrefix(value[len(number):], []byte("-")) {
			return parseReset(number, nil, now)
		}
		return readTime(bytes.TrimLeft(value, "\\\""), now)
	}
	return 0, false
}

// readWait reads a duration, including one in words ("about an hour") or in
// clock form ("22.14:18:12": days, hours, minutes, seconds).
func readWait(text []byte) (time.Duration, bool) {
	text = bytes.TrimLeft(text, spaces)
	for _, word := range []string{"about ", "approximately ", "around "} {
		text = bytes.TrimPrefix(text, []byte(word))
	}
	for _, article := range []string{"a ", "an ", "one "} {
		if r, ok := bytes.CutPrefix(text, []byte(article)); ok {
			end := 0
			for end < len(r) && isLetter(r[end]) {
				end++
			}
			if unit := unitOf(string(r[:end])); unit > 0 && end > 2 {
				return unit, true
			}
		}
	}
	if len(text) == 0 || !isDigit(text[0]) {
		return 0, false
	}
	if m := timeSpan.FindSubmatch(text[:min(len(text), 24)]); m != nil {
		wait := time.Duration(0)
		for i, unit := range []time.Duration{24 * time.Hour, time.Hour, time.Minute, time.Second} {
			n, _ := parseFloat(string(m[i+1]))
			wait += scale(n, unit)
		}
		return wait, true
	}
	wait, n := scanDuration(text)
	return wait, n > 0
}

var timeSpan = regexp.MustCompile(`^(?:(\d{1,4})\.)?(\d{1,2}):(\d{2}):(\d{2})(?:\D|$)`)

// timeOfDay matches the forms of a date, with or without a time and a zone.
var timeOfDay = regexp.MustCompile(`^(\d{4}-\d{2}-\d{2}|\d{4}/\d{2}/\d{2}|` +
	`(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:st|nd|rd|th)?,? \d{4})` +
	`(?:(?:T|,? (?:at )?)(\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?)( ?[AaPp][Mm])?(?: ?(Z|UTC|GMT|[+-]\d{2}:?\d{2}))?)?`)

// readTime reads a date with or without a time, and returns how far away it is.
// It reports false for a time that has passed.
func readTime(text []byte, now time.Time) (time.Duration, bool) {
	text = bytes.TrimLeft(text, spaces)
	if len(text) == 0 || !isDigit(text[0]) && strings.IndexByte("JFMASOND", text[0]) < 0 {
		return 0, false
	}
	m := timeOfDay.FindSubmatch(text[:min(len(text), 64)])
	if m == nil {
		return 0, false
	}
	at, ok := parseDate(string(m[1]))
	if !ok {
		return 0, false
	}
	if clock := string(m[2]); clock != "" {
		layout := "15:04"
		if strings.Count(clock, ":") == 2 {
			layout = "15:04:05"
		}
		if half := strings.ToUpper(strings.TrimSpace(string(m[3]))); half != "" {
			layout, clock = strings.Replace(layout, "15", "3", 1)+"PM", clock+half
		}
		t, err := time.Parse(layout, clock)
		if err != nil {
			return 0, false
		}
		at = at.Add(t.Sub(time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC))) // which is what Parse begins with
	}
	if zone := strings.Replace(string(m[4]), ":", "", 1); len(zone) == len("+0000") {
		if z, err := time.Parse("-0700", zone); err == nil {
			_, offset := z.Zone()
			at = at.Add(-time.Duration(offset) * time.Second)
		}
	}
	wait := at.Sub(now)
	return wait, wait > 0
}

// parseDate parses a date in one of the forms of timeOfDay.
func parseDate(text string) (time.Time, bool) {
	text = strings.ReplaceAll(text, "/", "-")
	if t, err := time.Parse("2006-01-02", text); err == nil {
		return t, true
	}
	text = dateNoise.ReplaceAllString(text, "$1")
	for _, layout := range []string{"January 2 2006", "Jan 2 2006"} {
		if t, err := time.Parse(layout, text); err == nil {
			return t, true
		}
	}
	return time.Time{}, false
}

// dateNoise matches what stands between the parts of a date in words: "Jan.
// 2nd, 2026".
var dateNoise = regexp.MustCompile(`(\d)(?:st|nd|rd|th)|[.,]`)

// endsPhrase reports whether a phrase ends with the number before rest: neither
// more digits nor a unit follow.
func endsPhrase(rest []byte) bool {
	rest = bytes.TrimLeft(rest, " \t")
	if len(rest) == 0 {
		return true
	}
	return strings.IndexByte(".,;:!?()[]{}<>\"'\\\r\n", rest[0]) >= 0 && (len(rest) == 1 || !isDigit(rest[1]))
}

// parseDuration parses a text that is only a duration.
func parseDuration(v string) (time.Duration, bool) {
	wait, n := scanDuration(v)
	if n == 0 || n != len(v) {
		return 0, false
	}
	return wait, true
}

// scanDuration parses a duration at the start of text and returns its length,
// or 0 if there is no duration. It accepts "1m2.5s", "1 minute and 2.5 seconds"
// and everything that time.Duration.String returns. Units must get smaller, so
// that in "wait 20 s, 5 minutes at most" the second duration is not read as a
// part of the first.
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

// unitOf returns the length of a unit, or 0 if the word is not a unit.
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

// scanNumber returns the length of the decimal number at the start of text,
// with its fraction. The full stop at the end of a sentence does not count.
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

// cutWord returns the text after the word, if text begins with white space, the
// word, and white space or a colon: "Retry after: 5 s".
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

// isWord reports whether a byte may be part of a word. Every byte beyond ASCII
// counts as a letter, because the µ of "µs" consists of two of them.
func isWord(c byte) bool { return isLetter(c) || isDigit(c) || c == '_' || c >= 0x80 }
