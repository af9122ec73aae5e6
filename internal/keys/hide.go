package keys

import (
	"encoding/hex"
	"io"
	"net/http"
	"slices"
	"strings"
)

// Redacted replaces a key in a log. It is Caddy's own word.
const Redacted = "REDACTED"

// Secrets are the keys that were sent with an attempt.
type Secrets []string

// Add makes a key one of the secrets.
func (s *Secrets) Add(key string) {
	if len(key) >= minLength && strings.Trim(key, "*") != "" { // stars are redacted already
		*s = append(*s, key)
	}
}

// maxEncodings is how often a secret may be percent-encoded and is still found.
// Each time costs a pass over the text, which may be long.
const maxEncodings = 3

// In reports whether a text contains a secret, percent-encoded up to maxEncodings times.
func (s Secrets) In(text string) bool {
	for range maxEncodings + 1 {
		if slices.ContainsFunc(s, func(secret string) bool { return strings.Contains(text, secret) }) {
			return true
		}
		if strings.IndexByte(text, '%') < 0 {
			return false
		}
		text = decode(text)
	}
	return false
}

// decode returns a text without percent-encoding.
func decode(text string) string {
	var b strings.Builder
	for i := 0; i < len(text); {
		c, n := byteAt([]byte(text[i:min(i+3, len(text))]))
		b.WriteByte(c)
		i += n
	}
	return b.String()
}

// byteAt returns the first byte of a text that is not empty, which may be
// percent-encoded, and how many bytes that takes.
func byteAt(text []byte) (c byte, n int) {
	if text[0] == '%' && len(text) >= 3 {
		if c, err := hex.DecodeString(string(text[1:3])); err == nil {
			return c[0], 3
		}
	}
	return text[0], 1
}

// Text replaces the secrets in a text.
func (s Secrets) Text(text string) string {
	for _, secret := range s {
		text = strings.ReplaceAll(text, secret, Redacted)
	}
	return text
}

// DropFrom empties the headers, or trailers, that contain a secret. Their names
// stay, because reverse_proxy counts trailers to know which were announced, unless
// the secret is in the name. net/http may have changed its case.
func (s Secrets) DropFrom(header http.Header) {
	for name, values := range header {
		switch {
		case slices.ContainsFunc(s, func(secret string) bool {
			return len(secret) <= len(name) && strings.Contains(strings.ToLower(name), strings.ToLower(secret))
		}):
			delete(header, name)
		case slices.ContainsFunc(values, s.In):
			header[name] = nil
		}
	}
}

// Body returns the body with a star in place of every byte of a secret, percent-encoded
// or not, so that its length stays the same.
func (s Secrets) Body(body io.ReadCloser) io.ReadCloser {
	return &starredBody{ReadCloser: body, secrets: s}
}

// Star does the same with a text, in place. If more of it may come, it returns where a secret may begin of which
// the end is not there.
func (s Secrets) Star(text []byte, complete bool) (ready int) {
	b := starredBody{secrets: s, held: text}
	if complete {
		b.err = io.EOF
	}
	b.star()
	return b.ready
}

type starredBody struct {
	io.ReadCloser
	secrets Secrets
	// held is read but not returned yet. No secret begins before ready.
	held  []byte
	ready int
	// err is how the reading ended.
	err error
}

// Read implements io.Reader.
func (b *starredBody) Read(p []byte) (int, error) {
	for b.ready == 0 && b.err == nil && len(p) > 0 {
		buf := make([]byte, len(p))
		var n int
		n, b.err = b.ReadCloser.Read(buf)
		b.held = append(b.held, buf[:n]...)
		b.star()
	}
	n := copy(p, b.held[:b.ready])
	b.held, b.ready = b.held[n:], b.ready-n
	if n > 0 || len(p) == 0 {
		return n, nil
	}
	return 0, b.err
}

// star stars the secrets in held, and stops where one may begin of which the end was not
// read yet.
func (b *starredBody) star() {
	for ; b.ready < len(b.held); b.ready++ {
		for _, secret := range b.secrets {
			n, whole := match(b.held[b.ready:], secret)
			switch {
			case whole:
				for i := range n {
					b.held[b.ready+i] = '*'
				}
			case n > 0 && b.err == nil:
				return
			}
		}
	}
}

// match reports whether a text begins with the whole secret, and of how many bytes it is
// there. If it is not whole, n is over 0 if the text ends within the secret.
func match(text []byte, secret string) (n int, whole bool) {
	for i := range len(secret) {
		if n == len(text) || text[n] == '%' && len(text)-n < 3 {
			return len(text), false
		}
		c, length := byteAt(text[n:])
		if c != secret[i] {
			if text[n] != secret[i] {
				return 0, false
			}
			length = 1
		}
		n += length
	}
	return n, true
}
