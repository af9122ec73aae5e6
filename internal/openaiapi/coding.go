package openaiapi

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"
)

// ContentCoding returns the codings of a body with this header, in lower case
// and separated by commas, without identity. All lines of the header form one
// list (RFC 9110 section 5.3).
func ContentCoding(header http.Header) string {
	lines := header["Content-Encoding"]
	if len(lines) == 0 {
		return ""
	}
	var codings []string
	for _, line := range lines {
		for coding := range strings.SplitSeq(strings.ToLower(line), ",") {
			if coding = strings.TrimSpace(coding); coding != "" && coding != "identity" {
				codings = append(codings, coding)
			}
		}
	}
	return strings.Join(codings, ",")
}

// IsCompressed reports whether a body with this header may be compressed,
// because it has a coding.
func IsCompressed(header http.Header) bool { return ContentCoding(header) != "" }

// compressions are the codings that servers decode: those that IANA lists, and
// others in use.
var compressions = []string{"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress", "dcb", "dcz",
	"aes128gcm", "exi", "pack200-gzip", "snappy", "lz4", "lzma", "xz", "bzip2", "aws-chunked"}

// readAsIs reports whether servers read a body with this header without
// decoding it. Some clients name a charset as the coding, or "none", which
// servers ignore.
func readAsIs(header http.Header) bool {
	for coding := range strings.SplitSeq(ContentCoding(header), ",") {
		if slices.Contains(compressions, coding) {
			return false
		}
	}
	return true
}

// acceptedCodings are the codings that a backend may use. Decompress also
// decodes zstd, but only with a small window, so no backend is invited to use
// it.
var acceptedCodings = []string{"gzip", "deflate", "identity"}

// AcceptReadable removes codings from Accept-Encoding that Decompress may not
// be able to decode. For a stream, it removes all codings, because the
// beginning of a stream is read before it is passed on.
func AcceptReadable(header http.Header, stream bool) {
	if stream {
		delete(header, "Accept-Encoding")
		return
	}
	values := header["Accept-Encoding"]
	if values == nil || len(values) == 1 && (values[0] == "gzip" || values[0] == "gzip, deflate") { // as SDKs send it
		return
	}
	var kept []string
	for _, value := range values {
		for coding := range strings.SplitSeq(value, ",") {
			name, _, _ := strings.Cut(coding, ";")
			if slices.Contains(acceptedCodings, strings.ToLower(strings.TrimSpace(name))) {
				kept = append(kept, strings.TrimSpace(coding))
			}
		}
	}
	if delete(header, "Accept-Encoding"); kept != nil {
		header["Accept-Encoding"] = []string{strings.Join(kept, ", ")}
	}
}

// AcceptStream puts the type of a stream first in Accept. SDKs accept only
// application/json, even if the body asks for a stream. OpenAI looks at the
// body; but other servers look at Accept and would answer with JSON. NVIDIA's
// NIM wants text/event-stream there.
func AcceptStream(header http.Header) {
	switch accepted := strings.Join(header["Accept"], ", "); {
	case accepted == TypeJSON: // as of SDKs
		header["Accept"] = streamOrJSON
	case accepted == "":
		header["Accept"] = []string{TypeEventStream + ", */*"}
	case !strings.Contains(strings.ToLower(accepted), TypeEventStream):
		header["Accept"] = []string{TypeEventStream + ", " + accepted}
	}
}

// streamOrJSON is shared by all requests, and never changes.
var streamOrJSON = []string{TypeEventStream + ", " + TypeJSON}

// Decompress decodes a body as far as possible. raw may be only the beginning
// of the body. It returns at most limit bytes. all reports whether the text is
// complete.
func Decompress(raw []byte, encoding string, limit int64) (text []byte, all bool) {
	if len(raw) == 0 {
		return nil, true
	}
	if encoding == "" || strings.EqualFold(encoding, "identity") {
		return raw, true
	}
	decoder, release := openCoding(strings.ToLower(encoding), bytes.NewReader(raw))
	if decoder == nil {
		return raw, false
	}
	defer release()
	text, err := io.ReadAll(io.LimitReader(decoder, limit))
	return text, err == nil && int64(len(text)) < limit
}
