package openaiapi

import (
	"net/http"
	"strings"
)

// The media types of these APIs.
const (
	TypeJSON        = "application/json"
	TypeEventStream = "text/event-stream"
	typeForm        = "multipart/form-data"
)

// ContentType returns the media type of a body with this header, in lower case
// and without parameters.
func ContentType(header http.Header) string {
	values := header["Content-Type"]
	if len(values) == 0 {
		return ""
	}
	if value := values[0]; value == TypeJSON || value == TypeEventStream {
		return value
	}
	value, _, _ := strings.Cut(values[0], ";")
	return strings.ToLower(strings.TrimSpace(value))
}

// DisputedType reports whether servers may read a body with this header as
// different types or texts. The header may have several types, a type that only
// some servers read as a form, or a boundary or charset that only some support.
func DisputedType(header http.Header) bool {
	values := header["Content-Type"]
	if len(values) != 1 || values[0] == TypeJSON {
		return len(values) > 1
	}
	value := strings.ToLower(values[0])
	if ContentType(header) != typeForm && (strings.Contains(value, "multipart/") || strings.Contains(value, "form-urlencoded")) {
		return true
	}
	return strings.Contains(value, "boundary*") || hasOddCharset(value)
}

// hasOddCharset reports whether a media type in lower case has a charset in
// which ASCII means something else.
func hasOddCharset(value string) bool {
	for _, rest, more := strings.Cut(value, "charset"); more; _, rest, more = strings.Cut(rest, "charset") {
		charset, _, _ := strings.Cut(rest, ";")
		switch name, ok := strings.CutPrefix(charset, "="); strings.Trim(name, ` "`) {
		case "utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin1", "windows-1252":
			if ok {
				continue
			}
		}
		return true
	}
	return false
}
