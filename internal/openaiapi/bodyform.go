package openaiapi

import (
	"bytes"
	"cmp"
	"mime"
	"strings"
)

const (
	// maxBoundary is the maximum length of a boundary (RFC 2046 section 5.1.1).
	maxBoundary = 70
	// maxPartHeaders is how much of a part is searched for the end of its
	// headers. A form field has one or two header lines.
	maxPartHeaders = 16 << 10
)

// formBody has the properties of a body that is a form.
type formBody struct {
	// dashBoundary is the beginning of a delimiter: two dashes and the
	// boundary.
	dashBoundary []byte
	// nested reports whether a field's value is more than a plain text.
	nested bool
}

// parseForm reads the fields of a multipart/form-data body into a [Body]. The
// boundary is the parameter of the Content-Type.
//
// Like ParseJSON, it scans the bytes once, here from delimiter to delimiter.
// The fields may be in any order, before a file or after it. A part with a
// filename is a file, whatever its name is.
//
// Values are used as they are. Nothing is trimmed. A Content-Transfer-Encoding,
// which RFC 7578 section 4.7 deprecates, is not decoded, but makes the form
// unclear. In a body that was cut off, only complete parts count. Lines may end
// in a bare LF if the first delimiter's line does.
func parseForm(body []byte, boundary string) Body {
	none := Body{N: 1}
	if !isBoundary(boundary) {
		return none
	}
	delimiter := []byte("\r\n--" + boundary)
	b := Body{N: 1, form: &formBody{dashBoundary: delimiter[2:]}}

	// The first delimiter begins the body, or any line after a preamble.
	at, more := -1, false
	if bytes.HasPrefix(body, b.form.dashBoundary) {
		at, more = delimiterEnd(body, len(b.form.dashBoundary))
	}
	if at < 0 {
		b.models.addAt, at, more = nextDelimiter(body, 0, delimiter[1:])
		b.models.addAt++ // past the line feed
	}
	if at < 0 {
		return none
	}
	newline := "\r\n"
	if more && body[at-2] != '\r' {
		newline, delimiter = "\n", delimiter[1:]
	}

	namesModel, odd, delimiters := false, false, 1
	for more {
		start := at
		var end int
		end, at, more = nextDelimiter(body, start, delimiter)
		whole := at >= 0
		if whole {
			delimiters++
		} else {
			end = len(body)
		}
		field, headers, plain := fieldName(body[start:end], newline)
		odd = odd || !plain && (whole || headers > 0 || end-start >= maxPartHeaders)
		value := span{start + headers, end}
		b.form.nested = b.form.nested || isNested(field, body[value.start:value.end])
		switch at := inRequest.place(top, []byte(field)); {
		case at == memberModel:
			namesModel = true
			if whole {
				b.addModel(value)
			}
		case at == memberOddModel:
			odd = true
		case at == memberOddTier:
			b.addTier(OtherTier, true)
		case at == memberServiceTier:
			b.addTier(TierName(cmp.Or(string(body[value.start:value.end]), OtherTier)), b.ServiceTier != "")
		case whole && (at == top || at == memberModels):
			b.addOther(furtherModels{value, at == top})
		case whole && at == named && len(b.objects.ids) <= MaxIDs && isID(bareText(body[value.start:value.end])):
			b.objects.ids = append(b.objects.ids, id{ObjectID, value})
		case whole && at.isText() && value.end > value.start:
			b.objects.odd = value
		case whole:
			b.set(at, body[value.start:value.end])
		}
	}
	b.Whole = at >= 0                                    // the last delimiter is there, and it is the closing one
	b.Clear = !odd && body[skipSpace(body, 0)] != '{' && // otherwise some servers read the JSON before the form
		bytes.Count(wholeLines(body, b.Whole), b.form.dashBoundary) == delimiters // or find more parts than we do
	if last, ok := b.models.last(); ok {
		b.Model, b.HasModel = string(body[last.start:last.end]), true
	} else if !namesModel {
		b.models.before = "--" + boundary + newline + `Content-Disposition: form-data; name="model"` + newline + newline
		b.models.after = newline
	}
	return b
}

// isBoundary reports whether a boundary is valid by RFC 2046 section 5.1.1.
// Servers differ in how they read others: some trim white space at the end.
func isBoundary(boundary string) bool {
	if boundary == "" || len(boundary) > maxBoundary || boundary[len(boundary)-1] == ' ' {
		return false
	}
	for i := range len(boundary) {
		switch c := boundary[i]; {
		case 'a' <= c|0x20 && c|0x20 <= 'z', '0' <= c && c <= '9', strings.IndexByte("'()+_,-./:=? ", c) >= 0:
		default:
			return false
		}
	}
	return true
}

// isNested reports whether some servers may read a field as a member of an
// object, or its value as an object that names stored objects. A prompt is
// always a text, even if it begins like an object.
func isNested(field string, value []byte) bool {
	at := inRequest.place(top, []byte(field))
	begin := skipSpace(value, 0)
	return strings.ContainsAny(field, "[.") || inRequestOfAnyCase.place(top, []byte(field)) != at ||
		elsewhere < at && at < named && field != "prompt" &&
			begin < len(value) && (value[begin] == '{' || value[begin] == '[')
}

