package openailb

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

var errNoHeaders = errors.New("no response headers in time")

// attempt makes the attempt, and once more if the backend refuses a credential
// of which the source has a newer one.
func (t *Transport) attempt(ex *exchange, m *member, req *http.Request) *reply {
	if m.backend == nil {
		return t.send(ex, m, req, Credential{})
	}
	credential, err := m.backend.credential(req.Context())
	if err != nil {
		r := &reply{err: err, class: verdict.Credential}
		var later interface{ RetryAfter() time.Duration }
		if errors.As(err, &later) {
			r.wait = later.RetryAfter()
		}
		return r
	}
	r := t.send(ex, m, req, credential)
	if r.status != http.StatusUnauthorized || r.class == verdict.NotPermitted {
		return r
	}
	renewed, ok := m.renew(req.Context(), credential)
	if !ok || !r.upload.abandon() {
		return r
	}
	r.discard()
	return t.send(ex, m, req, renewed)
}

// send sends the request to the member and judges what comes back.
func (t *Transport) send(ex *exchange, m *member, req *http.Request, credential Credential) *reply {
	ctx, cancel := context.WithCancelCause(req.Context())
	ex.cancels = append(ex.cancels, cancel)
	timeout := t.ResponseHeaderTimeout
	if ex.asked.body.Stream {
		timeout = t.StreamFirstEventTimeout
	}
	deadline := newHeaderDeadline(time.Duration(timeout), cancel)

	trace := &httptrace.ClientTrace{GotConn: limitResends(cancel)}
	if m.backend != nil { // a plain reverse_proxy decides on its headers itself
		trace.Got1xxResponse = emptyInterim
	}
	out := req.WithContext(httptrace.WithClientTrace(ctx, trace))
	out.URL = cloneURL(req.URL)
	out.Header = req.Header.Clone()
	r := &reply{credential: credential}
	if m.backend != nil {
		r.secrets = m.backend.secretsOf(credential, ex.credentials)
		r.upload = m.backend.direct(out, ex, credential, deadline.extend)
	} else {
		r.upload = ex.body.attach(out, &ex.asked.body, "", deadline.extend)
	}
	res, err := t.roundTripper.RoundTrip(out)
	if met := deadline.stop(); err == nil && !met {
		res.Body.Close()
		err = errNoHeaders
	}
	if err != nil {
		r.err, r.class = err, verdict.Unreachable
		switch cause := context.Cause(ctx); {
		case errors.Is(cause, errNoHeaders), isHeaderTimeout(err):
			r.err, r.class = errNoHeaders, verdict.Timeout
		case errors.Is(cause, errLostAgain):
			r.err = errLostAgain
		}
		return r
	}
	r.res, r.status, r.body = res, res.StatusCode, t.watchOver(res, r.secrets, cancel)
	t.judge(r, cancel)
	if r.class == verdict.Served {
		t.open(ex, r)
	}
	if m.passesThrough() && r.class.OfCredential() {
		r.class = verdict.ClientError // the credential is the caller's
	}
	return r
}

// emptyInterim takes the headers out of an interim response (RFC 9110 section
// 15.2), which reverse_proxy passes on at once, before anybody knows what comes
// of the attempt.
func emptyInterim(_ int, header textproto.MIMEHeader) error {
	clear(header)
	return nil
}

var errLostAgain = errors.New("the backend took the request on neither of two connections")

// limitResends ends an attempt for which net/http takes one connection after
// the other. It does so without end, or with growing pauses, while a backend
// sends GOAWAY or REFUSED_STREAM, where another backend could serve. Idle
// HTTP/1.1 connections that turn out dead are not counted: there are only so
// many.
func limitResends(cancel context.CancelCauseFunc) func(httptrace.GotConnInfo) {
	left := 2
	return func(got httptrace.GotConnInfo) {
		if got.Reused && !isHTTP2(got.Conn) {
			return
		}
		if left--; left < 0 {
			cancel(errLostAgain)
		}
	}
}

func isHTTP2(conn net.Conn) bool {
	secured, ok := conn.(interface{ ConnectionState() tls.ConnectionState })
	return ok && secured.ConnectionState().NegotiatedProtocol == "h2"
}

// headerDeadline cancels an attempt that brings no headers in time, counted
// from the last piece of the body that was sent.
type headerDeadline struct {
	timeout time.Duration

	mu    sync.Mutex
	timer *time.Timer // nil: the headers came, or will not
}

func newHeaderDeadline(timeout time.Duration, cancel context.CancelCauseFunc) *headerDeadline {
	return &headerDeadline{
		timeout: timeout,
		timer:   time.AfterFunc(timeout, func() { cancel(errNoHeaders) }),
	}
}

func (d *headerDeadline) extend() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Reset(d.timeout)
	}
}

// stop ends the deadline and reports whether it was met.
func (d *headerDeadline) stop() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	met := d.timer.Stop()
	d.timer = nil // the request keeps d for as long as its reply streams
	return met
}

// isHeaderTimeout recognizes the http transport's own response_header_timeout,
// for which net/http has no exported error, as opposed to one of dialing or TLS.
func isHeaderTimeout(err error) bool {
	return strings.Contains(err.Error(), "timeout awaiting response headers")
}
