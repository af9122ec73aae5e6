package verdict

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"regexp"
	"strings"
	"syscall"
)

// CauseError is an error that has its own word for the cause.
type CauseError struct{ Word, Text string }

// Error implements error.
func (e *CauseError) Error() string { return e.Text }

// CauseOf returns a word for the reason why there was no reply. It is the word
// of a CauseError or, for errors of the network and net/http, one of dns,
// refused, unroutable, reset, closed, certificate, tls, timeout and malformed.
// For all other errors it is other. It is empty without an error.
func CauseOf(err error) string {
	var known *CauseError
	var timeout net.Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &known):
		return known.Word
	case errors.As(err, new(*net.DNSError)):
		return "dns"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return "unroutable"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "reset"
	case isCertificate(err):
		return "certificate"
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, os.ErrDeadlineExceeded):
		return "timeout"
	case errors.As(err, new(tls.RecordHeaderError)), errors.As(err, new(tls.AlertError)):
		return "tls"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		errors.Is(err, io.ErrClosedPipe):
		return "closed"
	}
	return causeIn(err.Error())
}

func isCertificate(err error) bool {
	return errors.As(err, new(*tls.CertificateVerificationError)) || errors.As(err, new(x509.UnknownAuthorityError)) ||
		errors.As(err, new(x509.HostnameError)) || errors.As(err, new(x509.CertificateInvalidError))
}

// causeTexts are parts of the texts of errors whose type is not exported, or
// which Caddy wraps in its DialError, which has no Unwrap. The first match
// counts.
var causeTexts = []struct{ part, word string }{
	{"x509: ", "certificate"},
	{": lookup ", "dns"}, // before those that may be in the name of the host
	{"i/o timeout", "timeout"},
	{"deadline exceeded", "timeout"},
	{"handshake timeout", "timeout"},
	{"no route to host", "unroutable"},
	{"network is unreachable", "unroutable"},
	{"malformed ", "malformed"},
	{"invalid ", "malformed"},
	{"more than declared Content-Length", "malformed"},
	{"connection error: ", "malformed"}, // of HTTP/2
	{"server gave HTTP response to HTTPS client", "tls"},
	{"remote error: tls", "tls"},
	{"tls: ", "tls"},
	{"server closed idle connection", "closed"},
	{"client connection lost", "closed"},
	{"GOAWAY", "closed"},
	{"stream error", "reset"},
	{"connection refused", "refused"},
	{"no such host", "dns"},
	{"connection reset", "reset"},
	{"EOF", "closed"},
}

// wordings matches the errors of net/http and crypto/tls about a connection or
// a reply, up to the point where they quote the reply.
var wordings = regexp.MustCompile(`^(?:net/http: HTTP/1\.x transport connection broken: |http2: Transport: cannot retry err \[|readLoopPeekFailLocked: )*(?:` +
	`dial .*|` +
	`tls: failed to verify certificate: x509: certificate (?:signed by unknown authority|has expired or is not yet valid: current time \S+ is (?:after|before) \S+)|` +
	`http2: server sent GOAWAY and closed the connection; LastStreamID=\d+, ErrCode=[\w ]+|` +
	`http2: Transport received GOAWAY from server ErrCode:[\w ]+|` +
	`(?:http2: connection|connection|stream) error: [\w ]+(?:; [\w ]+)?|` +
	`(?:net/http|http2?|tls): [\w ,;/.-]+|` +
	`(?:malformed|invalid|bad|unsupported|empty|http chunk|chunked|header line) [\w -]+|` +
	`(?:Proxy Authentication Required|Forbidden|Bad Gateway|Service Unavailable|Gateway Timeout)$)`)

// OwnWords returns the error in words of this project or of the packages that
// report it. It leaves out quotes of a reply, which may contain a key.
func OwnWords(err error) error {
	if err == nil || err == io.EOF { //nolint:errorlint // only io.EOF itself ends a body
		return err
	}
	return ownWords(err)
}

// ownWords is separate from OwnWords because its variables escape to the heap,
// and nearly all reads of a reply return no error.
func ownWords(err error) error {
	var known *CauseError
	var network *net.OpError
	switch {
	case errors.As(err, &known):
		return known
	case errors.Is(err, io.EOF):
		return io.ErrUnexpectedEOF
	}
	for _, plain := range []error{io.ErrUnexpectedEOF, net.ErrClosed, io.ErrClosedPipe, context.Canceled,
		context.DeadlineExceeded} {
		if errors.Is(err, plain) {
			return plain
		}
	}
	switch {
	case errors.As(err, &network) && network.Op == "proxyconnect":
		inner := OwnWords(network.Err)
		return &CauseError{CauseOf(inner), "proxy: " + inner.Error()}
	case network != nil:
		return network
	case errors.As(err, new(x509.HostnameError)):
		return &CauseError{"certificate", "tls: the certificate is for another host"}
	}
	text := strings.TrimSpace(wordings.FindString(err.Error()))
	return &CauseError{causeIn(text), cmp.Or(text, "the connection failed")}
}

func causeIn(text string) string {
	for _, t := range causeTexts {
		if strings.Contains(text, t.part) {
			return t.word
		}
	}
	return "other"
}
