// Package contentcoding reads bodies that are compressed (RFC 9110 section
// 8.4), because what an error means may be in its body.
package contentcoding

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"
)

// Compressed reports whether the body after this header is compressed.
func Compressed(header http.Header) bool {
	encoding := header["Content-Encoding"]
	return len(encoding) > 0 && encoding[0] != "" && !strings.EqualFold(encoding[0], "identity")
}

// readable are the codings that a backend may use. Decode knows zstd as well,
// but only with a small window, so no backend is invited to use it.
var readable = []string{"gzip", "deflate", "identity"}

// AcceptReadable removes from Accept-Encoding the codings that Decode may not
// be able to undo.
func AcceptReadable(header http.Header) {
	if values := header["Accept-Encoding"]; values == nil || len(values) == 1 && values[0] == "gzip" {
		return
	}
	var kept []string
	for _, value := range header["Accept-Encoding"] {
		for coding := range strings.SplitSeq(value, ",") {
			name, _, _ := strings.Cut(coding, ";")
			if slices.Contains(readable, strings.ToLower(strings.TrimSpace(name))) {
				kept = append(kept, strings.TrimSpace(coding))
			}
		}
	}
	if delete(header, "Accept-Encoding"); kept != nil {
		header["Accept-Encoding"] = []string{strings.Join(kept, ", ")}
	}
}

// Decode undoes the compression of a body, as far as it can: raw may be only
// the beginning, which may be enough. It returns at most limit bytes. all tells
// that the text is complete.
func Decode(raw []byte, encoding string, limit int64) (text []byte, all bool) {
	if len(raw) == 0 {
		return nil, true
	}
	if encoding == "" || strings.EqualFold(encoding, "identity") {
		return raw, true
	}
	decoder, release := open(strings.ToLower(encoding), bytes.NewReader(raw))
	if decoder == nil {
		return raw, false
	}
	defer release()
	text, err := io.ReadAll(io.LimitReader(decoder, limit))
	return text, err == nil && int64(len(text)) < limit
}
