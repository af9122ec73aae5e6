package openaiapi

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"
)

// ParseJSON reads the top-level members of a JSON object that a [Request] has fields for. A "model"
// that is not a string is no model.
//
// It is a scanner, not a parser: it goes over the bytes once, remembers a depth and no more, and
// jumps from quote to quote where strings are, which is what most of a prompt is. It does not
// judge what it can step over: if a body is not quite JSON, or not even UTF-8, the backend will
// refuse it. Where the scanner cannot go on, it returns what it has found so far. Of a body that
// was cut off, these are the members that came whole. For a body that is valid JSON the result is
// the same as from encoding/json, if keys are compared exactly.
func ParseJSON(body []byte) Request { return parseJSON(body, nil) }

func parseJSON(body []byte, p *Prompt) Request {
	r := Request{N: 1}
	i := 0
	if bytes.HasPrefix(body, bom) {
		i = len(bom) // RFC 8259 section 8.1 lets a parser ignore it
	}
	i = skipSpace(body, i)
	if i >= len(body) || body[i] != '{' {
		// Only an object can hold something, and this may still become one.
		r.Whole = i < len(body) && !bytes.HasPrefix(bom, body)
		return r
	}
	w := walker{body: body, places: placesInRequest}
	first := i + 1
	named := false    // there is a "model", whatever its value
	optioned := false // there are "stream_options"
	last := span{}    // of the last one's value, unless that is no string
	for {
		key := skipSpace(body, i+1) // past the brace or the comma
		if key >= len(body) || body[key] != '"' {
			r.Whole = key < len(body) && body[key] == '}' // no member, or a comma too many
			break
		}
		keyEnd := skipString(body, key)
		if keyEnd < 0 {
			break
		}
		m := memberOf(body[key+1 : keyEnd-1])
		named = named || m == memberModel
		colon := skipSpace(body, keyEnd)
		if colon >= len(body) || body[colon] != ':' {
			break
		}
		value := skipSpace(body, colon+1)
		end := -1
		at := elsewhere
		if m == memberNone {
			at = w.under(top, body[key+1:keyEnd-1])
		}
		if at != elsewhere {
			end = w.value(value, at, 1)
		}
		if end < 0 { // it is not quite JSON if it did not go well
			end = skipValue(body, value)
		}
		if end < 0 {
			break
		}
		switch m {
		case memberModel:
			last = span{}
			if body[value] == '"' {
				last = span{value, end}
				r.addModel(last)
			}
		case memberStreamOptions:
			r.StreamUsage, r.askUsage = readStreamOptions(body[value:end])
			r.askUsage.start, r.askUsage.end = r.askUsage.start+value, r.askUsage.end+value
			if optioned {
				r.askUsage = edit{}
			}
			optioned = true
		case memberNone, memberIncludeUsage:
			if p != nil {
				p.take(body[key+1:keyEnd-1], body[value:end])
			}
		default:
			if end < len(body) || m == memberStream || m == memberStore { // otherwise more digits may follow
				r.take(m, body[value:end])
			}
		}
		i = skipSpace(body, end)
		if i >= len(body) || body[i] != ',' {
			r.Whole = i < len(body) && body[i] == '}'
			break
		}
	}
	r.ids = w.ids
	if last.end > 0 {
		r.Model, r.HasModel = unquote(body[last.start:last.end])
	}
	if !r.HasModel {
		r.model, r.models = span{}, nil
	}
	if !named {
		r.addFirst(body, first)
	}
	if next := skipSpace(body, first); !optioned && next < len(body) && body[next] == '"' {
		r.askUsage = edit{span{first, first}, `"stream_options":{"include_usage":true},`}
	}
	return r
}

// bom is a byte order mark.
var bom = []byte("\xef\xbb\xbf")

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

// readStreamOptions reads the value of "stream_options": whether the stream is to tell its usage, and
// if it is not, how it can be asked for. Without text, it cannot be.
func readStreamOptions(value []byte) (usage bool, ask edit) {
	switch {
	case string(value) == "null":
		return false, edit{span{0, len(value)}, `{"include_usage":true}`}
	case value[0] != '{':
		return false, edit{}
	}
	ask = edit{span{1, 1}, `"include_usage":true`}
	named := false
	for i := 0; ; {
		key := skipSpace(value, i+1) // past the brace or the comma
		if key < len(value) && value[key] == '}' {
			return usage, ask
		}
		if key >= len(value) || value[key] != '"' {
			return usage, edit{}
		}
		keyEnd := skipString(value, key)
		if keyEnd < 0 {
			return usage, edit{}
		}
		colon := skipSpace(value, keyEnd)
		start := skipSpace(value, colon+1)
		end := skipValue(value, start)
		if end < 0 || value[colon] != ':' {
			return usage, edit{}
		}
		if memberOf(value[key+1:keyEnd-1]) == memberIncludeUsage {
			usage = string(value[start:end]) == "true"
			if ask = (edit{span{start, end}, "true"}); named {
				ask.text = "" // nobody can tell which of them a backend reads
			}
			named = true
		} else if ask.start == 1 {
			ask.text = `"include_usage":true,`
		}
		if i = skipSpace(value, end); i < len(value) && value[i] == '}' {
			return usage, ask
		}
	}
}

// longestMember is the length of the longest name that is known, in escapes of six bytes.
const longestMember = 6 * len("max_completion_tokens")

// memberOf tells which member an object's key names, of which quoted is what stands between the
// quotes.
func memberOf(quoted []byte) member {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return memberNamed(quoted)
	}
	var decoded [longestMember]byte
	key, ok := decodeKey(quoted, &decoded)
	if !ok {
		return memberNone
	}
	return memberNamed(key)
}

// decodeKey decodes a key that has escapes, unless it is none of those that we know. These consist
// of ASCII letters and underscores. JSON has one escape for each of them, \u00XX, so hardly
// anything is to be decoded, and nothing allocated.
func decodeKey(quoted []byte, into *[longestMember]byte) (key []byte, ok bool) {
	if len(quoted) > longestMember {
		return nil, false
	}
	n := 0
	for ; len(quoted) > 0; n++ {
		if quoted[0] != '\\' {
			into[n], quoted = quoted[0], quoted[1:]
			continue
		}
		if len(quoted) < 6 || string(quoted[:4]) != `\u00` || unhex(quoted[4]) < 0 || unhex(quoted[5]) < 0 {
			return nil, false
		}
		into[n], quoted = byte(unhex(quoted[4])<<4|unhex(quoted[5])), quoted[6:]
	}
	return into[:n], true
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

// structural marks the bytes that matter between strings. scalarEnd marks those that end a number,
// true, false or null.
var structural, scalarEnd = marks(`"{}[]`), marks(",}] \n\r\t")

func marks(chars string) (m [256]bool) {
	for i := range len(chars) {
		m[chars[i]] = true
	}
	return m
}

// skipValue returns the end of the value at b[i], or -1 if it is missing or incomplete. It counts
// braces and brackets alike, and does not check that they match.
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

func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c|0x20 && c|0x20 <= 'f':
		return int(c|0x20-'a') + 10
	}
	return -1
}

// unquote decodes a string. Hardly any model's name has an escape; for those that do, encoding/json
// does the work. In a string without an escape every byte is allowed, even a control character.
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
	if plain(s) {
		quoted := make([]byte, 0, len(s)+2)
		return append(append(append(quoted, '"'), s...), '"')
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // neither a string nor a Buffer can make it fail
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// plain reports whether a string stands in JSON as it is.
func plain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}
