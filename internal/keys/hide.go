package keys

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"
)

// Redacted replaces a key in a log. It is Caddy's own word.
const Redacted = "REDACTED"

// Secrets are the keys that were sent with an attempt.
type Secrets []string

// Add adds a key to the secrets.
func (s *Secrets) Add(key string) {
	if len(key) >= minLength && strings.Trim(key, "*") != "" { // stars are redacted already
		*s = append(*s, key)
	}
}

// randomLength is the length from which a key in a text is not a coincidence.
const randomLength = 16

// Random returns the secrets that cannot occur in content by chance. Shorter
// ones, which may be words such as "password", are replaced only in errors.
func (s Secrets) Random() Secrets {
	short := func(secret string) bool { return len(secret) < randomLength }
	if !slices.ContainsFunc(s, short) {
		return s
	}
	return slices.DeleteFunc(slices.Clone(s), short)
}

// In reports whether a text contains a secret, plain or in an encoding that its
// reader decodes.
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
	if !long || !hasEncoder(text) {
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

// DropFrom removes the values of headers or trailers that contain a secret.
// Their names stay, because the number of trailers must match the announced
// ones. A header with a secret in its name is removed. There, case is ignored,
// because net/http may have changed it.
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

// containsFold reports whether a text contains part, ignoring case.
func containsFold(text, part string) bool {
	for ; len(text) >= len(part); text = text[1:] {
		if text[0]|0x20 == part[0]|0x20 && strings.EqualFold(text[:len(part)], part) { // of ASCII, the case is one bit
			return true
		}
	}
	return false
}

// Body returns a body in which every byte of a secret, encoded or not, is
// replaced by a star. The length of the body stays the same.
func (s Secrets) Body(body io.ReadCloser) io.ReadCloser {
	return &starredBody{ReadCloser: body, secrets: s}
}

// Star replaces every byte of a secret in a text by a star, in place. If the
// text is not complete, it returns the index from which a secret may begin
// whose end is still missing.
func (s Secrets) Star(text []byte, complete bool) (ready int) {
	b := starredBody{secrets: s, buffered: text}
	if complete {
		b.err = io.EOF
	}
	b.star()
	return b.ready
}

type starredBody struct {
	io.ReadCloser
	secrets Secrets
	// buffered is data that was read and not returned yet. No secret begins
	// before ready.
	buffered []byte
	ready    int
	// err is the error or the end that followed the data.
	err error
}

// Read implements io.Reader.
func (b *starredBody) Read(p []byte) (int, error) {
	for b.ready == 0 && b.err == nil && len(p) > 0 {
		buf := make([]byte, len(p))
		var n int
		n, b.err = b.ReadCloser.Read(buf)
		b.buffered = append(b.buffered, buf[:n]...)
		b.star()
	}
	n := copy(p, b.buffered[:b.ready])
	b.buffered, b.ready = b.buffered[n:], b.ready-n
	if n > 0 || len(p) == 0 {
		return n, nil
	}
	return 0, b.err
}

// star replaces the secrets in buffered, and stops where a secret may begin
// whose end was not read yet. Each byte of each reply passes here. To be fast,
// it skips text in which no secret can begin, and checks two bytes before it
// tries to match.
func (b *starredBody) star() {
	if len(b.secrets) == 0 {
		b.ready = len(b.buffered)
		return
	}
	var next candidates
	for candidate := b.ready; b.ready < len(b.buffered); b.ready++ {
		if b.ready >= candidate {
			at := next.nextFrom(b.buffered, b.ready, b.secrets)
			b.ready, candidate = max(b.ready, at-(beginning-1)), at+1
			if b.ready == len(b.buffered) {
				break
			}
		}
		first := b.buffered[b.ready]
		for _, secret := range b.secrets {
			if !encodes(first) && (first != secret[0] || b.ready+1 < len(b.buffered) &&
				b.buffered[b.ready+1] != secret[1] && !encodes(b.buffered[b.ready+1])) {
				continue
			}
			n, whole := match(b.buffered[b.ready:], secret, maxDepth)
			if !whole {
				var literal int // of a secret that looks encoded itself
				literal, whole = match(b.buffered[b.ready:], secret, 0)
				n = max(n, literal)
			}
			switch {
			case whole:
				for i := range n {
					b.buffered[b.ready+i] = '*'
				}
			case n > 0 && b.err == nil:
				return
			}
		}
	}
}

// beginning is the length of the prefix of a secret that is searched for first.
const beginning = 4

// candidates finds the places in a text where a secret may be. Such a place
// contains the first beginning bytes of a secret, or an encoded character
// within these bytes, or is cut off within them at the end of the text.
// candidates caches the next place of each of these, so that it searches the
// text once for each. The zero candidates has searched nothing.
type candidates struct {
	// at are the next offsets plus one: of each encoder, and of the first few
	// secrets.
	at [8]int
	// bytes are the bytes of all secrets, once an encoder was found.
	bytes byteSet
}

// byteSet is a set of bytes, one bit for each.
type byteSet [4]uint64

func (b *byteSet) add(c byte)      { b[c>>6] |= 1 << (c & 63) }
func (b *byteSet) has(c byte) bool { return b[c>>6]>>(c&63)&1 != 0 }

// nextFrom returns the first candidate at or after an offset, or the length of
// the text.
func (c *candidates) nextFrom(text []byte, from int, secrets Secrets) int {
	if len(encoders)+len(secrets) > len(c.at) {
		return from // each byte is one
	}
	first := len(text)
	for i := range len(encoders) + len(secrets) {
		if c.at[i] <= from { // behind, or not known yet
			var n int // of a secret that is shorter than a beginning, each byte may be the first
			if i < len(encoders) {
				n = c.indexEncoded(text[from:], encoders[i], secrets)
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

// indexOf returns the index of a word in a text, or -1, like bytes.Index. It
// searches for the byte of the word that is rarest in replies.
func indexOf(text []byte, word string) int {
	rarest := 0
	for i := range word {
		if frequencies[word[i]] < frequencies[word[rarest]] {
			rarest = i
		}
	}
	for from := rarest; from < len(text); from++ {
		n := bytes.IndexByte(text[from:], word[rarest])
		if n < 0 {
			return -1
		}
		from += n
		if begin := from - rarest; begin+len(word) <= len(text) && string(text[begin:begin+len(word)]) == word {
			return begin
		}
	}
	return -1
}

// frequencies say how often a byte occurs in a JSON reply with an English text,
// compared to others. A byte that is not listed is rare.
var frequencies = func() (f [256]uint8) {
	const rareFirst = "XQZJYVKGWBHUODLFRCNPSTIMEAqzj9876xk543v021}{bgy_fpwmu]['.-,cdl:hrnsioate \""
	for i := range len(rareFirst) {
		f[rareFirst[i]] = uint8(1 + i)
	}
	return f
}()

// indexEncoded returns the index of the first encoder in a text that may begin
// an encoded character of a secret, or -1. Nearly all encoders in a JSON reply
// do not, such as those of \n, \" and \u00e9.
func (c *candidates) indexEncoded(text []byte, encoder byte, secrets Secrets) int {
	for at := 0; ; at++ {
		n := bytes.IndexByte(text[at:], encoder)
		if n < 0 {
			return -1
		}
		if c.bytes == (byteSet{}) {
			for _, secret := range secrets {
				for i := range len(secret) {
					c.bytes.add(secret[i])
				}
			}
		}
		if at += n; mayEncode(text[at:], &c.bytes) {
			return at
		}
	}
}

// mayEncode reports whether an encoder, with which the text begins, may begin
// an encoded character of this set. If that takes more than a look at the text
// after it, mayEncode reports true.
func mayEncode(text []byte, set *byteSet) bool {
	if len(text) < len(`\u0000`) || encodes(text[1]) || set.has(text[0]) {
		return true
	}
	switch next := text[1]; {
	case text[0] == '%':
		return isHex(next)
	case text[0] == '&':
		return next == '#' || isAlphanumeric(next)
	case next == 'u':
		return mayEncodeUTF16(text[2:6], set)
	case next == 'x':
		return true
	case next == '/', next == '"', next == '\'':
		return set.has(next)
	}
	return false
}

// mayEncodeUTF16 reports whether four hexadecimal digits may be those of a
// character of this set, or of an encoder. Each character beyond ASCII may be
// in the set if any is.
func mayEncodeUTF16(digits []byte, set *byteSet) bool {
	var code uint16
	for _, c := range digits {
		if !isHex(c) {
			return true // it may be encoded itself
		}
		if code = code<<4 | uint16(c&0xf); c > '9' {
			code += 9
		}
	}
	if code < utf8.RuneSelf {
		return encodes(byte(code)) || set.has(byte(code))
	}
	return set[2]|set[3] != 0
}

// encoders are the bytes with which an encoded character begins.
const encoders = `%\&`

func encodes(c byte) bool { return c == encoders[0] || c == encoders[1] || c == encoders[2] }

// hasEncoder is faster than strings.ContainsAny, which first builds a set.
func hasEncoder(text string) bool {
	return strings.IndexByte(text, encoders[0]) >= 0 || strings.IndexByte(text, encoders[1]) >= 0 ||
		strings.IndexByte(text, encoders[2]) >= 0
}

// match reports whether a text, decoded, begins with the whole secret, and
// returns the length of that part of the text. If whole is false, n is above 0
// if the text ends within the secret.
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
