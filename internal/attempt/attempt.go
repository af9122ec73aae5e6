// Package attempt sends one request to one backend and finds out what its reply means.
//
// A [Sender] has what all attempts of a transport share. A [Request] says what is sent. It becomes
// a [Reply]: the response, if there is one, its class, and what the class was found by. The reply
// has been read as far as its class depends on it, and nothing of it has gone to the client. What
// follows is decided elsewhere: a reply is either committed to the client, kept, or discarded.
package attempt

import (
	"net/http"
	"net/url"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/mediatype"
	"github.com/openai-lb/caddy-openai-lb/internal/redact"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// Sender sends requests to backends.
type Sender struct {
	RoundTripper http.RoundTripper
	Options
	// Statuses are those that are classified: statuses, and 4 and 5 for all of 4xx and 5xx. None: all.
	Statuses []int

	alarms alarms
}

// Close stops unused timers.
func (s *Sender) Close() { s.alarms.Close() }

// Request is a request for one backend. It is sent once.
type Request struct {
	// Proxied is the request of which a copy is sent, with what follows in place of its own.
	Proxied *http.Request
	URL     url.URL
	Host    string
	Header  http.Header
	Body    *replay.Body
	// Change is what is changed in the body.
	Change replay.Options

	Asks Asks
	// Secrets are the keys that are sent with the request. No reply may show one.
	Secrets redact.Secrets
	// Fields decides on the fields of the reply.
	Fields Fields
	// IDs returns what learns from a reply that served the request. It may be nil, and return nil.
	IDs func(*http.Response) IDReader

	trip  trip
	out   http.Request
	reply Reply
	body  body
}

// Asks is what the request asks for, as far as the meaning of the reply depends on it.
type Asks struct {
	Infers, Handshake, Stream, Repeatable bool
	// Responds reports whether a response object in the reply is made by this request.
	Responds bool
	// Cost is how many tokens it counts for in a rate limit.
	Cost int64
}

// Fields decides which fields of a reply go on.
type Fields interface {
	// Interim removes fields from the header of an interim response (RFC 9110 section 15.2), which goes
	// on at once, before it is known what comes of the attempt.
	Interim(http.Header)
	// Final removes fields from a header, or from trailers.
	Final(http.Header)
}

// IDReader reads the body of a reply as it passes.
type IDReader interface {
	// Join makes it read the events of a stream, in place of Watch.
	Join(*sse.Watcher)
	// Watch reads the next bytes. end reports whether they are the last.
	Watch(p []byte, end bool)
}

// Send sends the request and returns its reply.
func (s *Sender) Send(r *Request) *Reply {
	r.begin(s)
	reply := &r.reply
	reply.request = r
	res, err := s.RoundTripper.RoundTrip(&r.out)
	if err == nil {
		// the first would make net/http's server panic, the second would be empty
		switch {
		case res.StatusCode < 100:
			err = ErrNoHTTP
		case res.StatusCode == http.StatusSwitchingProtocols && !switches(r.Proxied, res):
			err = ErrWrongProtocol
		case mediatype.Of(res.Header) != mediatype.EventStream && !r.trip.timeout.stop():
			err = ErrNoReply
		}
		if err != nil {
			res.Body.Close()
		}
	}
	if err != nil {
		r.trip.timeout.end()
		reply.Failure = r.trip.why(err)
		reply.Class = reply.Failure.class
		return reply
	}
	reply.Response, reply.Status = res, res.StatusCode
	reply.body = r.watchOver(s, res)
	s.judge(reply)
	reply.judgeHandshake()
	if reply.Class == verdict.Served {
		s.open(reply)
	}
	r.trip.timeout.end()
	return reply
}

// begin makes the request that goes out, and limits its time.
func (r *Request) begin(s *Sender) {
	r.trip.fields = r.Fields
	r.trip.begin(r.Proxied.Context())
	r.out = *r.Proxied.WithContext(&r.trip)
	r.out.URL, r.out.Host, r.out.Header = &r.URL, r.Host, r.Header
	if r.Change.AskUsage {
		r.Header["Accept-Encoding"] = []string{"identity"} // its chunk has to be taken out again
	}
	r.Change.Repeatable, r.Change.Progress = r.Asks.Repeatable, &r.trip.timeout
	r.trip.upload = r.Body.Attach(&r.out, r.Change)
	limit := s.ResponseHeaderTimeout
	switch {
	case r.Asks.Handshake:
		limit = s.HandshakeTimeout
	case r.Asks.Stream:
		limit = s.StreamFirstEventTimeout
	}
	r.trip.timeout.alarms = &s.alarms
	r.trip.timeout.start(time.Duration(limit), ErrNoReply)
}

// watchOver puts a limit on the time of each read of a response's body. It returns
// nil for a response without a body, and for one whose body is a connection.
func (r *Request) watchOver(s *Sender, res *http.Response) *body {
	if res.Body == http.NoBody || res.StatusCode == http.StatusSwitchingProtocols {
		return nil
	}
	r.body = body{source: res.Body, response: res, secrets: r.Secrets, fields: r.Fields,
		deadline: &r.trip.timeout, idle: time.Duration(s.StreamIdleTimeout), mustEnd: s.StreamRequireEnd}
	res.Body = &r.body
	return &r.body
}

// judgeHandshake judges a 2xx that answers the handshake of a WebSocket. A backend for
// inference has failed. Other operations may be no WebSockets: their reply is passed on,
// except to an extended CONNECT, for which a 2xx means that the WebSocket is open (RFC
// 8441 section 5).
func (r *Reply) judgeHandshake() {
	asks := &r.request.Asks
	switch {
	case !asks.Handshake || r.Status < 200 || r.Status >= 300:
	case asks.Infers:
		r.breakOff(ErrNoUpgrade)
	case r.request.Proxied.ProtoMajor > 1:
		r.Class, r.Refusal = verdict.ClientError, apierror.NotUpgraded
	}
}