// wholeLines returns a body without its last line if that line was cut off.
func wholeLines(body []byte, whole bool) []byte {
	if whole {
		return body
	}
	return body[:bytes.LastIndexByte(body, '\n')+1]
}

// nextDelimiter finds the next delimiter, which is a line break, two dashes and
// the boundary. It returns the delimiter's start and end, or -1. more reports
// whether another part follows.
func nextDelimiter(body []byte, from int, delimiter []byte) (start, end int, more bool) {
	for {
		n := bytes.Index(body[from:], delimiter)
		if n < 0 {
			return -1, -1, false
		}
		start = from + n
		from = start + len(delimiter)
		if end, more = delimiterEnd(body, from); end >= 0 {
			return start, end, more
		}
	}
}

// delimiterEnd returns the end of the delimiter whose boundary ends at i. After
// the boundary, a delimiter has either two dashes, or white space (RFC 2046
// section 5.1.1, transport-padding) and a line break. If there is neither, it
// returns -1. more reports whether it is the line break.
func delimiterEnd(body []byte, i int) (end int, more bool) {
	if bytes.HasPrefix(body[i:], []byte("--")) {
		return i + 2, false
	}
	for i < len(body) && (body[i] == ' ' || body[i] == '\t') {
		i++
	}
	switch {
	case bytes.HasPrefix(body[i:], []byte("\r\n")):
		return i + 2, true
	case bytes.HasPrefix(body[i:], []byte("\n")):
		return i + 1, true
	}
	return -1, false
}

// fieldName returns the name of the form field in a part, and the length of the
// part's headers with the empty line after them. The name is empty if the part
// is a file or cannot be read. headers is 0 if the empty line is missing. plain
// reports whether all servers read the same name: to some, only the newline of
// the form ends a line.
func fieldName(part []byte, newline string) (name string, headers int, plain bool) {
	var disposition []byte
	plain = true
	head := part[:min(len(part), maxPartHeaders)]
	for at, inDisposition := 0, false; ; {
		n := bytes.IndexByte(head[at:], '\n')
		if n < 0 {
			return "", 0, false
		}
		start := at
		at += n + 1
		line := bytes.TrimSuffix(head[start:at-1], []byte("\r"))
		returns := start+len(line) < at-1
		plain = plain && returns == (newline == "\r\n")
		if len(line) == 0 {
			headers = at
			break
		}
		key, value, _ := bytes.Cut(head[start:at], []byte(":"))
		isDisposition := bytes.EqualFold(bytes.TrimSpace(key), contentDisposition)
		first := isDisposition && disposition == nil && len(key) == len(contentDisposition)
		plain = plain && isDisposition == first && bytes.IndexByte(line, '\r') < 0 && !isEncoded(key, value)
		if line[0] == ' ' || line[0] == '\t' {
			if inDisposition { // folded, which is white space to ParseMediaType
				disposition = disposition[:len(disposition)+at-start]
			}
			continue
		}
		if inDisposition = first; inDisposition {
			disposition = value
		}
	}
	kind, params, err := mime.ParseMediaType(string(disposition))
	if kind != "form-data" || err != nil {
		return "", headers, false
	}
	plain = plain && plainlyNamed(disposition, params["name"])
	if _, file := params["filename"]; file { // some servers take an empty one for none
		at := inRequest.place(top, []byte(params["name"]))
		return "", headers, plain && at != memberModel && at != memberOddModel && !at.isText()
	}
	return params["name"], headers, plain
}

var (
	contentDisposition      = []byte("Content-Disposition")
	contentTransferEncoding = []byte("Content-Transfer-Encoding")
)

// isEncoded reports whether a header of a part says that the value is encoded.
// Some servers decode it.
func isEncoded(key, value []byte) bool {
	if !bytes.EqualFold(bytes.TrimSpace(key), contentTransferEncoding) {
		return false
	}
	switch strings.ToLower(string(bytes.TrimSpace(value))) {
	case "7bit", "8bit", "binary":
		return false
	}
	return true
}

// plainlyNamed reports whether all servers read this name in a
// Content-Disposition. Some do not support encoded names (RFC 8187) or
// backslashes, which only a file's name may have.
func plainlyNamed(disposition []byte, name string) bool {
	disposition = bytes.ToLower(disposition)
	if bytes.Count(disposition, []byte("name*")) > bytes.Count(disposition, []byte("filename*")) {
		return false
	}
	escape := bytes.IndexByte(disposition, '\\')
	if escape < 0 {
		return true
	}
	before, file, ok := bytes.Cut(disposition[:escape], []byte(`filename="`))
	_, params, err := mime.ParseMediaType(string(before))
	return ok && err == nil && params["name"] == strings.ToLower(name) && bytes.IndexByte(file, '"') < 0
}
