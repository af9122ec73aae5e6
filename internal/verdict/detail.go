package verdict

import (
	"regexp"
	"strings"
	"time"
)

// DetailOf returns what the text of an error adds to its cause, in words for
// operators: that a certificate has expired, say. It is empty if that is not
// known. It contains nothing of the text but a time, because the text may be
// from the backend.
func DetailOf(cause, text string) string {
	for _, d := range details {
		if d.cause != cause || !strings.Contains(text, d.part) {
			continue
		}
		if t, ok := timeIn(text, d.before); ok {
			return d.words + " at " + t.UTC().Format(time.RFC3339)
		}
		return d.words
	}
	return ""
}

// details are parts of the texts of errors, for some causes. The first match
// counts. If before is in the text, a time follows it.
var details = []struct{ cause, part, words, before string }{
	{"certificate", " is after ", "it expired", " is after "},
	{"certificate", " is before ", "it is not valid yet: that begins", " is before "},
	{"certificate", "has expired or is not yet valid", "it has expired, or is not valid yet", ""},
	{"certificate", "certificate is for another host", "it is for another host", ""},
	{"certificate", "certificate is valid for ", "it is for another host", ""},
	{"certificate", "not valid for any names", "it is for another host", ""},
	{"certificate", "doesn't contain any IP SANs", "it is for another host", ""},
	{"certificate", "signed by unknown authority", "its issuer is not trusted", ""},
	{"certificate", "not trusted", "its issuer is not trusted", ""},
	{"dns", "no such host", "there is no such name", ""},
	{"dns", "server misbehaving", "the resolver has failed", ""},
	{"dns", "i/o timeout", "the resolver does not answer", ""},
	{"dns", "connection refused", "the resolver does not answer", ""},
	{"tls", "server gave HTTP response to HTTPS client", "it answers without TLS", ""},
	{"tls", "first record does not look like a TLS handshake", "it answers without TLS", ""},
	{"tls", "certificate required", "it requires a client certificate", ""},
	{"tls", "protocol version", "there is no version that both sides know", ""},
	{"tls", "unrecognized name", "it does not know the host name", ""},
}

// timestamp matches a time as the errors of crypto/x509 have it.
var timestamp = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:Z|[+-]\d\d:\d\d)`)

// timeIn returns the time that follows before.
func timeIn(text, before string) (t time.Time, ok bool) {
	_, after, found := strings.Cut(text, before)
	if before == "" || !found {
		return t, false
	}
	t, err := time.Parse(time.RFC3339, timestamp.FindString(after))
	return t, err == nil
}
