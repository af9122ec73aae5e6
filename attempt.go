package openailb

import (
	"errors"
	"maps"
	"net/http"
	"net/url"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/mediatype"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/replybody"
	"github.com/openai-lb/caddy-openai-lb/internal/roundtrip"
	"github.com/openai-lb/caddy-openai-lb/internal/tunnel"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// attempt asks the exchange's current backend, and asks it once more if it
// refuses a credential of which the source has a newer one.
func (t *Transport) attempt(ex *exchange, req *http.Request) *reply {
	b := ex.current.backend
	ex.startSpan(req.Context())
	credential, err := b.credential(req.Context())
	if err != nil {
		r := &reply{err: err, class: verdict.NoCredential}
		var later interface{ RetryAfter() time.Duration }
		if errors.As(err, &later) {
			r.wait = later.RetryAfter()
		}
		return r
	}
	r := t.send(ex, req, credential)
	if r.status == http.StatusUnauthorized && r.class != verdict.NotPermitted {
		if renewed, ok := b.renew(req.Context(), credential); ok && r.upload().Abandon() {
			r.discard()
			if c := ex.balancer.logger.Check(zap.InfoLevel, "credential renewed"); c != nil {
				c.Write(zap.String("backend", ex.current.Name))
			}
			r = t.send(ex, req, renewed)
		}
	}
	if (r.class == verdict.Credential || r.class == verdict.NotPermitted) && b.hasReplaced(r.credential) {
		r.class = verdict.NoCredential // the refusal does not apply to the credential that there is now
	}
	return r
}

// send sends the request to the current backend and judges what comes back.
func (t *Transport) send(ex *exchange, req *http.Request, credential Credential) *reply {
	b := ex.current.backend
	rt := new(roundTrip)
	rt.KeepInterimHeader = ex.balancer.plain // which decides on its headers itself
	rt.Begin(req.Context())
	r := &rt.reply
	r.trip = &rt.Trip
	r.credential, r.secrets = credential, b.secretsOf(credential, ex.credentials)
	rt.request, rt.url = *req.WithContext(rt), *req.URL
	out := &rt.request
	out.URL = &rt.url
	var model string
	if ex.balancer.plain {
		out.Header = maps.Clone(req.Header) // nobody changes the values in place
	} else {
		model = b.direct(out, ex, credential)
	}
	asksUsage := ex.asksUsage()
	if asksUsage {
		out.Header["Accept-Encoding"] = []string{"identity"} // its chunk has to be taken out again
	}
	rt.Upload = ex.body.Attach(out, replay.Options{
		Model: model, AskUsage: asksUsage, Request: &ex.asked.body, Repeatable: ex.asked.repeatable, Progress: &rt.Timeout,
	})

	timeout := t.ResponseHeaderTimeout
	switch {
	case ex.asked.handshake:
		timeout = t.HandshakeTimeout
	case ex.asked.body.Stream:
		timeout = t.StreamFirstEventTimeout
	}
	rt.Timeout.Alarms = &t.alarms
	rt.Timeout.Start(time.Duration(timeout), roundtrip.ErrNoReply)
	res, err := t.roundTripper.RoundTrip(out)
	if err == nil {
		// the first would make net/http's server panic, the second would be empty
		switch {
		case res.StatusCode < 100:
			err = roundtrip.ErrNoHTTP
		case res.StatusCode == http.StatusSwitchingProtocols && !tunnel.Switches(req, res):
			err = roundtrip.ErrWrongProtocol
		}
		if err != nil {
			res.Body.Close()
		}
	}
	if err != nil {
		rt.Timeout.End()
		r.fail(rt.Why(err))
		return r
	}
	if mediatype.Of(res.Header) != mediatype.EventStream && !rt.Timeout.Stop() {
		rt.Timeout.End()
		res.Body.Close()
		r.fail(rt.Why(roundtrip.ErrNoReply))
		return r
	}
	r.res, r.status = res, res.StatusCode
	r.body = t.watchOver(r, rt)
	t.judge(r, ex.asked.cost, rt)
	ex.checkHandshake(r, req)
	if r.class == verdict.Served {
		ex.learnFrom(r)
		t.open(ex, r)
	}
	rt.Timeout.End()
	if b.passesThrough() && r.class.OfCredential() {
		r.class = verdict.ClientError // the credential is the caller's
	}
	return r
}

// checkHandshake judges a 2xx that answers the handshake of a WebSocket. A backend for
// inference has failed. Other operations may be no WebSockets: their reply is passed on,
// except to an extended CONNECT, for which a 2xx means that the WebSocket is open (RFC
// 8441 section 5).
func (ex *exchange) checkHandshake(r *reply, req *http.Request) {
	switch {
	case !ex.asked.handshake || r.status < 200 || r.status >= 300:
	case ex.asked.infers:
		r.breakOff(roundtrip.ErrNoUpgrade)
	case req.ProtoMajor > 1:
		r.class, r.refusal = verdict.ClientError, apierror.NotUpgraded
	}
}

// fail records why there is no reply.
func (r *reply) fail(why roundtrip.Failure) {
	r.err, r.class, r.connected, r.uploading, r.refusal = why.Err, why.Class, why.Connected, why.Uploading, why.Refusal
}

// roundTrip is an attempt on its way. The parts of it that are not pointers are
// so to spare the garbage collector.
type roundTrip struct {
	roundtrip.Trip
	request http.Request
	url     url.URL
	reply   reply
	body    replybody.Body
}
