// Package cause says in a word why there was no reply.
package cause

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
)

// Error is an error with a word for it.
type Error struct{ Word, Text string }

// Error implements error.
func (e *Error) Error() string { return e.Text }

// Of returns the word for an error: that of an Error, one of dns, refused,
// unroutable, reset, closed, certificate, tls, timeout and malformed for what
// the network and net/http say, or other. It is empty if there is no error.
func Of(err error) string {
	var own *Error
	var timeout net.Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &own):
		return own.Word
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
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed), errors.Is(err, io.ErrClosedPipe):
		return "closed"
	}
	return ofText(err.Error())
}

func isCertificate(err error) bool {
	return errors.As(err, new(*tls.CertificateVerificationError)) || errors.As(err, new(x509.UnknownAuthorityError)) ||
		errors.As(err, new(x509.HostnameError)) || errors.As(err, new(x509.CertificateInvalidError))
}

// texts are parts of errors whose type is not exported, or which Caddy has put
// into its DialError, which has no Unwrap. The first match counts.
var texts = []struct{ part, word string }{
	{"x509: ", "certificate"},
	{"i/o timeout", "timeout"},
	{"deadline exceeded", "timeout"},
	{"no route to host", "unroutable"},
	{"network is unreachable", "unroutable"},
	{"malformed HTTP", "malformed"},
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

func ofText(text string) string {
	for _, t := range texts {
		if strings.Contains(text, t.part) {
			return t.word
		}
	}
	return "other"
}
