package openailb

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"

	"go.uber.org/zap"
)

// minSecret is how long a secret is at least. What is shorter guards nothing,
// and would be found everywhere.
const minSecret = 8

// secrets are the keys that went with an attempt. A backend that repeats one,
// in an error page or a redirect, must not make us pass it on or log it.
type secrets []string

// secretsOf lists the keys that go with an attempt at the backend.
func (b *Backend) secretsOf(credential Credential, caller credentials) secrets {
	var s secrets
	s.add(keyIn(credential.Value))
	for _, value := range b.secretHeaders {
		s.add(keyIn(value))
	}
	if b.auth == authPassthrough {
		caller.withdraw(func(key string) bool {
			s.add(key)
			return false
		})
	}
	return s
}

func (s *secrets) add(key string) {
	if len(key) >= minSecret && strings.Trim(key, "*") != "" { // stars are starred already
		*s = append(*s, key)
	}
}

func (s secrets) in(text string) bool {
	return slices.ContainsFunc(s, func(secret string) bool { return strings.Contains(text, secret) })
}

// errorField is an error for a log. One of net/http's may repeat what the
// backend sent.
func (s secrets) errorField(err error) zap.Field {
	if err == nil {
		return zap.Skip()
	}
	text := err.Error()
	for _, secret := range s {
		text = strings.ReplaceAll(text, secret, redacted)
	}
	return zap.String("error", text)
}

// dropFrom empties the headers, or trailers, that hold a secret. Their names
// stay: reverse_proxy tells by the number of trailers which were announced.
func (s secrets) dropFrom(header http.Header) {
	for name, values := range header {
		if slices.ContainsFunc(values, s.in) {
			header[name] = nil
		}
	}
}

// guard takes the secrets out of a response: headers that hold one go, and in
// the body of an error or a redirect they are starred. A compressed body cannot
// be changed: unless text is all of it and holds none, it becomes an error of
// our own.
func (s secrets) guard(res *http.Response, text []byte, whole bool) {
	if len(s) == 0 {
		return
	}
	s.dropFrom(res.Header)
	switch {
	case res.StatusCode < 300:
	case !encoded(res.Header):
		res.Body = &starredBody{ReadCloser: res.Body, secrets: s}
	case !whole || s.in(string(text)):
		res.Body.Close()
		*res = *apiError{res.StatusCode, "The backend's error cannot be shown.", "server_error", "upstream_error"}.response(res.Request)
	}
}

// starredBody replaces every byte of the secrets in a body with a star, so
// that its length stays.
type starredBody struct {
	io.ReadCloser
	secrets secrets
	// held is what was read, and err how that ended.
	held []byte
	err  error
}

// Read implements io.Reader.
func (b *starredBody) Read(p []byte) (int, error) {
	for {
		ready := len(b.held)
		if b.err == nil {
			ready -= b.openEnd()
		}
		if ready > 0 || b.err != nil || len(p) == 0 {
			n := copy(p, b.held[:ready])
			b.held = b.held[n:]
			if n > 0 || len(p) == 0 {
				return n, nil
			}
			return 0, b.err
		}
		buf := make([]byte, len(p))
		var n int
		n, b.err = b.ReadCloser.Read(buf)
		b.held = append(b.held, buf[:n]...)
		for _, secret := range b.secrets {
			for at := bytes.Index(b.held, []byte(secret)); at >= 0; at = bytes.Index(b.held, []byte(secret)) {
				copy(b.held[at:], strings.Repeat("*", len(secret)))
			}
		}
	}
}

// openEnd is how many bytes at the end of what is held may begin a secret.
func (b *starredBody) openEnd() int {
	longest := 0
	for _, secret := range b.secrets {
		for n := min(len(secret)-1, len(b.held)); n > longest; n-- {
			if strings.HasPrefix(secret, string(b.held[len(b.held)-n:])) {
				longest = n
			}
		}
	}
	return longest
}
