package keys

import (
	"bytes"
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

// randomLength is the length from which a key that occurs in a text is no
// coincidence.
const randomLength = 16

// Random returns the secrets that no content has by chance. Shorter ones are
// replaced only in errors: "password" is a word.
func (s Secrets) Random() Secrets {
	short := func(secret string) bool { return len(secret) < randomLength }
	if !slices.ContainsFunc(s, short) {
		return s
	}
	return slices.DeleteFunc(slices.Clone(s), short)
}

// In reports whether a text contains a secret, also in an encoding that its
// reader will undo.
func (s Secrets) In(text string) bool {
	long := false
	for _, secret := range s {
		if len(text) < len(secret) {
			continue // no encoding is shorter than what it encodes
		}
		if long = true; strings.Contains(text, secret) {
			return true
		}
	}
	if !long || !mayEncode(text) {
		return false
	}
	for encoded := []byte(text); len(encoded) > 0; encoded = encoded[1:] {
		for _, secret := range s {
			if _, whole := match(encoded, secret, maxDepth); whole {
				return true
			}
		}
	}
	return false
}

// Text replaces the secrets in a text.
func (s Secrets) Text(text string) string {
	for _, secret := range s {
		text = strings.ReplaceAll(text, secret, Redacted)
	}
	return text
}

// DropFrom empties the headers, or trailers, that contain a secret. Their names
// stay, because respond counts trailers to know which were announced, unless
// the secret is in the name. net/http may have changed its case.
func (s Secrets) DropFrom(header http.Header) {
	for name, values := range header {
		switch {
		case s.inName(name):
			delete(header, name)
		case slices.ContainsFunc(values, s.In):
			header[name] = nil
		}
	}
}

func (s Secrets) inName(name string) bool {
	for _, secret := range s {
		if containsFold(name, secret) {
			return true
		}
	}
	return false
}

// containsFold reports whether a text contains another one, in any case.
func containsFold(text, part string) bool {
	for ; len(text) >= len(part); text = text[1:] {
		if text[0]|0x20 == part[0]|0x20 && strings.EqualFold(text[:len(part)], part) { // of ASCII, the case is one bit
			return true
		}
	}
	return false
}

// Body returns the body with a star in place of every byte of a secret, encoded
// or not, so that its length stays the same.
func (s Secrets) Body(body io.ReadCloser) io.ReadCloser {
	return &starredBody{ReadCloser: body, secrets: s}
}

// Star does the same with a text, in place. If more of it may come, it returns
// where a secret may begin of which the end is not there.
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

// star stars the secrets in held, and stops where one may begin of which the
// end was not read yet. Each byte of each reply passes here, so it skips what
// can begin no secret, and looks at two bytes before it tries to match.
func (b *starredBody) star() {
	if len(b.secrets) == 0 {
		b.ready = len(b.held)
		return
	}
	var next candidates
	for near := b.ready; b.ready < len(b.held); b.ready++ {
		if b.ready >= near {
			at := next.after(b.held, b.ready, b.secrets)
			b.ready, near = max(b.ready, at-(beginning-1)), at+1
			if b.ready == len(b.held) {
				break
			}
		}
		first := b.held[b.ready]
		for _, secret := range b.secrets {
			if !encodes(first) && (first != secret[0] || b.ready+1 < len(b.held) && b.held[b.ready+1] != secret[1] && !encodes(b.held[b.ready+1])) {
				continue
			}
			n, whole := match(b.held[b.ready:], secret, maxDepth)
			if !whole {
				if all, literal := match(b.held[b.ready:], secret, 0); literal { // one that looks encoded itself
					n, whole = all, true
				}
			}
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

// beginning is how much of a secret is looked for at first.
const beginning = 4

// candidates finds where a secret may be in a text: each one contains the
// beginning of the secret as it is, or an encoder within that, or is cut off
// within it at the end of the text. It remembers where each of these comes
// next, so that the text is searched once for each. The zero candidates has
// looked nowhere.
type candidates struct {
	// at are the next offsets plus one: of encoders, and of the first few
	// secrets.
	at [8]int
}

// after returns the first candidate from an offset on, or the length of the
// text.
func (c *candidates) after(text []byte, from int, secrets Secrets) int {
	if len(encoders)+len(secrets) > len(c.at) {
		return from // each byte is one
	}
	first := len(text)
	for i := range len(encoders) + len(secrets) {
		if c.at[i] <= from { // behind, or not known yet
			var n int // of a secret that is shorter than a beginning, each byte may be the first
			if i < len(encoders) {
				n = bytes.IndexByte(text[from:], encoders[i])
			} else if secret := secrets[i-len(encoders)]; len(secret) >= beginning {
				n = indexOf(text[from:], secret[:beginning])
			}
			if n < 0 {
				n = len(text) - from
			}
			c.at[i] = from + n + 1
		}
		first = min(first, c.at[i]-1)
	}
	return first
}

// indexOf is bytes.Index for a text that is no slice of bytes.
func indexOf(text []byte, word string) int {
	for from := 0; ; {
		n := bytes.IndexByte(text[from:], word[len(word)-1])
		if n < 0 {
			return -1
		}
		from += n + 1
		if begin := from - len(word); begin >= 0 && string(text[begin:from]) == word {
			return begin
		}
	}
}

// encoders begin a character that is encoded.
const encoders = `%\&`

func encodes(c byte) bool { return c == encoders[0] || c == encoders[1] || c == encoders[2] }

// mayEncode reports whether there is one of them. strings.ContainsAny would
// first make a set of them.
func mayEncode(text string) bool {
	return strings.IndexByte(text, encoders[0]) >= 0 || strings.IndexByte(text, encoders[1]) >= 0 || strings.IndexByte(text, encoders[2]) >= 0
}

// match reports whether a text, decoded, begins with the whole secret, and how
// many bytes of the text that are. If it is not whole, n is over 0 if the text
// ends within the secret.
func match(text []byte, secret string, depth int) (n int, whole bool) {
	unfinished := 0
	for secret != "" {
		layers := depth
		if n < len(text) && !encodes(text[n]) {
			layers = 0
		}
		piece, length := decode(text[n:], layers)
		for length == 0 || !strings.HasPrefix(secret, piece) {
			if length == 0 {
				unfinished = len(text)
			}
			if layers--; layers < 0 {
				return unfinished, false
			}
			piece, length = decode(text[n:], layers)
		}
		secret, n = secret[len(piece):], n+length
	}
	return n, true
}
